"""Lookup: how many tokens of a prompt need not be computed, and which chunks prove it.

Drives the coordinator's staged probing with the store's answers. Promises: a chunk counts as present only if every KV
shard of it is; a lookup that cannot be answered by its deadline is a miss with a reason, never an error and never a
wait (BOUNDED); a tombstoned key is a miss without being asked for. Refuses: to decide anything itself; hit length,
prune and masks are the coordinator's (PRUNE_ONCE).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry import context as otel_context
from opentelemetry import trace

from kvpool_agent.coordinator import KVCoordinator, Plan
from kvpool_agent.store.errors import StoreDeadline, StoreError
from kvpool_agent.store.protocol import Prober
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import HashChain
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.keys import KeySpace, chunk_key

_TRACER = trace.get_tracer("kvpool.agent")

HIT: Final = "hit"
MISS: Final = "miss"


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """One answer. Exactly one of three: a plan (its hit may be 0), `need_hashes`, or a miss with a reason.

    Attributes:
        plan: None where it is not decided or the store did not answer.
        need_hashes: > 0: the first hashes do not decide it; call again with at least so many units of the chain.
        miss_reason: why there is no plan, else MISS_UNSPECIFIED.
        probed_keys: keys that the store was asked for.
        good_until_unix_ms: until then the store's lease holds what the plan names.
    """

    plan: Plan | None
    need_hashes: int = 0
    miss_reason: pb.MissReason.ValueType = pb.MISS_UNSPECIFIED
    probed_keys: int = 0
    good_until_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """One request, parsed.

    Attributes:
        chain: the hash units that came with the call, the first of the request's chain or all of them.
        total_hashes: units of the whole chain, at least `len(chain)`.
        max_length: tokens; the longest hit that the caller can use.
        extras: what beside the tokens decides the KV.
        deadline: `loop.time()`.
        context: the caller's trace context; a span is made only below a sampled one.
    """

    chain: HashChain
    total_hashes: int
    max_length: int
    extras: pb.Extras
    deadline: float
    context: otel_context.Context | None = None


class Lookups:
    """Answers lookups of every session of the agent. Keeps nothing between calls."""

    def __init__(
        self,
        *,
        prober: Prober,
        tombstones: Tombstones,
        metrics: AgentMetrics,
        lease_seconds: float,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._prober = prober
        self._tombstones = tombstones
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._unix_time = unix_time

    async def lookup(
        self, *, coordinator: KVCoordinator, keyspace: KeySpace, request: LookupRequest
    ) -> LookupAnswer:
        """Answer one request; a miss with a reason whatever the store does."""
        parent = (
            trace.get_current_span(request.context) if request.context is not None else trace.INVALID_SPAN
        )
        if not parent.get_span_context().trace_flags.sampled:
            return await self._timed(coordinator, keyspace, request)
        with _TRACER.start_as_current_span("kvpool.lookup", context=request.context) as span:
            answer = await self._timed(coordinator, keyspace, request)
            span.set_attribute("kvpool.lookup.probed_keys", answer.probed_keys)
            if answer.plan is not None:
                span.set_attribute("kvpool.lookup.hit_tokens", answer.plan.hit_length)
                span.set_attribute("kvpool.lookup.pruned_tokens", pruned_tokens(answer.plan))
            return answer

    async def _timed(
        self, coordinator: KVCoordinator, keyspace: KeySpace, request: LookupRequest
    ) -> LookupAnswer:
        begun = time.perf_counter()
        try:
            answer = await self._search(coordinator, keyspace, request)
        except StoreDeadline:
            answer = LookupAnswer(None, miss_reason=pb.DEADLINE)
        except StoreError:
            answer = LookupAnswer(None, miss_reason=pb.STORE_UNAVAILABLE)
        if not answer.need_hashes:
            self._count(answer, request, seconds=time.perf_counter() - begun)
        return answer

    async def _search(
        self, coordinator: KVCoordinator, keyspace: KeySpace, request: LookupRequest
    ) -> LookupAnswer:
        until = int((self._unix_time() + self._lease_seconds) * 1000)
        steps = coordinator.lookup(range(request.total_hashes), request.max_length)
        prefixes = [
            keyspace.prefixes(group, request.extras) for group in range(len(keyspace.identity.groups))
        ]
        probed = 0
        while (asked := steps.next_probes()) is not None:
            if steps.units_needed > len(request.chain):
                return LookupAnswer(None, need_hashes=steps.units_needed, probed_keys=probed)
            probed += sum(len(units) * len(prefixes[group]) for group, units in enumerate(asked))
            steps.feed(await self._ask(prefixes, asked, request))
        return LookupAnswer(steps.result(), probed_keys=probed, good_until_unix_ms=until)

    async def _ask(
        self, prefixes: Sequence[list[bytes]], asked: Sequence[NDArray[np.int64]], request: LookupRequest
    ) -> list[NDArray[np.bool_]]:
        """Ask for all groups side by side, with one deadline for all of them."""
        # Every answer is waited for, also after an error: a question left behind would run on into the next lookup.
        answers = await asyncio.gather(
            *(self._present(prefixes[group], units, request) for group, units in enumerate(asked)),
            return_exceptions=True,
        )
        present: list[NDArray[np.bool_]] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            present.append(answer)
        return present

    async def _present(
        self, prefixes: list[bytes], units: NDArray[np.int64], request: LookupRequest
    ) -> NDArray[np.bool_]:
        """Which of `units` are there under every one of the group's shards, shape `(len(units),)`."""
        if not len(units):
            return np.zeros(0, dtype=np.bool_)
        size = request.chain.size
        table = np.frombuffer(request.chain.packed, dtype=np.uint8).reshape(-1, size)
        packed = table[units].tobytes()
        begun = time.perf_counter()
        status = "error"
        try:
            with _batch_span(len(units) * len(prefixes)):
                found = await self._prober.exists(prefixes, packed, size, deadline=request.deadline)
            status = "ok"
        finally:
            self._metrics.store_request(
                operation="batch_is_exist",
                status=status,
                seconds=time.perf_counter() - begun,
                keys=len(units) * len(prefixes),
            )
        present: NDArray[np.bool_] = (found == 1).all(axis=0)
        return self._without_tombstones(present, prefixes, packed, size)

    def _without_tombstones(
        self, present: NDArray[np.bool_], prefixes: list[bytes], packed: bytes, size: int
    ) -> NDArray[np.bool_]:
        if not len(self._tombstones):
            return present
        for index in np.flatnonzero(present):
            unit_hash = packed[index * size : (index + 1) * size]
            if any(chunk_key(prefix, unit_hash) in self._tombstones for prefix in prefixes):
                present[index] = False
        return present

    def _count(self, answer: LookupAnswer, request: LookupRequest, *, seconds: float) -> None:
        hit = answer.plan.hit_length if answer.plan is not None else 0
        pruned = pruned_tokens(answer.plan) if answer.plan is not None else 0
        failed = answer.miss_reason != pb.MISS_UNSPECIFIED
        outcome = pb.MissReason.Name(answer.miss_reason).lower() if failed else HIT if hit else MISS
        self._metrics.lookup_done(
            seconds=seconds,
            hit_tokens=hit,
            pruned_tokens=pruned,
            miss_tokens=max(0, request.max_length - hit - pruned),
            outcome=outcome,
        )


def pruned_tokens(plan: Plan) -> int:
    """Tokens that the EAGLE prune took off the hit."""
    return plan.hit_length_without_eagle - plan.hit_length


def _batch_span(keys: int) -> AbstractContextManager[object]:
    # Nothing of the SDK runs for a lookup that nobody traces.
    if not trace.get_current_span().is_recording():
        return nullcontext()
    return _TRACER.start_as_current_span("mooncake.batch_is_exist", attributes={"kvpool.keys": keys})
