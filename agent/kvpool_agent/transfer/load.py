"""The load: plan to bytes in the engine's blocks, verified.

One get is in flight while the batch before it is verified and copied in threads. Promises (LOADED_OR_REPORTED): a chunk
is good only if its trailer and every byte were verified in the ring and its block was then written in full; any other
end, an exception among them, leaves it failed. A chunk found corrupt is buried at once. Promises (BOUNDED): when the
hold is stopped, by a release or at the deadline, `move` returns as soon as no thread is at work on its blocks; a get
still in flight writes only the ring and ends by itself. Refuses: to retry, and to write anything not verified.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvpool_agent.pools.pool import MoveItem
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.chunks import ChunkTable
from kvpool_agent.transfer.errors import MoverFailed
from kvpool_agent.transfer.fence import Hold, Stopped, done_unless_stopped
from kvpool_agent.transfer.lane import LOAD_REASONS, Fetched
from kvpool_agent.transfer.session import Run, Session
from kvpool_agent.transfer.types import (
    ChunkFailure,
    FailReason,
    Landed,
    LandOutcome,
    LoadJob,
    TransferKind,
    TransferResult,
)
from kvpool_agent.transfer.workers import to_the_end
from kvpool_wire.trailer import TrailerFault

_log: Final = logging.getLogger(__name__)


class LoadRun(Run):
    """One load under way."""

    def __init__(
        self,
        session: Session,
        job: LoadJob,
        *,
        table: ChunkTable,
        hold: Hold,
        on_failure: Callable[[int], None],
        on_corrupt: Callable[[list[bytes]], None],
    ) -> None:
        """Prepare; nothing is touched yet.

        Args:
            session: what it shares with others.
            job: validated.
            table: its chunks on this rank.
            hold: on their blocks.
            on_failure: called with the position of the first failed chunk, in tokens, whenever more have failed.
            on_corrupt: called with keys whose bytes are not what was saved under them.
        """
        super().__init__(
            session,
            table=table,
            chain=job.chain,
            extras=job.extras,
            hold=hold,
            deadline=job.deadline,
            context=job.context,
        )
        self._job = job
        self._on_failure = on_failure
        self._on_corrupt = on_corrupt

    async def move(self) -> None:
        """Load every chunk that can be loaded."""
        if not len(self.table):
            return
        landing: asyncio.Task[None] | None = None
        fetched: Fetched | None = None
        try:
            await self.order(self._job.ordering)
            for rows in self.batches(range(len(self.table))):
                fetched = await self._fetch(rows)
                if landing is not None:
                    await landing
                if fetched is None:
                    return
                hopeless = self._note_statuses(rows, fetched.statuses)
                landing = asyncio.create_task(self._land(rows, fetched), name=f"land {self.hold.transfer}")
                fetched = None
                if hopeless:
                    return
        except Stopped:
            return
        except MoverFailed as error:
            _log.error("load %d: %s", self.hold.transfer, error)
            self.fail_rest(FailReason.ENGINE_FAILED)
        finally:
            if fetched is not None:
                self.session.ring.free(fetched.arrived())
            if landing is not None:
                await to_the_end([landing])
                landing.result()

    def given_up(self) -> None:
        """NO_SAVE_AFTER_FAILURE: the load was released. It counts as failed from its start, whatever has landed."""
        if len(self.table):
            self._on_failure(self._job.start)

    def result(self) -> TransferResult:
        """What became of the load; call once, when `move` has ended however it ended."""
        self.settle()
        if self.hold.reason is FailReason.CANCELLED:
            # After a release the blocks are the engine's again: nothing can be promised about what landed before it.
            self.fail_good(FailReason.CANCELLED)
        self._tell_failure()
        failed = self.failures()
        self._measure(self.good(), len(failed))
        return TransferResult(
            transfer=self.hold.transfer,
            kind=TransferKind.LOAD,
            request_id=self.hold.request_id,
            good=self.good(),
            already_stored=0,
            bytes=self.good_bytes(),
            failed=failed,
            resume_length=self._resume_length(failed),
        )

    async def _fetch(self, rows: Sequence[int]) -> Fetched | None:
        """One batch into the ring; None if the load was stopped, the get then goes on without it."""
        keys, sizes = [self.key(row) for row in rows], [self.size(row) for row in rows]
        fetch = self.session.background.start(
            self.session.lane.fetch(
                keys, sizes, hold=self.hold, deadline=self.deadline, context=self.context
            ),
            name=f"get for load {self.hold.transfer}",
        )
        if await done_unless_stopped(fetch, self.hold) and not self.hold.stopped:
            return fetch.result()
        fetch.add_done_callback(self._too_late)
        return None

    def _too_late(self, fetch: "asyncio.Task[Fetched]") -> None:
        """A get ended after its load: give its slots back."""
        if not fetch.cancelled() and fetch.exception() is None:
            arrived = fetch.result().arrived()
            self.session.ring.free(arrived)
            if arrived:
                self.session.metrics.late_completion()

    async def _land(self, rows: Sequence[int], fetched: Fetched) -> None:
        """Verify what arrived and copy it into its blocks."""
        arrived = [at for at, status in enumerate(fetched.statuses) if status is ChunkStatus.OK]
        offsets = [fetched.offsets[at] for at in arrived]
        ticket = self.hold.ticket(self.deadline) if arrived else None
        if ticket is None:
            self.session.ring.free(offsets)
            return
        ticket.when_quiet(lambda: self.session.ring.free(offsets))
        table, mine = self.table, [rows[at] for at in arrived]
        items = [
            MoveItem(int(table.groups[row]), int(table.blocks[row]), offset)
            for row, offset in zip(mine, offsets, strict=True)
        ]
        keys = [self.key(row) for row in mine]

        def check(index: int) -> TrailerFault | None:
            row = mine[index]
            chunk = self.session.ring.view(offsets[index], self.size(row))
            return self.session.verifier.check(chunk, layout=self.layout_digest(row), key=keys[index])

        outcomes = await self.session.mover.land(items, check, ticket=ticket)
        self._note_outcomes(mine, keys, outcomes)

    def _note_statuses(self, rows: Sequence[int], statuses: Sequence[ChunkStatus]) -> bool:
        """Mark what did not arrive; True if there is no point in asking for more."""
        failed = [
            (row, status) for row, status in zip(rows, statuses, strict=True) if status is not ChunkStatus.OK
        ]
        for row, status in failed:
            self.mark_failed([row], LOAD_REASONS.get(status, FailReason.INTERNAL))
        corrupt = [(row, status) for row, status in failed if LOAD_REASONS.get(status) is FailReason.CORRUPT]
        self._bury([self.key(row) for row, _ in corrupt], [str(status) for _, status in corrupt])
        if failed:
            self._tell_failure()
        if ChunkStatus.MASTER_FAILED in statuses:
            # Whoever answers for the keys is gone; every further batch would only wait for it again.
            self.mark_failed(range(rows[-1] + 1, len(self.table)), FailReason.MASTER_UNREACHABLE)
            return True
        return False

    def _note_outcomes(
        self, rows: Sequence[int], keys: Sequence[bytes], outcomes: Sequence[LandOutcome]
    ) -> None:
        faults: list[tuple[bytes, str]] = []
        for row, key, outcome in zip(rows, keys, outcomes, strict=True):
            if outcome is Landed.OK:
                self.mark_good([row])
            elif isinstance(outcome, TrailerFault):
                self.mark_failed([row], FailReason.CORRUPT)
                faults.append((key, outcome))
            elif outcome is Landed.ENGINE_FAILED:
                self.mark_failed([row], FailReason.ENGINE_FAILED)
        self._bury([key for key, _ in faults], [fault for _, fault in faults])
        if any(outcome is not Landed.OK for outcome in outcomes):
            self._tell_failure()

    def _bury(self, keys: list[bytes], faults: list[str]) -> None:
        for key, fault in zip(keys, faults, strict=True):
            if key not in self.session.tombstones:
                _log.error("corrupt: %s: %s; it is a miss from now on", key.decode("ascii", "replace"), fault)
        if keys:
            self.session.tombstones.add(keys)
            self._on_corrupt(keys)

    def _tell_failure(self) -> None:
        position = self.first_failure()
        if position is not None:
            self._on_failure(position)

    def _resume_length(self, failed: Sequence[ChunkFailure]) -> int:
        """PRUNE_ONCE: the coordinator's own search, prune off, over what this rank knows to be there.

        There is what arrived, and what another rank holds (it reports for itself); the coordinator adds what is local.
        """
        plan = self._job.plan
        if not failed:
            return plan.hit_length
        arrived = [group.mask.copy() for group in plan.groups]
        for failure in failed:
            arrived[failure.group][failure.chunk] = False
        return self.session.coordinator.resume_length(plan, arrived, start=self._job.start)

    def _measure(self, good: int, failed: int) -> None:
        corrupt, evicted = self.count(FailReason.CORRUPT), self.count(FailReason.EVICTED)
        self.session.metrics.load_done(
            mode=self.session.mover.mode,
            seconds=time.perf_counter() - self.begun,
            bytes_=self.good_bytes(),
            ok=good,
            failed=failed - corrupt - evicted,
            corrupt=corrupt,
            evicted=evicted,
        )
        self.span.set_attributes({"kvpool.chunks.ok": good, "kvpool.chunks.failed": failed})
        self.span.end()
