"""`Loader` over a worker process: gets and puts through one ring.

Promises (FENCED, LOADED_OR_REPORTED, BOUNDED): one status per item; when a call returns, or raises, or is cancelled,
no process that could still touch the ring for it is alive. That is why a call that overran its deadline, and one that
ended with a status after which Mooncake writes late, return only when the process has been reaped.
Refuses to retry: a status is final, the caller decides. Refuses to trust a code beyond `codes`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Final, TypeVar

from kvpool_agent.store import frames
from kvpool_agent.store.blocked import BlockedKeys
from kvpool_agent.store.codes import UNSETTLED, Outcome, get_outcome, put_outcome, remove_outcome
from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.errors import StoreError, StoreUnavailable, WorkerDied
from kvpool_agent.store.frames import Op
from kvpool_agent.store.guards import Item, check_items, check_keys, split_batches
from kvpool_agent.store.process import WorkerProcess
from kvpool_agent.store.protocol import ChunkStatus, GetItem, PutItem
from kvpool_agent.store.reach import MasterReach
from kvpool_agent.store.supervisor import Supervisor

_log: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_Judge = Callable[[int, int], Outcome]


class MooncakeLoader:
    """See `protocol.Loader`."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: StoreConfig,
        *,
        ring_size: int,
        blocked: BlockedKeys,
        reach: MasterReach,
        on_close: Callable[[MooncakeLoader], None],
    ) -> None:
        self._supervisor = supervisor
        self._config = config
        self._ring_size = ring_size
        self._blocked = blocked
        self._reach = reach
        self._on_close = on_close
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self._supervisor.name

    @property
    def generation(self) -> int:
        """See `Loader.generation`."""
        return self._supervisor.generation

    @property
    def pid(self) -> int | None:
        """See `Loader.pid`."""
        return self._supervisor.pid

    @property
    def supervisor(self) -> Supervisor:
        """Who keeps the process up."""
        return self._supervisor

    async def get(self, items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.get`."""
        check_items(items, ring_size=self._ring_size)
        return await self._move(Op.GET, items, deadline, lambda code, size: get_outcome(code, expected=size))

    async def put(self, items: Sequence[PutItem], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.put`."""
        check_items(items, ring_size=self._ring_size)
        now = asyncio.get_running_loop().time()
        free = [index for index, item in enumerate(items) if self._blocked.until(item.key, now=now) is None]
        moved = await self._move(
            Op.PUT, [items[index] for index in free], deadline, lambda code, _: put_outcome(code)
        )
        statuses = [ChunkStatus.NOT_READY] * len(items)
        for index, status in zip(free, moved, strict=True):
            statuses[index] = status
        return statuses

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.remove`."""
        check_keys(keys)
        unique = [PutItem(key, 0, 1) for key in dict.fromkeys(keys)]
        statuses = await self._move(Op.REMOVE, unique, deadline, lambda code, _: remove_outcome(code))
        by_key = {item.key: status for item, status in zip(unique, statuses, strict=True)}
        return [by_key[key] for key in keys]

    async def replace(self) -> None:
        """See `Loader.replace`."""
        await _to_the_end(self._supervisor.discard_all())

    async def close(self) -> None:
        """See `Loader.close`."""
        self._closed = True
        self._on_close(self)
        await _to_the_end(self._supervisor.stop())

    def blocked_until(self, key: bytes) -> float | None:
        """See `Loader.blocked_until`."""
        return self._blocked.until(key, now=asyncio.get_running_loop().time())

    async def _move(self, op: Op, items: Sequence[Item], deadline: float, judge: _Judge) -> list[ChunkStatus]:
        """Send the batches, wait, judge the answers, and settle the process."""
        if not items:
            return []
        if self._closed:
            return [ChunkStatus.NOT_ATTEMPTED] * len(items)
        if self._reach.known_down:
            return [ChunkStatus.MASTER_FAILED] * len(items)
        try:
            process = await self._supervisor.acquire(deadline)
        except StoreUnavailable as error:
            _log.info("%s: %s of %d chunks not attempted: %s", self.name, op.name, len(items), error)
            return [ChunkStatus.NOT_ATTEMPTED] * len(items)
        calls: list[tuple[list[int], asyncio.Future[bytes]]] = []
        statuses = [ChunkStatus.NOT_ATTEMPTED] * len(items)
        try:
            self._send(process, op, items, calls)
            if calls:
                await asyncio.wait([future for _, future in calls], timeout=_left(deadline))
        except asyncio.CancelledError:
            self._hold_back(op, items, calls)
            for _, future in calls:
                future.cancel()
            if op is not Op.REMOVE:
                await _to_the_end(self._supervisor.discard(process))
            raise
        for indices, future in calls:
            self._judge(op, items, indices, future, judge, statuses)
        self._hold_back(op, items, calls)
        await self._settle(op, process, calls, statuses, deadline)
        return statuses

    def _send(
        self,
        process: WorkerProcess,
        op: Op,
        items: Sequence[Item],
        calls: list[tuple[list[int], asyncio.Future[bytes]]],
    ) -> None:
        """All batches at once; the worker takes them one after the other. What does not fit stays `NOT_ATTEMPTED`."""
        limits = self._config
        for indices in split_batches(
            items, max_items=limits.max_batch_items, max_bytes=limits.max_batch_bytes
        ):
            batch = [items[index] for index in indices]
            payload = (
                frames.pack_keys([one.key for one in batch]) if op is Op.REMOVE else frames.pack_items(batch)
            )
            try:
                calls.append((indices, process.send(op, payload)))
            except StoreUnavailable as error:
                _log.warning("%s: %s", self.name, error)
                return

    def _judge(
        self,
        op: Op,
        items: Sequence[Item],
        indices: Sequence[int],
        future: asyncio.Future[bytes],
        judge: _Judge,
        statuses: list[ChunkStatus],
    ) -> None:
        """Statuses of one batch. Whatever is not positively good gets a status that says so."""
        if not future.done():
            future.cancel()
            verdicts = [ChunkStatus.DEADLINE] * len(indices)
        else:
            try:
                codes = frames.unpack_codes(future.result(), count=len(indices))
                outcomes = [judge(int(code), items[i].size) for code, i in zip(codes, indices, strict=True)]
                verdicts = [outcome.status for outcome in outcomes]
                self._report(op, outcomes)
            except WorkerDied:
                verdicts = [ChunkStatus.WORKER_DIED] * len(indices)
            except StoreError as error:
                _log.error("%s: %s of %d chunks: %s", self.name, op.name, len(indices), error)
                verdicts = [ChunkStatus.INTERNAL] * len(indices)
        for index, verdict in zip(indices, verdicts, strict=True):
            statuses[index] = verdict

    def _report(self, op: Op, outcomes: Sequence[Outcome]) -> None:
        """Tell what this says about the master, and log codes that are no ordinary miss, once each."""
        if any(outcome.status is not ChunkStatus.MASTER_FAILED for outcome in outcomes):
            self._reach.answered()
        ordinary = (ChunkStatus.OK, ChunkStatus.ABSENT)
        for outcome in dict.fromkeys(one for one in outcomes if one.status not in ordinary):
            count = sum(one == outcome for one in outcomes)
            _log.warning(
                "%s: %s: %s (%d) for %d chunks", self.name, op.name, outcome.name, outcome.code, count
            )

    def _hold_back(
        self, op: Op, items: Sequence[Item], calls: Sequence[tuple[list[int], asyncio.Future[bytes]]]
    ) -> None:
        """Remember the keys of puts whose process dies with them."""
        if op is not Op.PUT:
            return
        unanswered = [items[i].key for indices, future in calls if _unanswered(future) for i in indices]
        now = asyncio.get_running_loop().time()
        self._blocked.block(unanswered, until=now + self._config.put_discard_timeout, now=now)

    async def _settle(
        self,
        op: Op,
        process: WorkerProcess,
        calls: Sequence[tuple[list[int], asyncio.Future[bytes]]],
        statuses: Sequence[ChunkStatus],
        deadline: float,
    ) -> None:
        """Make sure that nothing of this call goes on (FENCED)."""
        if op is Op.REMOVE:
            return  # touches no ring
        if any(future.cancelled() for _, future in calls):
            await _to_the_end(self._supervisor.discard(process))
        elif not UNSETTLED.isdisjoint(statuses):
            self._supervisor.swap(process)
            await _to_the_end(self._drain(process, deadline))

    async def _drain(self, process: WorkerProcess, deadline: float) -> None:
        """Let other calls of this process end if they do before the deadline, then kill and reap it."""
        await process.wait_idle(deadline)
        await self._supervisor.discard(process)


def _left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


def _unanswered(future: asyncio.Future[bytes]) -> bool:
    return not future.done() or future.cancelled() or isinstance(future.exception(), WorkerDied)


async def _to_the_end(work: Coroutine[object, object, _T]) -> _T:
    """Await `work` even if the caller is cancelled meanwhile; the cancellation is raised when it has ended.

    A fence that can be cancelled is none.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if task.exception() is not None:
            _log.error("while cancelled: %s", task.exception())
        raise cancelled
    return task.result()
