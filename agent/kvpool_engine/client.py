"""The synchronous client: an engine's scheduler and its workers, on one background event loop.

Every call returns within the deadline it was given. A cache that is slow, full or gone answers "no hit", "skipped" or
"failed chunks"; only a call that is wrong in itself raises. The asynchronous twin is `kvpool_engine.aio`.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpool_engine import aio
from kvpool_engine.hashes import Hashes
from kvpool_engine.link import Backoff
from kvpool_engine.loop import LoopThread, shared_loop
from kvpool_engine.plan import Plan
from kvpool_engine.tensors import Declaration
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import ChunkFailure, Extras, FenceState, IpcEvent, Mode, Notice
from kvpool_engine.worker import Blocks
from kvpool_wire import agent_pb2 as pb


class _Client:
    """What both roles share; `core` is the asynchronous client."""

    def __init__(self, core: aio.Client, loop: LoopThread) -> None:
        self._core = core
        self._loop = loop

    def connect(self, timeout: float = 10.0) -> None:
        """Wait until attached; the client works (without a cache) also before.

        Raises:
            AttachRefusedError: the agent's own words; attempts go on, slowly.
            AgentUnavailableError: not within `timeout` seconds; attempts go on.
        """
        self._loop.run(self._core.connect(timeout), deadline=timeout)

    def status(self, *, deadline: float = 1.0) -> pb.StatusResponse:
        """The agent's account of itself.

        Raises:
            AgentUnavailableError: there is none, or it did not answer within `deadline` seconds.
        """
        return self._loop.run(self._core.status(deadline=deadline), deadline=deadline)

    def note_failure(self, request_id: str, attempt: int, token: int, *, deadline: float = 1.0) -> bool:
        """Say that a load of the request failed on some rank, perhaps on another node (NO_SAVE_AFTER_FAILURE).

        From now on this process and this node's agent save nothing of the request at or past `token` in attempts up to
        this one; what the agent has saved of it in this attempt is taken back. An agent knows by itself of the loads of
        its own sessions, and `SchedulerClient.resume` says it to the scheduler's.

        Args:
            request_id: as in the load.
            attempt: as in the load.
            token: where the first chunk starts that is missing on any rank.
            deadline: seconds.

        Returns:
            True if the agent has taken note; otherwise only this process has.
        """
        return self._loop.run(
            self._core.note_failure(request_id, attempt, token, deadline=deadline), deadline=deadline
        )

    def notices(self) -> list[Notice]:
        """What happened to the session since the last call, oldest first; the newest 64 are kept."""
        return self._core.notices()

    @property
    def attached(self) -> bool:
        """True while there is a session."""
        return self._core.attached

    @property
    def draining(self) -> bool:
        """True from the agent's warning until its session ends."""
        return self._core.draining

    @property
    def late_events(self) -> int:
        """Events that came for a transfer that was over, or for an old session; dropped."""
        return self._core.late_events

    def close(self, *, deadline: float = 5.0) -> FenceState:
        """Detach; see `WorkerClient.close` for what the answer means."""
        return self._loop.run(self._core.close(deadline=deadline), deadline=deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SchedulerClient(_Client):
    """An engine's scheduler: looks prompts up. Attaches in the background from construction on.

    Args:
        socket_dir: the pool's folder on this node, with `agent.sock` and `fd.sock`.
        identity: what decides which bytes a key may hold; equal on every client of one engine.
        engine_id: equal on every client of one engine, unique per engine start.
        backoff: how attachments are repeated.

    Raises:
        IdentityError: an identity that no agent would serve.
    """

    def __init__(
        self, socket_dir: str | Path, identity: pb.Identity, engine_id: str, *, backoff: Backoff | None = None
    ) -> None:
        loop = shared_loop()
        self._scheduler = aio.SchedulerClient(Path(socket_dir), identity, engine_id, backoff=backoff)
        super().__init__(self._scheduler, loop)
        loop.loop.call_soon_threadsafe(self._scheduler.start)

    def lookup(
        self,
        request_id: str,
        hashes: Hashes,
        max_length: int,
        *,
        extras: Extras | None = None,
        deadline: float = 1.0,
    ) -> Plan:
        """How many tokens of a prompt need not be computed? Pruned for EAGLE, once (PRUNE_ONCE).

        Args:
            request_id: for traces and `release`.
            hashes: the whole chain; the first 256 units travel, the rest only when the agent asks.
            max_length: tokens; an engine that must compute one token passes the prompt's length - 1.
            extras: what decides the KV beside the tokens.
            deadline: seconds; past it the answer is a miss.

        Returns:
            A plan; `hit_length` 0 is a miss, `miss_reason` says whether anything was wrong.

        Raises:
            RequestRejectedError: the agent found the call wrong in itself.
            ValueError: hashes of a size or number that no agent takes.
        """
        work = self._scheduler.lookup(request_id, hashes, max_length, extras=extras, deadline=deadline)
        return self._loop.run(work, deadline=deadline)

    def resume(
        self,
        request_id: str,
        plan: Plan,
        start: int,
        failed: Sequence[ChunkFailure],
        *,
        attempt: int = 0,
        deadline: float = 1.0,
    ) -> int:
        """Tokens from which the engine goes on after the chunks in `failed` (of all ranks) did not arrive.

        Never above the hit and never pruned again. Without an agent to ask the answer is `start` where that is a
        boundary of every group, else 0. The failure is noted as `note_failure` would: the next computation of the
        request is another attempt.
        """
        work = self._scheduler.resume(request_id, plan, start, failed, attempt=attempt, deadline=deadline)
        return self._loop.run(work, deadline=deadline)

    def release(self, request_id: str, *, deadline: float = 1.0) -> FenceState:
        """Fence the request's transfers in all of this engine's sessions on this node (FENCED)."""
        return self._loop.run(self._scheduler.release(request_id, deadline=deadline), deadline=deadline)


class WorkerClient(_Client):
    """One rank of an engine: loads and saves its blocks. Attaches in the background from construction on.

    Args:
        socket_dir: the pool's folder on this node.
        identity: as on the scheduler.
        engine_id: as on the scheduler.
        declaration: where this rank's KV lies (`kvpool_engine.tensors.declare`).
        mode: AUTO lets the agent choose.
        backoff: how attachments are repeated.

    Raises:
        IdentityError: an identity that no agent would serve.
        DeclarationError: tensors that do not fit it, or that cannot be shared in MAPPED mode.
    """

    def __init__(
        self,
        socket_dir: str | Path,
        identity: pb.Identity,
        engine_id: str,
        declaration: Declaration,
        *,
        mode: Mode = Mode.AUTO,
        backoff: Backoff | None = None,
    ) -> None:
        loop = shared_loop()
        self._worker = aio.WorkerClient(
            Path(socket_dir), identity, engine_id, declaration, mode=mode, backoff=backoff
        )
        super().__init__(self._worker, loop)
        loop.loop.call_soon_threadsafe(self._worker.start)

    def load(
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
        """Begin to put the plan's chunks into these blocks.

        Args:
            request_id: for `release`, and for NO_SAVE_AFTER_FAILURE.
            plan: from `SchedulerClient.lookup`, perhaps on another node.
            start: tokens that the engine already has; chunks that end at or before it are not loaded.
            blocks: per group the ids of blocks start/block_size to ceil(hit_length/block_size).
            attempt: the engine's number of this computation of the request: 0 at first, one more each time it computes
                it again after a load that failed or was released; the same on all ranks.
            deadline: seconds until the transfer has ended, one way or the other.
            after: recorded after the last kernel that touches the blocks; None is the caller's word that it waited.

        Raises:
            RequestRejectedError: the agent found the call wrong in itself; nothing was touched.
            ValueError: block ids that do not fit the plan.
        """
        work = self._worker.load(
            request_id, plan, start, blocks, attempt=attempt, deadline=deadline, after=after
        )
        return self._loop.run(work, deadline=deadline)

    def save(
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
        """Begin to store these blocks. The result is `skipped` when there is no agent, or nothing worth saving.

        Args:
            request_id: of the request that computed the blocks.
            hashes: the chain, at least up to `end`.
            start: tokens; the first one not saved before.
            end: tokens computed; only whole blocks below it are saved.
            blocks: per group the ids of blocks start/block_size to end/block_size.
            extras: as in the lookup.
            num_prompt_tokens: tokens of the prompt, if known.
            attempt: in which the blocks were computed; a failed load forbids saves of its attempt and earlier ones
                (NO_SAVE_AFTER_FAILURE).
            deadline: seconds.
            after: recorded after the forward pass that wrote the blocks; None is the caller's word that it waited.
        """
        work = self._worker.save(
            request_id,
            hashes,
            start,
            end,
            blocks,
            extras=extras,
            num_prompt_tokens=num_prompt_tokens,
            attempt=attempt,
            deadline=deadline,
            after=after,
        )
        return self._loop.run(work, deadline=deadline)

    def release(
        self, *, request_id: str | None = None, transfer: Transfer | None = None, deadline: float = 1.0
    ) -> FenceState:
        """Stop what is under way and say whether the blocks may be reused (FENCED). Neither argument = everything.

        FENCE_UNCONFIRMED leaves the blocks in `withheld_blocks` until it is known; ask again.
        """
        work = self._worker.release(request_id=request_id, transfer=transfer, deadline=deadline)
        return self._loop.run(work, deadline=deadline)

    @property
    def withheld_blocks(self) -> tuple[frozenset[int], ...]:
        """Per group the block ids that somebody might still touch and that must not be reused yet."""
        return self._worker.withheld_blocks

    @property
    def mode(self) -> Mode | None:
        """What the agent chose for the present session; None without one."""
        return self._worker.mode
