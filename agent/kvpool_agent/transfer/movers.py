"""Between the ring and an engine's blocks: by the agent itself (mapped), or by the engine's client (copy).

Promises: nothing is copied into a block before its bytes were verified in the ring; the ticket is looked at between two
items, and a stopped one is obeyed; it is quiet only when the batch's blocks are not touched any more (FENCED), in copy
mode when the client has said so. Refuses: to trust the client with more than its own blocks: what it answers is checked
against what it was asked.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool_agent.pools.pool import MappedPool, MoveItem, PoolError
from kvpool_agent.transfer.errors import CopyProtocolError, MoverFailed
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.types import Check, Landed, LandOutcome, Seal, Ticket, TransferKind
from kvpool_agent.transfer.workers import Workers
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout
from kvpool_wire.trailer import TrailerFault

_log: Final = logging.getLogger(__name__)


class MappedMover:
    """Writes and reads the engine's blocks through a mapping."""

    def __init__(self, pool: MappedPool, *, ring: Ring, layout: WorkerLayout, threads: int = 2) -> None:
        """Move between `ring` and `pool`; the pool is closed with the mover."""
        self._pool = pool
        self._ring = ring
        self._payload: Final = tuple(group.payload_bytes for group in layout.groups)
        self._workers: Final = Workers(threads, name="kvpool-mover")
        self._moves: Final = _Moves()

    @property
    def mode(self) -> str:
        """`mapped`."""
        return "mapped"

    async def order(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """See `BlockMover.order`."""
        if self._moves.closed:
            raise MoverFailed("the session is over: the engine's memory is not mapped any more")
        with self._moves.one():
            try:
                await self._workers.call(lambda: self._pool.wait_ordering(ordering, give_up=give_up))
            except PoolError as error:
                raise MoverFailed(f"the engine's blocks may not be touched yet: {error}") from error

    async def land(self, items: Sequence[MoveItem], check: Check, *, ticket: Ticket) -> list[LandOutcome]:
        """See `BlockMover.land`."""

        def land_some(part: range) -> list[LandOutcome]:
            return [self._land_one(items[index], index, check, ticket) for index in part]

        with self._moves.one(), _quiet_after(ticket):
            if self._moves.closed:
                return [Landed.STOPPED] * len(items)
            return await self._workers.split(len(items), land_some)

    async def collect(self, items: Sequence[MoveItem], seal: Seal, *, ticket: Ticket) -> list[Landed]:
        """See `BlockMover.collect`."""

        def collect_some(part: range) -> list[Landed]:
            return [self._collect_one(items[index], index, seal, ticket) for index in part]

        with self._moves.one(), _quiet_after(ticket):
            if self._moves.closed:
                return [Landed.STOPPED] * len(items)
            return await self._workers.split(len(items), collect_some)

    async def close(self) -> None:
        """See `BlockMover.close`; unmaps the pool."""
        first = self._moves.shut()
        await self._moves.idle()
        if first:
            await self._workers.call(self._pool.close)
            self._workers.close()

    def _land_one(self, item: MoveItem, index: int, check: Check, ticket: Ticket) -> LandOutcome:
        if ticket.stopped:
            return Landed.STOPPED
        fault = check(index)
        if fault is not None:
            return fault
        return self._touch(self._pool.scatter, item, ticket)

    def _collect_one(self, item: MoveItem, index: int, seal: Seal, ticket: Ticket) -> Landed:
        landed = self._touch(self._pool.gather, item, ticket)
        if landed is Landed.OK:
            seal(index)
        return landed

    def _touch(self, copy: Callable[[int, int, memoryview], None], item: MoveItem, ticket: Ticket) -> Landed:
        # Hashing takes its time: looked at again here, so that a release waits for one copy at most.
        if ticket.stopped:
            return Landed.STOPPED
        try:
            copy(item.group, item.block, self._ring.view(item.offset, self._payload[item.group]))
        except PoolError as error:
            _log.error("block %d of group %d: %s", item.block, item.group, error)
            return Landed.ENGINE_FAILED
        return Landed.OK


class CopyMover:
    """Has the engine's client copy between its blocks and the ring."""

    def __init__(
        self, *, send: Callable[[pb.CopyWanted], None], on_late: Callable[[], None], threads: int = 2
    ) -> None:
        """Ask through `send`.

        Args:
            send: puts one event on the session's stream; must not block.
            on_late: called when an answer comes for a batch that was given up, or that nobody knows.
            threads: for verifying and sealing.
        """
        self._send = send
        self._on_late = on_late
        self._workers: Final = Workers(threads, name="kvpool-verify")
        self._moves: Final = _Moves()
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._batches = 0
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def mode(self) -> str:
        """`copy`."""
        return "copy"

    async def order(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """The client orders its own copies after its own kernels; there is nothing to prove to the agent."""
        del ordering, give_up

    async def land(self, items: Sequence[MoveItem], check: Check, *, ticket: Ticket) -> list[LandOutcome]:
        """See `BlockMover.land`."""

        def check_some(part: range) -> list[TrailerFault | None]:
            return [None if ticket.stopped else check(index) for index in part]

        with self._moves.one():
            faults = await self._in_threads(len(items), check_some, ticket)
            sound = [index for index, fault in enumerate(faults) if fault is None]
            answers = await self._ask(TransferKind.LOAD, [items[index] for index in sound], ticket)
        outcomes: list[LandOutcome] = [Landed.STOPPED if fault is None else fault for fault in faults]
        for index, answer in zip(sound, answers, strict=True):
            outcomes[index] = answer
        return outcomes

    async def collect(self, items: Sequence[MoveItem], seal: Seal, *, ticket: Ticket) -> list[Landed]:
        """See `BlockMover.collect`."""

        def seal_some(part: range) -> list[Landed]:
            for index in part:
                if answers[index] is Landed.OK:
                    seal(index)
            return [answers[index] for index in part]

        with self._moves.one():
            answers = await self._ask(TransferKind.SAVE, items, ticket)
            return await self._workers.split(len(items), seal_some)

    def on_copy_done(self, done: pb.CopyDone) -> None:
        """Take the client's answer.

        Raises:
            CopyProtocolError: it speaks of items that it was not asked for; the whole batch counts as failed.
        """
        asked = self._asked.pop((done.transfer, done.batch), None)
        if asked is None:
            self._on_late()
            return
        stray = [index for index in done.failed if index >= asked.items]
        if asked.given_up:
            self._on_late()
        else:
            asked.answer.set_result(frozenset(range(asked.items) if stray else done.failed))
        asked.ticket.quiet()
        if stray:
            raise CopyProtocolError(
                f"CopyDone for batch {done.batch} of transfer {done.transfer} names item {stray[0]} of {asked.items}"
            )

    async def close(self) -> None:
        """See `BlockMover.close`. A client whose session is over copies on its own account alone."""
        first = self._moves.shut()
        if first:
            self._closing.set_result(None)
        for asked in self._asked.values():
            asked.ticket.quiet()
        self._asked.clear()
        await self._moves.idle()
        if first:
            self._workers.close()

    async def _in_threads(
        self, count: int, work: Callable[[range], Sequence[TrailerFault | None]], ticket: Ticket
    ) -> list[TrailerFault | None]:
        try:
            return await self._workers.split(count, work)
        except BaseException:
            ticket.quiet()  # the client was never asked
            raise

    async def _ask(self, kind: TransferKind, items: Sequence[MoveItem], ticket: Ticket) -> list[Landed]:
        """Ask the client for one batch and wait for its answer; takes over the ticket."""
        if not items or ticket.stopped or self._moves.closed:
            ticket.quiet()
            return [Landed.STOPPED] * len(items)
        self._batches += 1
        key = (ticket.transfer, self._batches)
        asked = self._asked[key] = _Asked(len(items), ticket)
        try:
            self._send(_wanted(key, kind, items))
        except BaseException:
            del self._asked[key]
            ticket.quiet()
            raise
        either: set[asyncio.Future[Any]] = {asked.answer, ticket.stopping, self._closing}
        timeout = max(0.0, ticket.deadline - asyncio.get_running_loop().time())
        try:
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.given_up = not asked.answer.done()
        if asked.given_up:
            return [Landed.UNANSWERED] * len(items)
        failed = asked.answer.result()
        return [Landed.ENGINE_FAILED if index in failed else Landed.OK for index in range(len(items))]


def _answer() -> "asyncio.Future[frozenset[int]]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _Asked:
    """One CopyWanted that was sent. Kept until it is answered, also when nobody waits any more (FENCED)."""

    items: int
    ticket: Ticket
    answer: "asyncio.Future[frozenset[int]]" = field(default_factory=_answer)
    given_up: bool = False


class _Moves:
    """Counts the moves under way, so that closing can wait for the last one."""

    def __init__(self) -> None:
        self.closed = False
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    def shut(self) -> bool:
        """Let no move begin any more; True for the first caller."""
        first, self.closed = not self.closed, True
        return first

    async def idle(self) -> None:
        """Wait until none is under way."""
        await self._idle.wait()


@contextmanager
def _quiet_after(ticket: Ticket) -> Iterator[None]:
    try:
        yield
    finally:
        ticket.quiet()


def _wanted(key: tuple[int, int], kind: TransferKind, items: Sequence[MoveItem]) -> pb.CopyWanted:
    transfer, batch = key
    copies = [pb.CopyItem(group=item.group, block=item.block, offset=item.offset) for item in items]
    direction = pb.LOAD if kind is TransferKind.LOAD else pb.SAVE
    return pb.CopyWanted(transfer=transfer, batch=batch, kind=direction, items=copies)
