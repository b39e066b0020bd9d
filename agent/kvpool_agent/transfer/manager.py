"""The transfers of one worker session: starts, fences, reports.

Promises: a job is validated completely before anything is touched, and refused by an exception or reported by exactly
one `TransferResult`, whatever happens in between (LOADED_OR_REPORTED); `release` says FENCED only when nobody touches
the blocks any more; NO_SAVE_AFTER_FAILURE holds from the first failed chunk on, before its result is out; after `close`
nothing touches a block (FENCED) and no process of its loader is left.
Refuses: more transfers than the limit (BOUNDED), to retry, and to outlive its session. Event loop only.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from typing import Final

from opentelemetry import context as otel_context

from kvpool_agent.coordinator import KVCoordinator
from kvpool_agent.store.protocol import Loader, Prober
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.chunks import ChunkTable, load_table, save_table
from kvpool_agent.transfer.errors import Draining, QueueFull, SessionClosed
from kvpool_agent.transfer.fence import BlockTable, Hold, wait_gone
from kvpool_agent.transfer.guard import Shared
from kvpool_agent.transfer.lane import StoreLane
from kvpool_agent.transfer.load import LoadRun
from kvpool_agent.transfer.removals import Why
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.save import SaveRun
from kvpool_agent.transfer.session import Session
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.types import (
    BlockMover,
    FailReason,
    FenceResult,
    FenceState,
    LoadJob,
    SaveJob,
    SaveStart,
    TransferKind,
    TransferMetrics,
    TransferResult,
)
from kvpool_agent.transfer.verify import Verifier
from kvpool_wire.keys import KeySpace
from kvpool_wire.layout import WorkerLayout

_log: Final = logging.getLogger(__name__)


class TransferManager:
    """See the module."""

    def __init__(  # noqa: PLR0913 - the session's parts are wired here and nowhere else
        self,
        *,
        engine_id: str,
        shared: Shared,
        coordinator: KVCoordinator,
        keyspace: KeySpace,
        layout: WorkerLayout,
        loader: Loader,
        prober: Prober,
        ring: Ring,
        mover: BlockMover,
        settings: TransferSettings,
        metrics: TransferMetrics,
        on_done: Callable[[TransferResult], None],
    ) -> None:
        """Serve one session; needs a running event loop.

        Args:
            engine_id: equal for all sessions of one engine.
            shared: the agent's.
            coordinator: of the session's identity.
            keyspace: of the session's identity.
            layout: what this rank declared.
            loader: on this very ring; closed with the manager.
            prober: the agent's.
            ring: the session's, cut for `layout.max_chunk_bytes`.
            mover: between ring and blocks; closed with the manager.
            settings: limits.
            metrics: the agent's.
            on_done: takes each result, on the event loop; must not block.
        """
        self._settings = settings
        self._on_done = on_done
        self._loader = loader
        self._background = Background()
        self._engine_id = engine_id
        self._shared = shared
        self._blocks = BlockTable(len(layout.groups), overlap=layout.overlap)
        lane = StoreLane(
            loader=loader,
            prober=prober,
            ring=ring,
            metrics=metrics,
            background=self._background,
            quarantine_share=settings.quarantine_share,
        )
        # Half of the ring at most, so that a batch can be landing while the next one arrives.
        batch = min(settings.batch_chunks, settings.batch_bytes // ring.slot_bytes, ring.slots // 2)
        self._session = Session(
            coordinator=coordinator,
            keyspace=keyspace,
            layout=layout,
            ring=ring,
            lane=lane,
            mover=mover,
            verifier=Verifier(settings.integrity, sample_share=settings.sample_share),
            tombstones=shared.tombstones,
            metrics=metrics,
            background=self._background,
            batch=max(1, batch),
        )
        self._runs: dict[int, LoadRun | SaveRun] = {}
        self._drives: set[asyncio.Task[None]] = set()
        self._draining = False
        self._closed = False
        self._left = False
        shared.guard.join(engine_id, self._cut)

    @property
    def in_flight(self) -> int:
        """Transfers that are not reported yet."""
        return len(self._runs)

    def withheld(self, group: int) -> frozenset[int]:
        """Blocks of a group that some transfer may still touch."""
        return self._blocks.busy(group)

    def start_load(self, job: LoadJob) -> tuple[int, int]:
        """Begin a load; its result comes through `on_done`, always later than this call returns.

        Returns:
            The transfer's id, and the number of chunks that this rank loads (0 is reported at once).

        Raises:
            TransferRefused: nothing was touched and no result will come; see `errors`.
        """
        self._admit()
        table = load_table(self._session.coordinator, self._session.layout, job)
        hold = self._claim(TransferKind.LOAD, job.request_id, table)
        run = LoadRun(
            self._session,
            job,
            table=table,
            hold=hold,
            on_failure=lambda position: self._shared.guard.failed(
                self._engine_id,
                request_id=job.request_id,
                attempt=job.attempt,
                position=position,
            ),
            on_corrupt=lambda keys: self._shared.removals.add(keys, Why.CORRUPT),
        )
        self._start(run, job.deadline)
        return hold.transfer, len(table)

    def start_save(self, job: SaveJob) -> SaveStart:
        """Begin a save, unless nothing of it is worth saving or may be saved.

        Raises:
            TransferRefused: nothing was touched and no result will come; see `errors`.
        """
        self._admit()
        table = save_table(self._session.coordinator, self._session.layout, job)
        table, skipped = self._allowed(table, job)
        if not len(table):
            return SaveStart(0, 0, skipped)
        hold = self._claim(TransferKind.SAVE, job.request_id, table)
        run = SaveRun(
            self._session,
            job,
            table=table,
            hold=hold,
            on_put=lambda puts: self._shared.guard.put(
                self._engine_id, puts, request_id=job.request_id, attempt=job.attempt
            ),
        )
        self._start(run, job.deadline)
        return SaveStart(hold.transfer, len(table), skipped)

    async def release(
        self, *, request_id: str | None = None, transfer: int | None = None, deadline: float
    ) -> FenceResult:
        """FENCED: end the transfers of a request, one transfer, or all of them; return when their blocks are let go.

        Args:
            request_id: the engine's; with neither this nor `transfer`, everything.
            transfer: one id; ids that have ended or never were hold nothing.
            deadline: `loop.time()`; what cannot be confirmed by then is named, and its blocks stay withheld.
        """
        holds = self._stop(request_id=request_id, transfer=transfer)
        unconfirmed = await wait_gone(holds, deadline=deadline)
        state = FenceState.FENCE_UNCONFIRMED if unconfirmed else FenceState.FENCED
        return FenceResult(state, unconfirmed)

    async def drain(self, deadline: float) -> None:
        """Take nothing new, let what is under way end, stop what has not at the deadline."""
        self._draining = True
        if self._drives:
            timeout = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait(self._drives, timeout=timeout)
        self._stop()
        while self._drives:
            await asyncio.wait(self._drives)

    async def close(self) -> None:
        """End everything; returns when nothing touches a block and the loader's process is gone. Idempotent."""
        self._closed = True
        self._stop()
        await self._session.mover.close()
        while self._drives:
            await asyncio.wait(self._drives)
        await self._loader.close()
        await self._background.wait()
        if not self._left:
            self._left = True
            self._shared.guard.leave(self._engine_id, self._cut)

    def _admit(self) -> None:
        if self._closed:
            raise SessionClosed("the session is over; attach again")
        if self._draining:
            raise Draining("the agent is going away; go on without the cache")
        if len(self._runs) >= self._settings.max_transfers:
            raise QueueFull(
                f"{len(self._runs)} transfers are under way, which is the limit; go on without the cache or ask again"
            )

    def _claim(self, kind: TransferKind, request_id: str, table: ChunkTable) -> Hold:
        return self._blocks.claim(
            transfer=self._shared.ids.next(),
            request_id=request_id,
            kind=kind,
            blocks=table.blocks_by_group(),
        )

    def _start(self, run: LoadRun | SaveRun, deadline: float) -> None:
        self._runs[run.hold.transfer] = run
        # The run's span is the current one in all that it begins, so that its log lines carry the trace's ids.
        traced = contextvars.copy_context()
        traced.run(otel_context.attach, run.context)
        task = asyncio.get_running_loop().create_task(
            self._drive(run, deadline),
            name=f"{run.hold.kind.name.lower()} {run.hold.transfer}",
            context=traced,
        )
        self._drives.add(task)
        task.add_done_callback(self._drive_ended, context=traced)

    async def _drive(self, run: LoadRun | SaveRun, deadline: float) -> None:
        """One transfer from its start to its one result."""
        timer = asyncio.get_running_loop().call_at(deadline, run.hold.stop, FailReason.TIMED_OUT)
        try:
            await run.move()
        finally:
            timer.cancel()
            run.hold.finish()
            del self._runs[run.hold.transfer]
            result = run.result()
            self._on_done(result)

    def _drive_ended(self, task: "asyncio.Task[None]") -> None:
        self._drives.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "%s ended with an error; what had not moved was reported failed",
                task.get_name(),
                exc_info=error,
            )

    def _stop(self, *, request_id: str | None = None, transfer: int | None = None) -> list[Hold]:
        holds = {hold.transfer: hold for hold in self._blocks.holds(request_id=request_id, transfer=transfer)}
        # A transfer whose blocks are let go already may still be about to report: it must not report them good.
        for number, run in self._runs.items():
            if transfer in (None, number) and request_id in (None, run.hold.request_id):
                holds[number] = run.hold
                if isinstance(run, LoadRun):
                    run.given_up()
        for hold in holds.values():
            hold.stop(FailReason.CANCELLED)
        return list(holds.values())

    def _cut(self, request_id: str, attempt: int, position: int) -> None:
        """NO_SAVE_AFTER_FAILURE: a load failed, here or on another rank: stop what is being saved right now."""
        for run in list(self._runs.values()):
            if isinstance(run, SaveRun) and run.hold.request_id == request_id and run.attempt <= attempt:
                run.cut(position)

    def _allowed(self, table: ChunkTable, job: SaveJob) -> tuple[ChunkTable, str]:
        """NO_SAVE_AFTER_FAILURE: leave out what a failed load forbids, and say which."""
        barrier = self._shared.guard.barrier(self._engine_id, request_id=job.request_id, attempt=job.attempt)
        if barrier is None or not len(table):
            return table, ""
        allowed = table.where(table.ends(self._session.block_sizes) <= barrier.position)
        if len(allowed) == len(table):
            return table, ""
        return allowed, (
            f"a load of attempt {barrier.attempt} failed at token {barrier.position}: "
            f"{len(table) - len(allowed)} chunks at or past it are not saved in attempt {job.attempt}; save what was "
            "computed again under a higher attempt"
        )
