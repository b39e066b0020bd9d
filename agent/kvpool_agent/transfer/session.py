"""What all transfers of one worker session share, and what every one of them keeps: its chunks and their fate.

`Session` is plumbing without behaviour. `Run` promises LOADED_OR_REPORTED's bookkeeping: a chunk is good only if it was
marked so, every other one is failed with the reason it got, or with the reason for which the transfer ended; each is
reported once.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from opentelemetry import trace
from opentelemetry.context import Context

from kvpool_agent.coordinator import KVCoordinator
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.chunks import ChunkTable
from kvpool_agent.transfer.errors import MoverFailed
from kvpool_agent.transfer.fence import Hold, Stopped, done_unless_stopped
from kvpool_agent.transfer.lane import StoreLane
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import BlockMover, ChunkFailure, FailReason, HashChain, TransferMetrics
from kvpool_agent.transfer.verify import Verifier
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import extras_digest
from kvpool_wire.keys import KeySpace, chunk_key
from kvpool_wire.layout import GroupLayout, WorkerLayout
from kvpool_wire.trailer import TRAILER_BYTES

_TRACER: Final = trace.get_tracer("kvpool.agent")

_OPEN: Final = 0
_GOOD: Final = -1
_STORED: Final = -2


@dataclass(frozen=True, slots=True)
class Session:
    """What the transfers of one worker session share."""

    coordinator: KVCoordinator
    keyspace: KeySpace
    layout: WorkerLayout
    ring: Ring
    lane: StoreLane
    mover: BlockMover
    verifier: Verifier
    tombstones: Tombstones
    metrics: TransferMetrics
    background: Background
    batch: int
    """Chunks of one get or put."""

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, by group."""
        return [group.block_size for group in self.coordinator.groups]


class Run:
    """One transfer under way: its chunks, their keys, and what became of each."""

    def __init__(
        self,
        session: Session,
        *,
        table: ChunkTable,
        chain: HashChain,
        extras: pb.Extras,
        hold: Hold,
        deadline: float,
        context: Context | None,
    ) -> None:
        self.session = session
        self.table = table
        self.hold = hold
        self.deadline = deadline
        self.begun: Final = time.perf_counter()
        self.span: Final = _TRACER.start_span(f"kvpool.{hold.kind.name.lower()}", context=context)
        self.context: Final = trace.set_span_in_context(self.span, context)
        self._chain = chain
        self._fate = np.full(len(table), _OPEN, dtype=np.int16)
        tag = extras_digest(extras)
        self._prefixes = [
            b"" if held.shard is None else session.keyspace.prefix(group, held.shard, tag)
            for group, held in enumerate(session.layout.groups)
        ]

    async def order(self, ordering: pb.Ordering) -> None:
        """Wait until the blocks may be touched.

        Raises:
            MoverFailed: they may not.
            Stopped: the transfer was stopped first.
        """

        async def attempt() -> MoverFailed | None:
            try:
                # BOUNDED: stopped at the deadline at the latest, and the thread that waits for the device ends with it.
                await self.session.mover.order(ordering, give_up=lambda: self.hold.stopped)
            except MoverFailed as error:
                return error
            return None

        # In the background, because it may wait for a device: a transfer that is stopped does not wait with it.
        ordered = self.session.background.start(attempt(), name=f"order for {self.hold.transfer}")
        if not await done_unless_stopped(ordered, self.hold):
            raise Stopped
        if (error := ordered.result()) is not None:
            raise error

    def key(self, row: int) -> bytes:
        """The key of one chunk."""
        return chunk_key(self._prefixes[self.table.groups[row]], self._chain.unit(int(self.table.units[row])))

    def size(self, row: int) -> int:
        """Bytes of one chunk with its trailer."""
        return self._group(row).payload_bytes + TRAILER_BYTES

    def layout_digest(self, row: int) -> bytes:
        """What the chunk's trailer has to carry."""
        return self._group(row).layout_digest

    def batches(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """`rows` cut into the batches of one get or put."""
        step = self.session.batch
        return [rows[first : first + step] for first in range(0, len(rows), step)]

    def mark_good(self, rows: Iterable[int]) -> None:
        """These chunks are where they should be."""
        for row in rows:
            self._fate[row] = _GOOD

    def mark_failed(self, rows: Iterable[int], reason: FailReason) -> None:
        """These chunks are not."""
        for row in rows:
            self._fate[row] = reason

    def mark_stored(self, rows: Iterable[int]) -> None:
        """These chunks need not be saved: they are there already."""
        for row in rows:
            self._fate[row] = _STORED

    def fail_rest(self, reason: FailReason) -> None:
        """Every chunk without a fate gets this one."""
        self._fate[self._fate == _OPEN] = reason

    def fail_good(self, reason: FailReason) -> None:
        """What was good is not any more."""
        self._fate[self._fate == _GOOD] = reason

    def settle(self) -> None:
        """Give every chunk without a fate the reason for which the transfer ended."""
        self.fail_rest(self.hold.reason or FailReason.INTERNAL)

    def good(self) -> int:
        """Chunks that are where they should be."""
        return int((self._fate == _GOOD).sum())

    def stored(self) -> int:
        """Chunks that were there already."""
        return int((self._fate == _STORED).sum())

    def good_bytes(self) -> int:
        """Their payload."""
        payload = np.asarray([group.payload_bytes for group in self.session.layout.groups], dtype=np.int64)
        return int(payload[self.table.groups[self._fate == _GOOD]].sum())

    def count(self, reason: FailReason) -> int:
        """Chunks that failed for one reason."""
        return int((self._fate == reason).sum())

    def failures(self) -> tuple[ChunkFailure, ...]:
        """Every chunk that failed, once."""
        return tuple(
            ChunkFailure(
                int(self.table.groups[row]), int(self.table.chunks[row]), FailReason(int(self._fate[row]))
            )
            for row in np.flatnonzero(self._fate > _OPEN)
        )

    def first_failure(self) -> int | None:
        """Where the first failed chunk starts, in tokens; None if none has failed."""
        failed = self._fate > _OPEN
        if not failed.any():
            return None
        sizes = np.asarray(self.session.block_sizes, dtype=np.int64)
        return int((self.table.chunks[failed] * sizes[self.table.groups[failed]]).min())

    def _group(self, row: int) -> GroupLayout:
        return self.session.layout.groups[int(self.table.groups[row])]
