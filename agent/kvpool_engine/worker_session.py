"""One worker session: its transfers, its events, its copies, its end.

Promises: a transfer that was begun here ends here, at the latest when the session does (LOADED_OR_REPORTED), and blocks
that somebody might still touch then are withheld before the caller hears of the end (FENCED). An event for a transfer
that is over is dropped and counted. Events that overtake the answer to their own call wait for it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from google.protobuf.message import Message

from kvpool_engine.copying import Copier
from kvpool_engine.deadlines import now
from kvpool_engine.session import LOAD, RELEASE, SAVE, CallError, Session
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import (
    ChunkFailure,
    FailReason,
    FenceState,
    TransferKind,
    TransferResult,
)
from kvpool_engine.withheld import Hold, Withheld
from kvpool_wire import agent_pb2 as pb

logger = logging.getLogger(__name__)

MAX_TRANSFERS: Final = 1024
"""Transfers open at once (BOUNDED); the agent's own queue is shorter."""

MAX_EARLY: Final = 4096
"""Events that may wait for the answer to a call; far more than an agent sends within one round trip."""

CONFIRM_TIMEOUT: Final = 1.0
"""Seconds that one question whether blocks are free may take."""

CONFIRM_FIRST: Final = 0.05
CONFIRM_LONGEST: Final = 5.0
"""Seconds between two questions whether withheld blocks are free."""


