"""The save: blocks to keys, sealed, whole and confirmed.

While one put is in flight the next batch is collected. Promises (WHOLE_OR_ABSENT): only chunks that were collected in
full and sealed are put, a put makes a key visible with all its bytes or not at all, and a save that was stopped puts no
further batch. Promises (NO_SAVE_AFTER_FAILURE): `cut` stops it, and every batch that was put, or may have been, is told
to `on_put`, which takes back what must not be there.
A chunk counts as saved only when the store, asked again, has it: the store answers success to much else. Refuses: to
overwrite (what is there is the same chunk by its key), and to save what is tombstoned or held back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool_agent.pools.pool import MoveItem
from kvpool_agent.store.protocol import ChunkStatus, PutItem
from kvpool_agent.transfer.chunks import ChunkTable
from kvpool_agent.transfer.errors import MoverFailed, RingBroken
from kvpool_agent.transfer.fence import Hold, Stopped, done_unless_stopped, unless_stopped
from kvpool_agent.transfer.guard import Put
from kvpool_agent.transfer.lane import SAVE_REASONS
from kvpool_agent.transfer.session import Run, Session
from kvpool_agent.transfer.types import FailReason, Landed, SaveJob, TransferKind, TransferResult

_log: Final = logging.getLogger(__name__)

_NOT_PUT: Final = frozenset(
    {ChunkStatus.NOT_ATTEMPTED, ChunkStatus.NOT_READY, ChunkStatus.FULL, ChunkStatus.INVALID}
)
"""Statuses after which nothing of this save is stored; what another has put under the key is not ours to revoke."""

_HOPELESS: Final = {
    ChunkStatus.FULL: FailReason.STORE_FULL,
    ChunkStatus.MASTER_FAILED: FailReason.MASTER_UNREACHABLE,
}
"""Statuses after which the rest of a save is not tried: it would only press a store that cannot take it."""


class SaveRun(Run):
    """One save under way."""

    def __init__(
        self,
        session: Session,
        job: SaveJob,
        *,
        table: ChunkTable,
        hold: Hold,
        on_put: Callable[[Sequence[Put]], None],
    ) -> None:
        """Prepare; nothing is touched yet.

        Args:
            session: what it shares with others.
            job: validated.
            table: its chunks on this rank.
            hold: on their blocks.
            on_put: called with the chunks of a batch once its put is over.
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
        self._ends = table.ends(session.block_sizes)
        self._on_put = on_put
        self._put_rows: set[int] = set()
        self._cut_at: int | None = None
        self._putting: asyncio.Task[None] | None = None
        self._reported = False
        self._hopeless = False

    async def move(self) -> None:
        """Save every chunk that can be saved."""
        staged: _Staged | None = None
        try:
            await self.order(self._job.ordering)
            rows = await unless_stopped(self._missing(), self.hold)
            for batch in self.batches(rows):
                staged = await self._collect(batch)
                if staged is None or not await self._put_is_over() or self.hold.stopped or self._hopeless:
                    return
                self._putting = self.session.background.start(
                    self._put(staged), name=f"put for save {self.hold.transfer}"
                )
                staged = None
            await self._put_is_over()
        except Stopped:
            return
        except MoverFailed as error:
            _log.error("save %d: %s", self.hold.transfer, error)
            self.fail_rest(FailReason.ENGINE_FAILED)
        finally:
            if staged is not None:
                self.session.ring.free(item.offset for item in staged.items)

    @property
    def attempt(self) -> int:
        """The job's."""
        return self._job.attempt

    def cut(self, position: int) -> None:
        """NO_SAVE_AFTER_FAILURE: stop; what was put at or past token `position` is not saved any more."""
        if not (self._ends > position).any():
            return
        self._cut_at = position if self._cut_at is None else min(position, self._cut_at)
        self.hold.stop(FailReason.CANCELLED)
        self._fail_cut()

    def result(self) -> TransferResult:
        """What became of the save; call once, when `move` has ended however it ended."""
        self.settle()
        self._reported = True
        failed = self.failures()
        displaced = self.count(FailReason.DISPLACED)
        self.session.metrics.save_done(
            mode=self.session.mover.mode,
            seconds=time.perf_counter() - self.begun,
            bytes_=self.good_bytes(),
            saved=self.good(),
            already=self.stored(),
            failed=len(failed) - displaced,
            displaced=displaced,
        )
        self.span.set_attributes({"kvpool.chunks.ok": self.good(), "kvpool.chunks.failed": len(failed)})
        self.span.end()
        return TransferResult(
            transfer=self.hold.transfer,
            kind=TransferKind.SAVE,
            request_id=self.hold.request_id,
            good=self.good(),
            already_stored=self.stored(),
            bytes=self.good_bytes(),
            failed=failed,
            resume_length=0,
        )

    async def _missing(self) -> list[int]:
        """The chunks that have to be put; the others get their fate here."""
        rows = []
        for row in range(len(self.table)):
            key = self.key(row)
            if key in self.session.tombstones:
                self.mark_failed(
                    [row], FailReason.CORRUPT
                )  # what is there is not overwritten, and nobody may read it
            elif self.session.lane.held_back(key):
                self.mark_failed([row], FailReason.HELD_BACK)
            else:
                rows.append(row)
        statuses = await self._exists(rows)
        missing: list[int] = []
        for row, status in zip(rows, statuses, strict=True):
            if status is ChunkStatus.OK:
                self.mark_stored([row])
            elif status is ChunkStatus.ABSENT:
                missing.append(row)
            else:
                self.mark_failed([row], SAVE_REASONS.get(status, FailReason.INTERNAL))
        return missing

    async def _exists(self, rows: Sequence[int]) -> list[ChunkStatus]:
        if not rows:
            return []
        keys = [self.key(row) for row in rows]
        return await self.session.lane.exists(keys, deadline=self.deadline, context=self.context)

    async def _collect(self, rows: Sequence[int]) -> "_Staged | None":
        """One batch from its blocks into the ring, sealed; None if the save is over."""
        try:
            offsets = await self.session.lane.take(len(rows), hold=self.hold, deadline=self.deadline)
        except RingBroken as error:
            _log.error("save %d: %s", self.hold.transfer, error)
            self.fail_rest(FailReason.INTERNAL)
            return None
        ticket = self.hold.ticket(self.deadline) if offsets is not None else None
        if offsets is None or ticket is None:
            self.session.ring.free(offsets or ())
            return None
        table, free = self.table, self.session.ring.free
        items = [
            MoveItem(int(table.groups[row]), int(table.blocks[row]), at)
            for row, at in zip(rows, offsets, strict=True)
        ]
        keys = [self.key(row) for row in rows]

        def seal(index: int) -> None:
            chunk = self.session.ring.view(offsets[index], self.size(rows[index]))
            self.session.verifier.seal(chunk, layout=self.layout_digest(rows[index]), key=keys[index])

        try:
            outcomes = await self.session.mover.collect(items, seal, ticket=ticket)
        except BaseException:
            ticket.when_quiet(lambda: free(offsets))
            raise
        self.mark_failed(
            (row for row, outcome in zip(rows, outcomes, strict=True) if outcome is Landed.ENGINE_FAILED),
            FailReason.ENGINE_FAILED,
        )
        good = [index for index, outcome in enumerate(outcomes) if outcome is Landed.OK]
        useless = [offsets[index] for index in range(len(rows)) if index not in set(good)]
        ticket.when_quiet(lambda: free(useless))
        puts = [PutItem(keys[index], offsets[index], self.size(rows[index])) for index in good]
        return _Staged([rows[index] for index in good], puts)

    async def _put_is_over(self) -> bool:
        """Wait for the put in flight; False if the save was stopped first, the put then goes on without it."""
        if self._putting is None:
            return True
        if not await done_unless_stopped(self._putting, self.hold):
            return False
        self._putting.result()
        return True

    async def _put(self, staged: "_Staged") -> None:
        """Put one batch and ask for it again; its slots are given back."""
        if not staged.rows:
            return
        # If it ends with an error nobody knows: any of them may be there.
        put_rows = list(staged.rows)
        try:
            statuses = await self.session.lane.store(
                staged.items, hold=self.hold, deadline=self.deadline, context=self.context
            )
            put_rows = [
                row for row, status in zip(staged.rows, statuses, strict=True) if status not in _NOT_PUT
            ]
            rows = [
                row for row, status in zip(staged.rows, statuses, strict=True) if status is ChunkStatus.OK
            ]
            if self.hold.stopped:
                # Not confirmed any more: whatever the store has by now, the save is reported as it ended.
                self.session.metrics.late_completion()
                return
            present = await unless_stopped(self._exists(rows), self.hold)
            self._note(staged.rows, statuses, dict(zip(rows, present, strict=True)))
        except Stopped:
            self.session.metrics.late_completion()
        finally:
            self._put_rows.update(put_rows)
            self._fail_cut()
            self._on_put([Put(self.key(row), int(self._ends[row])) for row in put_rows])

    def _note(
        self, rows: Sequence[int], statuses: Sequence[ChunkStatus], present: dict[int, ChunkStatus]
    ) -> None:
        for row, status in zip(rows, statuses, strict=True):
            if status is ChunkStatus.NOT_ATTEMPTED:
                continue  # stopped before its turn: it fails with the reason for that
            if status is not ChunkStatus.OK:
                self.mark_failed([row], SAVE_REASONS.get(status, FailReason.INTERNAL))
            elif present[row] is ChunkStatus.OK:
                self.mark_good([row])
            elif present[row] is ChunkStatus.ABSENT:
                self.mark_failed([row], FailReason.DISPLACED)
            else:
                self.mark_failed([row], SAVE_REASONS.get(present[row], FailReason.INTERNAL))
        for status, reason in _HOPELESS.items():
            if status in statuses:
                self.fail_rest(reason)
                self._hopeless = True

    def _fail_cut(self) -> None:
        """What was put past the cut is not reported as good."""
        cut = self._cut_at
        if cut is not None and not self._reported:
            self.mark_failed((row for row in self._put_rows if self._ends[row] > cut), FailReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class _Staged:
    """A batch that lies sealed in the ring."""

    rows: Sequence[int]
    items: Sequence[PutItem]
