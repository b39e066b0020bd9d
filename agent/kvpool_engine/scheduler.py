"""The asynchronous scheduler client: lookups, and where to resume after a failure.

A lookup costs a fixed number of bytes until the agent asks for more, and ends by its deadline whatever the agent does.
It decides nothing itself: what the agent pruned is pruned (PRUNE_ONCE). Arguments and results are documented on the
synchronous twin in `kvpool_engine.client`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from kvpool_engine.base import Client
from kvpool_engine.breaker import Breaker
from kvpool_engine.deadlines import milliseconds, now
from kvpool_engine.hashes import Hashes, HashSource
from kvpool_engine.link import Backoff
from kvpool_engine.plan import Plan
from kvpool_engine.session import LOOKUP, RELEASE, RESUME, CallError, Session
from kvpool_engine.types import ChunkFailure, Extras, FenceState, MissReason
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits

_MISSES: Final = {
    pb.STORE_UNAVAILABLE: MissReason.STORE_UNAVAILABLE,
    pb.DEADLINE: MissReason.DEADLINE,
    pb.DRAINING: MissReason.DRAINING,
}


class SchedulerClient(Client):
    """An engine's scheduler."""

    def __init__(
        self, socket_dir: Path, identity: pb.Identity, engine_id: str, *, backoff: Backoff | None = None
    ) -> None:
        super().__init__(socket_dir, identity, engine_id, backoff)
        self._breaker = Breaker()

    async def lookup(
        self,
        request_id: str,
        hashes: Hashes,
        max_length: int,
        *,
        extras: Extras | None = None,
        deadline: float = 1.0,
    ) -> Plan:
        """How many tokens of a prompt need not be computed?"""
        source = HashSource.of(hashes)
        session = self._session()
        if session is None:
            return Plan.miss(MissReason.AGENT_UNAVAILABLE)
        if not self._breaker.allows():
            return Plan.miss(MissReason.DEADLINE)
        request = pb.LookupRequest(
            request_id=request_id,
            total_hashes=source.total,
            hash_size=source.size,
            max_length=max_length,
            extras=(extras or Extras()).message(),
        )
        try:
            return await self._ask(session, request, source, now() + deadline)
        except CallError as error:
            if error.timed_out:
                self._breaker.missed()
                return Plan.miss(MissReason.DEADLINE)
            error.raise_if_rejected()
            return Plan.miss(MissReason.AGENT_UNAVAILABLE)

    async def _ask(self, session: Session, request: pb.LookupRequest, source: HashSource, end: float) -> Plan:
        """The first units; all of them only if the agent could not decide on those."""
        response = pb.LookupResponse()
        for units in (min(limits.FIRST_HASHES, source.total), source.total):
            request.hashes = source.head(units)
            request.deadline_ms = milliseconds(end - now())
            response = await session.call(LOOKUP, request, timeout=end - now())
            self._breaker.answered()
            if not response.need_hashes:
                break
        else:
            # It has all of them and still asks: two versions that do not understand each other.
            return Plan.miss(MissReason.AGENT_UNAVAILABLE)
        reason = _MISSES.get(response.miss_reason, MissReason.NONE)
        return Plan(response.plan, reason, response.probed_keys)

    async def resume(
        self,
        request_id: str,
        plan: Plan,
        start: int,
        failed: Sequence[ChunkFailure],
        *,
        attempt: int = 0,
        deadline: float = 1.0,
    ) -> int:
        """Tokens from which the engine goes on after the chunks in `failed` did not arrive."""
        if not failed:
            return plan.hit_length
        first = min(item.chunk * self._geometry.block_sizes[item.group] for item in failed)
        self._failures.note(request_id, attempt, first)
        session = self._session()
        if session is not None and self._breaker.allows():
            # The reasons stay here: where to resume depends on the places alone.
            failures = [pb.ChunkFailure(group=item.group, chunk=item.chunk) for item in failed]
            request = pb.ResumeRequest(
                request_id=request_id, plan=plan.message, start=start, failed=failures, attempt=attempt
            )
            try:
                response = await session.call(RESUME, request, timeout=deadline)
            except CallError as error:
                error.raise_if_rejected()
                if error.timed_out:
                    self._breaker.missed()
            else:
                self._breaker.answered()
                return min(int(response.resume_length), plan.hit_length)
        return min(self._geometry.local_resume(start), plan.hit_length)

    async def release(self, request_id: str, *, deadline: float = 1.0) -> FenceState:
        """Fence the request's transfers in all of this engine's sessions on this node."""
        session = self._session()
        if session is None:
            return FenceState.FENCE_UNCONFIRMED
        request = pb.ReleaseRequest(request_id=request_id, deadline_ms=milliseconds(deadline))
        try:
            response = await session.call(RELEASE, request, timeout=deadline)
        except CallError as error:
            error.raise_if_rejected()
            return FenceState.FENCE_UNCONFIRMED
        return FenceState.FENCED if response.state == pb.FENCED else FenceState.FENCE_UNCONFIRMED

    @override
    def _request(self) -> tuple[pb.AttachRequest, tuple[int, ...]]:
        request = self._attach_request()
        request.scheduler.SetInParent()
        return request, ()
