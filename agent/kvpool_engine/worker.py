"""The asynchronous worker client: one rank's loads, saves and fences across all its sessions.

It keeps what outlives a session: withheld blocks (FENCED) and failed loads (NO_SAVE_AFTER_FAILURE). Arguments and
results are documented on the synchronous twin in `kvpool_engine.client`.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvpool_engine.base import Client
from kvpool_engine.copying import Copier
from kvpool_engine.deadlines import milliseconds, now
from kvpool_engine.errors import AgentUnavailableError, DeclarationError, RequestRejectedError
from kvpool_engine.failures import failed_at
from kvpool_engine.hashes import Hashes, HashSource
from kvpool_engine.link import Backoff
from kvpool_engine.plan import Plan
from kvpool_engine.session import Session
from kvpool_engine.shm import map_sealed
from kvpool_engine.tensors import Declaration
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import Extras, FailReason, FenceState, IpcEvent, Mode, TransferKind
from kvpool_engine.withheld import Withheld, all_lifted, check_apart
from kvpool_engine.worker_session import WorkerSession
from kvpool_wire import agent_pb2 as pb

Blocks = Sequence[Sequence[int] | NDArray[np.int32]]
"""Per group, block ids."""

MAX_UNTOLD: Final = 256
"""Failures of loads that no agent knows of, kept for the next one (BOUNDED)."""


class WorkerClient(Client):
    """One rank of an engine."""

    def __init__(
        self,
        socket_dir: Path,
        identity: pb.Identity,
        engine_id: str,
        declaration: Declaration,
        *,
        mode: Mode = Mode.AUTO,
        backoff: Backoff | None = None,
    ) -> None:
        super().__init__(socket_dir, identity, engine_id, backoff)
        self._declaration = declaration
        self._message = declaration.message(mode)
        self._withheld = Withheld(len(identity.groups), overlap=declaration.layout.overlap)
        self._worker: WorkerSession | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._untold: deque[tuple[str, int, int]] = deque(maxlen=MAX_UNTOLD)

    async def load(
        self,
        request_id: str,
        plan: Plan,
        start: int,
        blocks: Blocks,
        *,
        attempt: int = 0,
        deadline: float = 10.0,
        after: IpcEvent | None = None,
    ) -> Transfer:
        """Begin to put the plan's chunks into these blocks."""
        spans = [(start // size, math.ceil(plan.hit_length / size)) for size in self._geometry.block_sizes]
        ids = self._block_ids(blocks, spans)
        if plan.hit_length and len(plan.message.groups) != len(ids):
            raise ValueError(f"a plan of {len(plan.message.groups)} groups; this engine has {len(ids)}")
        held = [group.shard is not None for group in self._declaration.layout.groups]
        chunks = plan.chunks_from(start, self._geometry, held)
        transfer = Transfer(
            kind=TransferKind.LOAD,
            request_id=request_id,
            chunks=chunks,
            blocks=[own[wanted - first] for own, wanted, (first, _) in zip(ids, chunks, spans, strict=True)],
            fallback_length=self._geometry.local_resume(start),
            deadline=deadline,
            after=after,
        )
        check_apart(transfer.blocks, self._declaration.layout.overlap)
        transfer.when_done(lambda: self._note_failed(transfer, start, attempt))
        worker = self._ready_worker()
        if not sum(map(len, chunks)):
            transfer.nothing(plan.hit_length or transfer.fallback_length)
            return transfer
        if worker is None:
            transfer.fail_all(FailReason.INTERNAL, "no session with the agent")
            return transfer
        request = pb.LoadRequest(
            request_id=request_id,
            plan=plan.message,
            start=start,
            blocks=[_packed(group) for group in ids],
            deadline_ms=milliseconds(deadline),
            ordering=self._ordering(after),
            attempt=attempt,
        )
        try:
            await worker.load(transfer, request, deadline=now() + deadline)
        except RequestRejectedError:
            self._failures.note(request_id, attempt, start)
            raise
        return transfer

    async def save(
        self,
        request_id: str,
        hashes: Hashes,
        start: int,
        end: int,
        blocks: Blocks,
        *,
        extras: Extras | None = None,
        num_prompt_tokens: int | None = None,
        attempt: int = 0,
        deadline: float = 30.0,
        after: IpcEvent | None = None,
    ) -> Transfer:
        """Begin to store these blocks."""
        source = HashSource.of(hashes)
        sizes = self._geometry.block_sizes
        ids = self._block_ids(blocks, [(start // size, end // size) for size in sizes])
        allowed = self._failures.clip(request_id, end, attempt)
        ids = [own[: max(0, allowed // size - start // size)] for own, size in zip(ids, sizes, strict=True)]
        transfer = Transfer(
            kind=TransferKind.SAVE,
            request_id=request_id,
            chunks=(),
            blocks=[own[own != null] for own, null in zip(ids, self._message.null_blocks, strict=True)],
            fallback_length=0,
            deadline=deadline,
            after=after,
        )
        worker = self._ready_worker()
        if allowed <= start:
            transfer.skip(
                f"a load failed before here in attempt {attempt} or later; save under a higher one"
                if allowed < end
                else "no block"
            )
        elif worker is None:
            transfer.skip("no session with the agent")
        else:
            request = pb.SaveRequest(
                request_id=request_id,
                hash_size=source.size,
                hashes=source.head(min(source.total, math.ceil(allowed / self._identity.hash_block_size))),
                extras=(extras or Extras()).message(),
                start=start,
                end=allowed,
                num_prompt_tokens=num_prompt_tokens,
                blocks=[_packed(group) for group in ids],
                deadline_ms=milliseconds(deadline),
                ordering=self._ordering(after),
                attempt=attempt,
            )
            await worker.save(transfer, request, deadline=now() + deadline)
        return transfer

    async def release(
        self, *, request_id: str | None = None, transfer: Transfer | None = None, deadline: float = 1.0
    ) -> FenceState:
        """Stop what is under way and say whether the blocks may be reused."""
        end = now() + deadline
        request = pb.ReleaseRequest(deadline_ms=milliseconds(deadline))
        if transfer is not None:
            request.transfer = transfer.id
        elif request_id is not None:
            request.request_id = request_id
        else:
            request.everything = True
        worker = self._ready_worker()
        state = FenceState.FENCED
        if worker is not None and (transfer is None or worker.began(transfer)):
            state = await worker.release(request, request_id=request_id, transfer=transfer, timeout=deadline)
        # Without a session nothing runs but what is withheld; with one, an older session's blocks count as well.
        holds = self._withheld.of(request_id=request_id, owner=transfer)
        return state if await all_lifted(holds, end - now()) else FenceState.FENCE_UNCONFIRMED

    @override
    async def close(self, *, deadline: float = 5.0) -> FenceState:
        """Detach: FENCED says that nobody touches this rank's blocks any more.

        Otherwise they stay in `withheld_blocks`, which goes on to be updated as long as the loop runs.
        """
        end = now() + deadline
        if not self._closed:
            await self.release(deadline=deadline / 2)
            await super().close()
        return (
            FenceState.FENCED
            if await all_lifted(self._withheld.of(), end - now())
            else FenceState.FENCE_UNCONFIRMED
        )

    @property
    def withheld_blocks(self) -> tuple[frozenset[int], ...]:
        """Per group the block ids that must not be reused yet."""
        return self._withheld.snapshot

    @property
    def mode(self) -> Mode | None:
        """What the agent chose for the present session; None without one."""
        session = self._link.session
        return None if session is None else Mode(session.ready.mode)

    @override
    def _request(self) -> tuple[pb.AttachRequest, tuple[int, ...]]:
        request = self._attach_request()
        request.worker.CopyFrom(self._message)
        return request, self._declaration.descriptors(self._message)

    @override
    def _begin(self, session: Session) -> None:
        worker = WorkerSession(
            session,
            copier=self._copier(session),
            withheld=self._withheld,
            synchronise=self._declaration.synchronise,
            on_device=self._declaration.on_device,
            late=self._count_late,
        )
        # Bound to its own session: an event of an old one can never reach the transfers of the next.
        session.listen(lambda event: self._deliver(worker, event))
        self._worker = worker
        untold, self._untold = self._untold, deque(maxlen=MAX_UNTOLD)
        for failure in untold:
            self._spawn(self._tell(failure))

    def _copier(self, session: Session) -> Copier | None:
        """Copy mode: map the session's ring. The descriptor is not needed beyond that."""
        ring = session.take_ring()
        if ring is None:
            if session.ready.mode == pb.COPY:
                raise AgentUnavailableError(
                    "attach: copy mode, but no ring came; is the agent of another protocol?"
                )
            return None
        fd, size = ring
        try:
            if session.ready.mode != pb.COPY:
                return None
            return Copier(self._declaration.layout, self._declaration.storages, map_sealed(fd, size))
        except DeclarationError as error:
            raise AgentUnavailableError(f"attach: the ring cannot be used: {error}") from error
        finally:
            os.close(fd)

    @override
    async def _end(self, session: Session) -> None:
        self._draining = False
        worker, self._worker = self._worker, None
        if worker is None:
            await super()._end(session)
            return
        # The worker session first: transfers are reported at once, and it keeps `session.writer` as long as it must.
        worker.end(session.end_reason or "closed")
        await session.close("closed")

    def _deliver(self, worker: WorkerSession, event: pb.ServerEvent) -> None:
        if event.WhichOneof("event") in ("transfer_done", "copy_wanted"):
            worker.handle(event)
        else:
            self._handle(event)

    def _note_failed(self, transfer: Transfer, start: int, attempt: int) -> None:
        """NO_SAVE_AFTER_FAILURE, for this process; and for the agent, where it may not have seen the failure."""
        result = transfer.result()
        position = failed_at(result, start, self._geometry)
        if position is None:
            return
        self._failures.note(transfer.request_id, attempt, position)
        if result.error:
            self._spawn(self._tell((transfer.request_id, attempt, position)))

    async def _tell(self, failure: tuple[str, int, int]) -> None:
        """Tell the agent now, or the next one."""
        if not self._closed and not await self.note_failure(*failure):
            self._untold.append(failure)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ready_worker(self) -> WorkerSession | None:
        return self._worker if self._session() is not None else None

    def _count_late(self) -> None:
        self._late += 1

    def _ordering(self, after: IpcEvent | None) -> pb.Ordering:
        """Mapped mode passes the event on; in copy mode this library waits for it before it copies."""
        if after is not None and self.mode is Mode.MAPPED:
            return pb.Ordering(cuda_event=after.ipc_handle())
        return pb.Ordering(synchronised=True)

    def _block_ids(self, blocks: Blocks, spans: Sequence[tuple[int, int]]) -> list[NDArray[np.int32]]:
        if len(blocks) != len(spans):
            raise ValueError(f"block ids of {len(blocks)} groups; the identity has {len(spans)}")
        ids = [np.asarray(group, np.int32) for group in blocks]
        for index, (own, (first, last)) in enumerate(zip(ids, spans, strict=True)):
            if len(own) != max(0, last - first):
                raise ValueError(f"group {index}: {len(own)} block ids for the blocks {first} to {last}")
        return ids


def _packed(ids: NDArray[np.int32]) -> pb.BlockIds:
    return pb.BlockIds(ids=ids.astype("<i4", copy=False).tobytes())
