"""FENCED: which blocks a transfer may touch, and when nobody touches them any more.

Every transfer holds its blocks from the moment it is accepted: a load alone, saves side by side. A mover touches them
only under a `Ticket`; the table knows which tickets are open. Promises: blocks are let go only when no ticket of their
transfer is open and none can be opened any more (it has finished, or it was stopped); `wait` says FENCED only then, and
names at its deadline what it cannot confirm; those blocks stay withheld until it becomes true.
Refuses: to wait for the store. A get writes only the ring, so it never keeps a block.

Event loop only, except `Hold.stopped`, which worker threads read between two items.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvpool_agent.transfer.errors import BlocksBusy
from kvpool_agent.transfer.types import FailReason, TransferKind

T = TypeVar("T")


class Stopped(Exception):
    """The transfer was stopped while it waited; nothing was gained by waiting."""


class Hold:
    """One transfer's hold on its blocks. Made by `BlockTable.claim`."""

    def __init__(
        self,
        *,
        transfer: int,
        request_id: str,
        kind: TransferKind,
        blocks: Mapping[int, Sequence[int]],
        let_go: "Callable[[Hold], None]",
    ) -> None:
        self.transfer = transfer
        self.request_id = request_id
        self.kind = kind
        self.blocks = blocks
        self.stopped = False
        self.reason: FailReason | None = None
        """Why it was stopped; what had not landed by then is reported with it."""
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the blocks have been let go."""
        self._let_go = let_go
        self._open = 0
        self._finished = False

    def ticket(self, deadline: float) -> "OpenTicket | None":
        """Permission to touch the blocks, None once the transfer was stopped or has finished."""
        if self.stopped or self._finished:
            return None
        self._open += 1
        return OpenTicket(self, deadline)

    def stop(self, reason: FailReason) -> None:
        """Nothing further may be touched. The first reason stays, but CANCELLED outranks it.

        After a release the blocks are the engine's: what landed before must not be reported as good any more.
        """
        if not self.stopped:
            self.stopped = True
            self.reason = reason
            self.stopping.set_result(None)
        elif reason is FailReason.CANCELLED:
            self.reason = reason
        self._settle()

    def finish(self) -> None:
        """The transfer will ask for no more tickets. Idempotent."""
        self._finished = True
        self._settle()

    def close_ticket(self) -> None:
        """One ticket fewer; called by the ticket, once."""
        self._open -= 1
        self._settle()

    def _settle(self) -> None:
        if self._open == 0 and (self.stopped or self._finished) and not self.gone.done():
            self._let_go(self)
            self.gone.set_result(None)


class OpenTicket:
    """See `types.Ticket`."""

    def __init__(self, hold: Hold, deadline: float) -> None:
        self._hold = hold
        self._deadline = deadline
        self._quiet = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def transfer(self) -> int:
        """The transfer's id."""
        return self._hold.transfer

    @property
    def deadline(self) -> float:
        """`loop.time()`."""
        return self._deadline

    @property
    def stopped(self) -> bool:
        """Whether nothing further may be touched."""
        return self._hold.stopped

    @property
    def stopping(self) -> "asyncio.Future[None]":
        """Done as soon as `stopped` is."""
        return self._hold.stopping

    def quiet(self) -> None:
        """Nothing of this batch is touched any more. A second call changes nothing."""
        if self._quiet:
            return
        self._quiet = True
        for callback in self._callbacks:
            callback()
        self._hold.close_ticket()

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the ticket is quiet, at once if it is."""
        if self._quiet:
            callback()
        else:
            self._callbacks.append(callback)


class BlockTable:
    """Which blocks of one worker session are held, and by whom.

    Groups that share memory (`WorkerLayout.overlap`) share their blocks here: an id that one holds, all hold.
    """

    def __init__(self, groups: int, *, overlap: Sequence[int] | None = None) -> None:
        self._pool: Sequence[int] = range(groups) if overlap is None else overlap
        self._writing: list[set[int]] = [set() for _ in range(groups)]
        self._reading: list[Counter[int]] = [Counter() for _ in range(groups)]
        self._holds: dict[int, Hold] = {}

    def claim(
        self, *, transfer: int, request_id: str, kind: TransferKind, blocks: Mapping[int, Sequence[int]]
    ) -> Hold:
        """Hold `blocks` (per group, no id twice) for a transfer, all or nothing.

        Raises:
            BlocksBusy: naming one block that another transfer holds.
        """
        for group, ids in blocks.items():
            self._check_free(group, ids, kind)
        for group, ids in blocks.items():
            if kind is TransferKind.LOAD:
                self._writing[self._pool[group]].update(ids)
            else:
                self._reading[self._pool[group]].update(ids)
        hold = Hold(transfer=transfer, request_id=request_id, kind=kind, blocks=blocks, let_go=self._let_go)
        self._holds[transfer] = hold
        return hold

    def holds(self, *, request_id: str | None = None, transfer: int | None = None) -> list[Hold]:
        """The holds of a request, of a transfer, or all."""
        if transfer is not None:
            found = self._holds.get(transfer)
            return [] if found is None else [found]
        return [hold for hold in self._holds.values() if request_id is None or hold.request_id == request_id]

    def busy(self, group: int) -> frozenset[int]:
        """Blocks of a group that are held now."""
        pool = self._pool[group]
        return frozenset(self._writing[pool]) | frozenset(self._reading[pool])

    def _check_free(self, group: int, ids: Sequence[int], kind: TransferKind) -> None:
        pool = self._pool[group]
        taken = self._writing[pool].intersection(ids)
        if kind is TransferKind.LOAD and not taken:
            taken = {block for block in ids if block in self._reading[pool]}
        if taken:
            block = min(taken)
            holder = next(hold for hold in self._holds.values() if self._has(hold, pool, block))
            raise BlocksBusy(
                f"group {group}: block {block} is held by {holder.kind.name.lower()} {holder.transfer} of request "
                f"{holder.request_id!r}; wait for its result, or release it and use the block once that says FENCED"
            )

    def _has(self, hold: Hold, pool: int, block: int) -> bool:
        return any(self._pool[group] == pool and block in ids for group, ids in hold.blocks.items())

    def _let_go(self, hold: Hold) -> None:
        for group, ids in hold.blocks.items():
            if hold.kind is TransferKind.LOAD:
                self._writing[self._pool[group]].difference_update(ids)
                continue
            reading = self._reading[self._pool[group]]
            reading.subtract(ids)
            for block in ids:
                if not reading[block]:
                    del reading[block]
        del self._holds[hold.transfer]


async def wait_gone(holds: Iterable[Hold], *, deadline: float | None) -> tuple[int, ...]:
    """Wait until the blocks of all `holds` have been let go; the transfers that still have theirs at the deadline."""
    waiting = [hold for hold in holds if not hold.gone.done()]
    if waiting:
        timeout = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait([hold.gone for hold in waiting], timeout=timeout)
    return tuple(hold.transfer for hold in waiting if not hold.gone.done())


async def unless_stopped(work: Coroutine[Any, Any, T], hold: Hold) -> T:
    """The result of `work`, which is cancelled when the transfer is stopped first.

    Raises:
        Stopped: it was, and `work` gave no result.
    """
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, hold.stopping}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if task.cancelled():
        raise Stopped
    return task.result()


async def done_unless_stopped(future: "asyncio.Future[Any]", hold: Hold) -> bool:
    """Wait for `future`, which goes on in any case; False if the transfer was stopped first."""
    either: set[asyncio.Future[Any]] = {future, hold.stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    return future.done()