class WorkerSession:
    """What a worker client knows of one session. Belongs to the client's loop."""

    def __init__(
        self,
        session: Session,
        *,
        copier: Copier | None,
        withheld: Withheld,
        synchronise: Callable[[], None],
        on_device: bool = False,
        late: Callable[[], None],
    ) -> None:
        self.session = session
        self.over = False
        """True once the session has ended: nothing begins here any more."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._copier = copier
        self._withheld = withheld
        self._synchronise = synchronise
        self._on_device = on_device
        """The blocks are a device's: what a dead process had queued there may still run."""
        self._late = late
        self._open: dict[int, Transfer] = {}
        self._starting: dict[Transfer, asyncio.Event] = {}
        """Calls under way; each event is set when its transfer has a number, or never will."""
        self._early: list[tuple[int, pb.ServerEvent]] = []
        self._holds: list[Hold] = []

    # ------------------------------------------------------------------------------------------------- calls

    async def load(self, transfer: Transfer, request: pb.LoadRequest, *, deadline: float) -> None:
        """Begin a load; whatever happens, `transfer` resolves by `deadline`, a time of the loop's clock."""
        response = await self._begin(transfer, request, deadline)
        if response is not None:
            self._admit(transfer, response.transfer, deadline)

    async def save(self, transfer: Transfer, request: pb.SaveRequest, *, deadline: float) -> None:
        """Begin a save; whatever happens, `transfer` resolves by `deadline`."""
        response = await self._begin(transfer, request, deadline)
        if response is None:
            return
        if response.transfer:
            self._admit(transfer, response.transfer, deadline)
        else:
            transfer.skip(response.skipped)

    async def _begin(self, transfer: Transfer, request: Message, deadline: float) -> Any:
        """The answer; None when there is none and `transfer` was resolved accordingly."""
        if len(self._open) + len(self._starting) >= MAX_TRANSFERS:
            transfer.fail_all(
                FailReason.INTERNAL, f"{MAX_TRANSFERS} transfers are under way already; wait for some"
            )
            return None
        method = LOAD if transfer.kind is TransferKind.LOAD else SAVE
        self._starting[transfer] = asyncio.Event()
        try:
            response = await self.session.call(method, request, timeout=deadline - now())
        except CallError as error:
            error.raise_if_rejected()
            withheld = error.uncertain and self._abandon(transfer, str(error))
            reason = FailReason.TIMED_OUT if error.timed_out else FailReason.INTERNAL
            transfer.fail_all(reason, str(error), withheld=withheld)
            return None
        except asyncio.CancelledError:
            # The caller gave up, the agent may not have: nobody knows the transfer's id.
            withheld = self._abandon(transfer, "the call was cancelled")
            transfer.fail_all(FailReason.CANCELLED, "the call was cancelled", withheld=withheld)
            raise
        finally:
            self._starting.pop(transfer).set()
            # With the last call answered nobody is left to claim what waits, but for the transfer just answered.
            asyncio.get_running_loop().call_soon(self._sweep)
        if self.over:
            withheld = self._abandon(transfer, self.session.end_reason)
            transfer.fail_all(
                FailReason.INTERNAL, f"session ended: {self.session.end_reason}", withheld=withheld
            )
            return None
        return response

    def _admit(self, transfer: Transfer, number: int, deadline: float) -> None:
        transfer.id, transfer.session = number, self
        if number in self._open:
            why = f"the agent gave the number {number} to two transfers"
            transfer.fail_all(FailReason.INTERNAL, why, withheld=self._abandon(transfer, why))
            return
        if transfer.stopped.is_set():
            why = "released before it had begun"
            transfer.fail_all(FailReason.CANCELLED, why, withheld=self._abandon(transfer, why))
            return
        self._open[number] = transfer
        timer = asyncio.get_running_loop().call_at(deadline, self._expire, transfer)
        transfer.when_done(timer.cancel)
        mine = [event for early, event in self._early if early == number]
        self._early = [(early, event) for early, event in self._early if early != number]
        for event in mine:
            self.handle(event)

    def _expire(self, transfer: Transfer) -> None:
        """BOUNDED: the caller's deadline has come, and the agent has not reported."""
        if self._open.pop(transfer.id, None) is None:
            return
        why = "no report from the agent by the deadline"
        transfer.fail_all(FailReason.TIMED_OUT, why, withheld=self._abandon(transfer, why))

    async def release(
        self, request: pb.ReleaseRequest, *, request_id: str | None, transfer: Transfer | None, timeout: float
    ) -> FenceState:
        """Stop this library's own copies first, then ask the agent; what stays unknown is withheld."""
        loop_end = now() + timeout
        certain = await self._stop_starting(request_id, transfer, timeout)
        mine = [found for found in self._open.values() if _meant(found, request_id, transfer)]
        if self._copier is not None:
            await self._copier.quiet(mine, max(0.0, loop_end - now()))
        try:
            response = await self.session.call(RELEASE, request, timeout=loop_end - now())
            state = FenceState(response.state) if response.state else FenceState.FENCE_UNCONFIRMED
        except CallError as error:
            error.raise_if_rejected()
            state = FenceState.FENCE_UNCONFIRMED
        for found in mine:
            if self._open.get(found.id) is not found:
                continue  # it has ended meanwhile
            if state is FenceState.FENCED and not self._copying(found):
                continue  # its report is on the way
            del self._open[found.id]
            withheld = self._abandon(found, "its release was not confirmed")
            found.fail_all(FailReason.CANCELLED, "released", withheld=withheld)
        return state if certain else FenceState.FENCE_UNCONFIRMED

    async def _stop_starting(self, request_id: str | None, transfer: Transfer | None, timeout: float) -> bool:
        """A release must not overtake the load that it is meant for: wait until each has a number, or never will.

        True when none is starting any more; the blocks of those that are become withheld.
        """
        starting = {
            found: event for found, event in self._starting.items() if _meant(found, request_id, transfer)
        }
        for found in starting:
            found.stopped.set()
        try:
            async with asyncio.timeout(timeout):
                for event in starting.values():
                    await event.wait()
        except TimeoutError:
            for found, event in starting.items():
                if not event.is_set():
                    hold = self._withheld.hold(owner=found, why="released before it had begun")
                    self._spawn(self._lift_when_started(hold, event))
            return False
        return True

    async def _lift_when_started(self, hold: Hold, started: asyncio.Event) -> None:
        """Whatever has become of the call by then withholds its blocks itself, where it must."""
        await started.wait()
        self._withheld.lift(hold)

    def began(self, transfer: Transfer) -> bool:
        """True while a transfer is under way in the session."""
        return self._open.get(transfer.id) is transfer

    # ------------------------------------------------------------------------------------------------ events

    def handle(self, event: pb.ServerEvent) -> None:
        """Deliver one event of the stream."""
        done = event.WhichOneof("event") == "transfer_done"
        number = event.transfer_done.transfer if done else event.copy_wanted.transfer
        transfer = self._open.get(number)
        if transfer is None:
            if self._starting and len(self._early) < MAX_EARLY:
                self._early.append((number, event))
            else:
                self._drop(number, event)
        elif done:
            self._finish(transfer, event.transfer_done)
        else:
            # Begun here, not in a task: the next event may be the transfer's end, which has to see it (FENCED).
            wanted = event.copy_wanted
            copying = None if self._copier is None else self._copier.begin(transfer, wanted)
            self._spawn(self._copy(wanted, copying))

    def _finish(self, transfer: Transfer, done: pb.TransferDone) -> None:
        del self._open[transfer.id]
        transfer.stopped.set()  # what has not begun to copy does not begin any more
        withheld = self._copying(transfer) and self._abandon(transfer, "its last copy is not over")
        wrong = _wrong_report(transfer, done)
        if wrong:
            logger.error("transfer %d of %r: %s", transfer.id, transfer.request_id, wrong)
            transfer.fail_all(FailReason.INTERNAL, wrong, withheld=withheld)
            return
        transfer.resolve(
            TransferResult(
                transfer=transfer.id,
                kind=transfer.kind,
                request_id=transfer.request_id,
                good=done.good,
                already_stored=done.already_stored,
                bytes=done.bytes,
                failed=tuple(
                    ChunkFailure(item.group, item.chunk, FailReason(item.reason)) for item in done.failed
                ),
                resume_length=done.resume_length,
                withheld=withheld,
            )
        )

    async def _copy(self, wanted: pb.CopyWanted, copying: "asyncio.Future[list[int]] | None") -> None:
        failed = list(range(len(wanted.items)))
        if self._copier is not None and copying is not None:
            failed = await self._copier.outcome(copying, wanted)
        await self._answer_copy(wanted, failed)

    async def _answer_copy(self, wanted: pb.CopyWanted, failed: list[int]) -> None:
        done = pb.CopyDone(transfer=wanted.transfer, batch=wanted.batch, failed=failed)
        await self.session.send(pb.ClientEvent(copy_done=done))

    def _sweep(self) -> None:
        if self._starting:
            return
        early, self._early = self._early, []
        for number, event in early:
            self._drop(number, event)

    def _drop(self, number: int, event: pb.ServerEvent) -> None:
        """An event of a transfer that is over: counted, never acted upon, except that it frees what it proves free."""
        self._late()
        if event.WhichOneof("event") == "copy_wanted":
            wanted = event.copy_wanted
            self._spawn(self._answer_copy(wanted, list(range(len(wanted.items)))))
        elif self._copier is None:
            for hold in [hold for hold in self._holds if hold.owner.id == number]:
                self._lift(hold)

    # ------------------------------------------------------------------------------------------------ fences

    def _copying(self, transfer: Transfer) -> bool:
        return self._copier is not None and self._copier.busy(transfer)

    def _abandon(self, transfer: Transfer, why: str) -> bool:
        """FENCED: give a transfer up without proof that it has ended; True if its blocks had to be withheld."""
        transfer.stopped.set()
        if self._copier is not None:
            if not self._copying(transfer):
                self._tell(transfer)
                return False
        elif self.session.writer.proven and not self._on_device:
            return False
        hold = self._withheld.hold(owner=transfer, why=why)
        self._holds.append(hold)
        if self._copier is not None:
            self._tell(transfer)
            self._spawn(self._lift_when_quiet(hold, self._copier, transfer))
        elif not self.over:
            self._spawn(self._lift_when_fenced(hold))
        return True

    def _tell(self, transfer: Transfer) -> None:
        """Copy mode: let the agent stop, too; nothing depends on its answer."""
        if not self.over:
            self._spawn(self._ask(transfer))

    async def _ask(self, transfer: Transfer) -> bool:
        """Does the agent say that it no longer touches the transfer's blocks?"""
        request = pb.ReleaseRequest(deadline_ms=int(CONFIRM_TIMEOUT * 800))
        if transfer.id:
            request.transfer = transfer.id
        else:
            request.request_id = transfer.request_id
        try:
            response = await self.session.call(RELEASE, request, timeout=CONFIRM_TIMEOUT)
        except CallError as error:
            logger.debug("release of transfer %d not confirmed: %s", transfer.id, error)
            return False
        return bool(response.state == pb.FENCED)

    async def _lift_when_quiet(self, hold: Hold, copier: Copier, transfer: Transfer) -> None:
        await copier.quiet((transfer,), None)
        self._lift(hold)

    async def _lift_when_fenced(self, hold: Hold) -> None:
        """Ask until the agent says FENCED; ends with the session, whose process is watched from then on."""
        pause = CONFIRM_FIRST
        while not hold.lifted.is_set() and not self.over:
            if await self._ask(hold.owner):
                self._lift(hold)
                return
            await asyncio.sleep(pause)
            pause = min(CONFIRM_LONGEST, pause * 2)

    def _lift(self, hold: Hold) -> None:
        self._withheld.lift(hold)
        if hold in self._holds:
            self._holds.remove(hold)

    def end(self, reason: str) -> None:
        """The session is over: report every open transfer, withhold what could still be touched, watch for its end."""
        self.over = True
        why = f"session ended: {reason}"
        for transfer in list(self._open.values()):
            transfer.fail_all(FailReason.INTERNAL, why, withheld=self._abandon(transfer, why))
        self._open.clear()
        self._sweep()
        self._spawn(self._free_when_gone())

    async def _free_when_gone(self) -> None:
        """FENCED: once the agent has let go and the device is quiet, nobody touches the blocks any more."""
        # Calls that the session's end cut off withhold their blocks first.
        for started in list(self._starting.values()):
            await started.wait()
        if self._copier is not None:
            self._copier.close()
        elif self._holds:
            await self.session.writer.wait()
            self.session.writer.close()
            await asyncio.to_thread(self._synchronise)
            for hold in list(self._holds):
                self._lift(hold)
        self.session.writer.close()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def _meant(transfer: Transfer, request_id: str | None, named: Transfer | None) -> bool:
    """Does a release name this transfer?"""
    return (request_id is None or transfer.request_id == request_id) and (named is None or transfer is named)


def _wrong_report(transfer: Transfer, done: pb.TransferDone) -> str:
    """LOADED_OR_REPORTED: why a load's report cannot be true; "" if it names each of its chunks as good or failed."""
    if transfer.kind is not TransferKind.LOAD:
        return ""
    mine = {(group, int(chunk)) for group, chunks in enumerate(transfer.chunks) for chunk in chunks}
    failed = [(item.group, item.chunk) for item in done.failed]
    stray = [item for item in failed if item not in mine]
    if stray:
        return f"the agent reports chunk {stray[0][1]} of group {stray[0][0]}, which was not to be loaded"
    if len(set(failed)) != len(failed) or done.good + len(failed) != len(mine):
        return (
            f"the agent reports {done.good} chunks good and {len(failed)} failed, {len(mine)} were to be loaded: none"
            " is taken for loaded"
        )
    return ""
