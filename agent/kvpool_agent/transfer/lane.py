"""A session's way to the store: one get and one put in flight, ring slots, quarantine.

Promises: one status per chunk whatever the store does; the slot of a chunk that did not arrive is given back or put in
quarantine here, never both and never neither; when too much of the ring lies in quarantine the loader's process is
replaced, between two batches. Refuses: to believe what arrived (the trailer check is the mover's), and to retry.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context

from kvpool_agent.store.errors import FenceUnconfirmed, StoreDeadline, StoreError, StoreUnavailable
from kvpool_agent.store.protocol import ChunkStatus, GetItem, Loader, Prober, PutItem
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.errors import RingBroken
from kvpool_agent.transfer.fence import Hold, Stopped, unless_stopped
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.types import FailReason, TransferMetrics

_log: Final = logging.getLogger(__name__)
_TRACER: Final = trace.get_tracer("kvpool.agent")

_QUIET: Final = frozenset(
    {
        ChunkStatus.ABSENT,
        ChunkStatus.NOT_READY,
        ChunkStatus.NOT_ATTEMPTED,
        ChunkStatus.DEADLINE,
        ChunkStatus.WORKER_DIED,
        ChunkStatus.MASTER_FAILED,
    }
)
"""Statuses after which no process can touch the slot: none ever tried, or the one that did is gone, or, for a put, has
done so. The master is asked before bytes move and told after they have, so its silence says that none are moving."""

LOAD_REASONS: Final = {
    ChunkStatus.ABSENT: FailReason.EVICTED,
    ChunkStatus.NOT_READY: FailReason.EVICTED,
    ChunkStatus.LEASE_EXPIRED: FailReason.EVICTED,
    ChunkStatus.CORRUPT: FailReason.CORRUPT,
    ChunkStatus.BAD_SIZE: FailReason.CORRUPT,
    ChunkStatus.PEER_FAILED: FailReason.PEER_UNREACHABLE,
    ChunkStatus.MASTER_FAILED: FailReason.MASTER_UNREACHABLE,
    ChunkStatus.DEADLINE: FailReason.TIMED_OUT,
}
"""What a load reports; every other status is INTERNAL."""

SAVE_REASONS: Final = {
    ChunkStatus.FULL: FailReason.STORE_FULL,
    ChunkStatus.NOT_READY: FailReason.HELD_BACK,
    ChunkStatus.PEER_FAILED: FailReason.PEER_UNREACHABLE,
    ChunkStatus.MASTER_FAILED: FailReason.MASTER_UNREACHABLE,
    ChunkStatus.DEADLINE: FailReason.TIMED_OUT,
}
"""What a save reports; every other status is INTERNAL."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One batch of a load.

    Attributes:
        statuses: one per chunk that was wanted.
        offsets: ring offset per chunk; the caller owns the slots of OK ones, the others are gone already.
    """

    statuses: Sequence[ChunkStatus]
    offsets: Sequence[int]

    def arrived(self) -> list[int]:
        """Slots that the caller owns."""
        return [
            at for at, status in zip(self.offsets, self.statuses, strict=False) if status is ChunkStatus.OK
        ]


class StoreLane:
    """Gets, puts and questions of one session."""

    def __init__(
        self,
        *,
        loader: Loader,
        prober: Prober,
        ring: Ring,
        metrics: TransferMetrics,
        background: Background,
        quarantine_share: float,
    ) -> None:
        self._loader = loader
        self._prober = prober
        self._ring = ring
        self._metrics = metrics
        self._background = background
        self._most_quarantined: Final = quarantine_share * ring.slots
        self._gets = asyncio.Lock()
        self._puts = asyncio.Lock()
        self._tidying = False

    async def take(self, count: int, *, hold: Hold, deadline: float) -> list[int] | None:
        """Slots for `count` chunks; None if there are none in time or the transfer was stopped."""
        try:
            return await unless_stopped(self._ring.take(count, deadline=deadline), hold)
        except (TimeoutError, Stopped):
            return None

    async def fetch(
        self, keys: Sequence[bytes], sizes: Sequence[int], *, hold: Hold, deadline: float, context: Context
    ) -> Fetched:
        """Get chunks into slots. A get under way goes on when its transfer is stopped: the ring is not quiet before."""
        count = len(keys)
        try:
            offsets = await self.take(count, hold=hold, deadline=deadline)
        except RingBroken as error:
            _log.error("%d chunks not loaded: %s", count, error)
            return Fetched([ChunkStatus.INTERNAL] * count, ())
        if offsets is None:
            return Fetched([ChunkStatus.DEADLINE] * count, ())
        items = [GetItem(key, at, size) for key, at, size in zip(keys, offsets, sizes, strict=True)]
        statuses = [ChunkStatus.NOT_ATTEMPTED] * count
        try:
            async with self._turn(self._gets, hold) as mine:
                if mine:
                    statuses = [ChunkStatus.INTERNAL] * count
                    statuses = await self._call(
                        "batch_get", count, context, lambda: self._loader.get(items, deadline=deadline)
                    )
        finally:
            self.dispose(offsets, statuses, kept=ChunkStatus.OK)
        return Fetched(statuses, offsets)

    async def store(
        self, items: Sequence[PutItem], *, hold: Hold, deadline: float, context: Context
    ) -> list[ChunkStatus]:
        """Put chunks; all of their slots are given back. OK is not yet a proof: see `exists`."""
        statuses = [ChunkStatus.NOT_ATTEMPTED] * len(items)
        try:
            async with self._turn(self._puts, hold) as mine:
                if mine:
                    statuses = [ChunkStatus.INTERNAL] * len(items)
                    statuses = await self._call(
                        "batch_put", len(items), context, lambda: self._loader.put(items, deadline=deadline)
                    )
        finally:
            self.dispose([item.offset for item in items], statuses)
        return statuses

    async def exists(self, keys: Sequence[bytes], *, deadline: float, context: Context) -> list[ChunkStatus]:
        """OK or ABSENT per key; MASTER_FAILED or DEADLINE for all where nobody answered."""

        async def ask() -> list[ChunkStatus]:
            try:
                return await self._prober.exists_keys(keys, deadline=deadline)
            except StoreDeadline:
                return [ChunkStatus.DEADLINE] * len(keys)
            except StoreUnavailable:
                return [ChunkStatus.MASTER_FAILED] * len(keys)

        return await self._call("batch_is_exist", len(keys), context, ask)

    def held_back(self, key: bytes) -> bool:
        """Whether a writer of the key died and the store has not dropped its half-written object yet."""
        return self._loader.blocked_until(key) is not None

    def dispose(
        self, offsets: Sequence[int], statuses: Sequence[ChunkStatus], *, kept: ChunkStatus | None = None
    ) -> None:
        """Give back the slots that are quiet, put the others in quarantine; leave those with status `kept`."""
        by_status = list(zip(offsets, statuses, strict=True))
        quiet = _QUIET if kept is ChunkStatus.OK else _QUIET | {ChunkStatus.OK}
        loud = [at for at, status in by_status if status not in quiet and status is not kept]
        self._ring.quarantine(loud)
        self._ring.free(at for at, status in by_status if status in quiet)
        if self._ring.quarantined_slots > self._most_quarantined and not self._tidying:
            self._tidying = True
            self._background.start(self._tidy(), name="kvpool replace loader")

    async def _tidy(self) -> None:
        """Replace the loader's process between two batches; whatever it might still write is then over."""
        try:
            async with self._gets, self._puts:
                await self._loader.replace()
                self._ring.settle()
        except FenceUnconfirmed as error:
            self._ring.retire(f"the loader could not be replaced: {error}")
        finally:
            self._tidying = False

    @asynccontextmanager
    async def _turn(self, lock: asyncio.Lock, hold: Hold) -> AsyncIterator[bool]:
        """Hold `lock`; False, and not held, if the transfer was stopped before its turn came."""
        try:
            await unless_stopped(lock.acquire(), hold)
        except Stopped:
            yield False
            return
        try:
            yield not hold.stopped
        finally:
            lock.release()

    async def _call(
        self, operation: str, keys: int, context: Context, call: Callable[[], Awaitable[list[ChunkStatus]]]
    ) -> list[ChunkStatus]:
        """One request to the store, counted and traced; per-chunk statuses where it failed as a whole."""
        begun = time.perf_counter()
        outcome = "error"
        with _TRACER.start_as_current_span(
            f"mooncake.{operation}", context=context, attributes={"kvpool.keys": keys}
        ):
            try:
                statuses = await call()
                if len(statuses) != keys:
                    raise StoreError(f"{len(statuses)} answers for {keys} chunks")
                outcome = _outcome(statuses)
            except FenceUnconfirmed as error:
                self._ring.retire(str(error))
                statuses = [ChunkStatus.INTERNAL] * keys
            except StoreError as error:
                _log.error("%s of %d chunks failed as a whole: %s", operation, keys, error)
                statuses = [ChunkStatus.INTERNAL] * keys
            finally:
                self._metrics.store_request(
                    operation=operation, status=outcome, seconds=time.perf_counter() - begun, keys=keys
                )
        return statuses


def _outcome(statuses: Sequence[ChunkStatus]) -> str:
    answered = sum(status in (ChunkStatus.OK, ChunkStatus.ABSENT) for status in statuses)
    if answered == len(statuses):
        return "ok"
    if answered:
        return "partial"
    return "deadline" if ChunkStatus.DEADLINE in statuses else "error"
