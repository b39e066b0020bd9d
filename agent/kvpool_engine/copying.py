"""Copy mode: moves chunks between the session's ring and the engine's blocks, in a thread.

It touches only blocks of the transfer that a copy belongs to, inside the ring's bounds, and stops between two chunks
once the transfer is stopped (FENCED): once `quiet` says True no thread of this library touches its blocks.
"""

import asyncio
import logging
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvpool_engine.storages import Storage
from kvpool_engine.transfer import Transfer
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout
from kvpool_wire.trailer import TRAILER_BYTES

logger = logging.getLogger(__name__)

MAX_BATCHES: Final = 256
"""Batches that may wait; an agent that sends more is answered "failed" at once (BOUNDED)."""


@dataclass(frozen=True, slots=True)
class _Work:
    """One item, checked."""

    group: int
    block: int
    offset: int


class Copier:
    """Copies for one session. Methods belong to the client's loop; the copies run in one thread of its own."""

    def __init__(self, layout: WorkerLayout, storages: Sequence[Storage], ring: mmap.mmap) -> None:
        self._layout = layout
        self._storages = storages
        self._ring = memoryview(ring)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-copy")
        self._running: dict[Transfer, set[asyncio.Future[list[int]]]] = {}

    def begin(self, transfer: Transfer, wanted: pb.CopyWanted) -> "asyncio.Future[list[int]] | None":
        """Queue one batch; `busy` knows of it when this returns. See `outcome`.

        Returns:
            None if nothing of it will be copied: the transfer was stopped, or too many batches wait.
        """
        if transfer.stopped.is_set() or sum(map(len, self._running.values())) >= MAX_BATCHES:
            return None
        allowed = [frozenset(blocks.tolist()) for blocks in transfer.blocks]
        work = [self._checked(item, allowed) for item in wanted.items]
        into_blocks = wanted.kind == pb.LOAD
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._copy, transfer, work, into_blocks)
        self._running.setdefault(transfer, set()).add(future)
        future.add_done_callback(lambda done: self._forget(transfer, done))
        return future

    async def outcome(self, copying: "asyncio.Future[list[int]]", wanted: pb.CopyWanted) -> list[int]:
        """Indexes of a batch's items that were not copied; empty when all were."""
        try:
            # Shielded: the thread goes on when the caller gives up, and `quiet` has to see that.
            return await asyncio.shield(copying)
        except Exception:
            logger.exception("copy mode: batch %d of transfer %d failed", wanted.batch, wanted.transfer)
            return list(range(len(wanted.items)))

    def busy(self, transfer: Transfer) -> bool:
        """True while a thread may touch the transfer's blocks."""
        return any(not future.done() for future in self._running.get(transfer, ()))

    async def quiet(self, transfers: Sequence[Transfer], timeout: float | None) -> bool:
        """Stop these transfers' copies; True when none is running any more, False after `timeout` seconds."""
        for transfer in transfers:
            transfer.stopped.set()
        running = [future for transfer in transfers for future in self._running.get(transfer, ())]
        if running:
            await asyncio.wait(running, timeout=timeout)
        return not any(self.busy(transfer) for transfer in transfers)

    def close(self) -> None:
        """Take no more work; the ring is unmapped when the last running copy has ended."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, transfer: Transfer, done: asyncio.Future[list[int]]) -> None:
        futures = self._running.get(transfer, set())
        futures.discard(done)
        if not futures:
            self._running.pop(transfer, None)

    def _checked(self, item: pb.CopyItem, allowed: Sequence[frozenset[int]]) -> _Work | None:
        """The item if it lies in the ring and names a block of its transfer; None otherwise."""
        if item.group >= len(allowed) or item.block not in allowed[item.group]:
            logger.error("copy mode: group %d block %d is not of this transfer", item.group, item.block)
            return None
        chunk = self._layout.groups[item.group].payload_bytes + TRAILER_BYTES
        if item.offset + chunk > len(self._ring):
            logger.error("copy mode: offset %d is outside the ring of %d bytes", item.offset, len(self._ring))
            return None
        return _Work(item.group, item.block, item.offset)

    def _copy(self, transfer: Transfer, work: Sequence[_Work | None], into_blocks: bool) -> list[int]:
        """In the thread: all items, in order; returns the indexes of those that were not copied."""
        if transfer.after is not None:
            transfer.after.synchronize()
        failed: list[int] = []
        for index, item in enumerate(work):
            if item is None or transfer.stopped.is_set():
                failed.append(index)
                continue
            group = self._layout.groups[item.group]
            payload = self._ring[item.offset : item.offset + group.payload_bytes]
            for part in group.parts:
                storage = self._storages[part.storage]
                (storage.scatter if into_blocks else storage.gather)(part, item.block, payload)
        for storage in self._storages:
            storage.flush()
        return failed
