"""The scheduler's side: what travels, what comes back, and that a bad cache is a miss."""

import asyncio
from typing import Any

import grpc
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from kvpool_engine.aio import SchedulerClient
from kvpool_engine.errors import (
    AgentUnavailableError,
    AttachRefusedError,
    ClientClosedError,
    RequestRejectedError,
)
from kvpool_engine.hashes import PackedHashes
from kvpool_engine.types import ChunkFailure, Extras, FailReason, FenceState, MissReason, NoticeKind
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples
from unit.engine.conftest import FAST
from unit.engine.fake_agent import Call, FakeAgent, Refusal


def found(plan: pb.Plan) -> Any:
    async def answer(request: pb.LookupRequest, call: Call) -> pb.LookupResponse:
        return pb.LookupResponse(plan=plan, probed_keys=7)

    return answer


async def never(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


async def test_a_hit_comes_back_as_the_agents_own_plan(agent: FakeAgent, scheduler: SchedulerClient) -> None:
    wanted = samples.plan([[1, 1, 1], [0, 1, 1]], 12, pruned=4)
    agent.answers["Lookup"] = found(wanted.message)
    extras = Extras(lora_name="l", lora_revision="2", cache_salt="s", media=("a", "b"))
    plan = await scheduler.lookup("r", samples.hashes(5), 19, extras=extras)
    assert (plan, plan.hit_length, plan.pruned_tokens, plan.probed_keys) == (wanted, 12, 4, 7)
    (request,) = agent.called("Lookup")
    assert (request.request_id, request.total_hashes, request.hash_size, request.max_length) == (
        "r",
        5,
        32,
        19,
    )
    assert request.hashes == b"".join(samples.hashes(5))
    assert request.extras == pb.Extras(lora_name="l", lora_revision="2", cache_salt="s", media=["a", "b"])
    assert 0 < request.deadline_ms < 1000


@pytest.mark.parametrize("packed", [False, True])
async def test_only_the_first_256_hashes_travel_until_the_agent_asks_for_more(
    agent: FakeAgent, scheduler: SchedulerClient, packed: bool
) -> None:
    async def answer(request: pb.LookupRequest, call: Call) -> pb.LookupResponse:
        if len(request.hashes) < 1000 * 32:
            return pb.LookupResponse(need_hashes=300)
        return pb.LookupResponse(plan=samples.plan([[1], [1]], 4).message)

    agent.answers["Lookup"] = answer
    units = samples.hashes(1000)
    chain = PackedHashes(b"".join(units), 32) if packed else units
    assert (await scheduler.lookup("r", chain, 4000)).hit_length == 4
    first, second = agent.called("Lookup")
    assert (len(first.hashes), first.total_hashes) == (256 * 32, 1000)
    assert second.hashes == b"".join(units)


async def test_a_miss_on_the_first_hashes_sends_no_more(agent: FakeAgent, scheduler: SchedulerClient) -> None:
    agent.answers["Lookup"] = found(pb.Plan(version=1))
    assert (await scheduler.lookup("r", samples.hashes(1000), 4000)).hit_length == 0
    assert len(agent.called("Lookup")) == 1


async def test_an_agent_that_has_all_hashes_and_asks_again_is_a_miss(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    async def answer(request: pb.LookupRequest, call: Call) -> pb.LookupResponse:
        return pb.LookupResponse(need_hashes=10_000)

    agent.answers["Lookup"] = answer
    plan = await scheduler.lookup("r", samples.hashes(300), 1200)
    assert (plan.hit_length, plan.miss_reason) == (0, MissReason.AGENT_UNAVAILABLE)
    assert len(agent.called("Lookup")) == 2


async def test_bounded_a_lookup_that_is_not_answered_is_a_miss_at_its_deadline(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    agent.answers["Lookup"] = never
    async with asyncio.timeout(2):
        plan = await scheduler.lookup("r", samples.hashes(3), 12, deadline=0.05)
    assert (plan.hit_length, plan.miss_reason) == (0, MissReason.DEADLINE)


async def test_bounded_a_frozen_agent_stops_costing_deadlines(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    agent.answers["Lookup"] = never
    for _ in range(3):
        await scheduler.lookup("r", samples.hashes(3), 12, deadline=0.05)
    asked = len(agent.called("Lookup"))
    async with asyncio.timeout(1):
        plan = await scheduler.lookup("r", samples.hashes(3), 12, deadline=60)
    assert plan.miss_reason is MissReason.DEADLINE
    assert len(agent.called("Lookup")) == asked


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (pb.STORE_UNAVAILABLE, MissReason.STORE_UNAVAILABLE),
        (pb.DEADLINE, MissReason.DEADLINE),
        (pb.DRAINING, MissReason.DRAINING),
        (pb.MISS_UNSPECIFIED, MissReason.NONE),
    ],
)
async def test_the_agents_reason_for_a_miss_is_passed_on(
    agent: FakeAgent, scheduler: SchedulerClient, wire: Any, reason: MissReason
) -> None:
    async def answer(request: pb.LookupRequest, call: Call) -> pb.LookupResponse:
        return pb.LookupResponse(miss_reason=wire)

    agent.answers["Lookup"] = answer
    assert (await scheduler.lookup("r", samples.hashes(3), 12)).miss_reason is reason


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
async def test_an_agent_in_trouble_is_a_miss(agent: FakeAgent, scheduler: SchedulerClient, code: Any) -> None:
    async def answer(request: Any, call: Call) -> Any:
        raise Refusal(code, "trouble")

    agent.answers["Lookup"] = answer
    assert (await scheduler.lookup("r", samples.hashes(3), 12)).miss_reason is MissReason.AGENT_UNAVAILABLE


async def test_a_call_that_is_wrong_in_itself_raises_with_the_agents_words(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    async def answer(request: Any, call: Call) -> Any:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "lookup.hashes has 3 bytes")

    agent.answers["Lookup"] = answer
    with pytest.raises(RequestRejectedError, match="INVALID_ARGUMENT: lookup.hashes has 3 bytes"):
        await scheduler.lookup("r", samples.hashes(3), 12)


@pytest.mark.parametrize("chain", [[b"short"], [b"x" * 32, b"y" * 31]])
async def test_hashes_that_no_agent_takes_are_refused_before_they_travel(
    agent: FakeAgent, scheduler: SchedulerClient, chain: list[bytes]
) -> None:
    with pytest.raises(ValueError, match="hash"):
        await scheduler.lookup("r", chain, 12)
    assert not agent.called("Lookup")


async def test_the_callers_trace_travels_with_the_call(agent: FakeAgent, scheduler: SchedulerClient) -> None:
    agent.answers["Lookup"] = found(pb.Plan(version=1))
    span = trace.NonRecordingSpan(
        trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        await scheduler.lookup("r", samples.hashes(3), 12)
    finally:
        otel_context.detach(token)
    (call,) = agent.calls
    assert call.metadata["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert len(call.metadata["kvpool-token"]) == 32


async def test_resume_asks_the_agent_and_never_exceeds_the_hit(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    async def answer(request: pb.ResumeRequest, call: Call) -> pb.ResumeResponse:
        return pb.ResumeResponse(resume_length=99)

    agent.answers["Resume"] = answer
    plan = samples.plan([[1, 1, 1], [0, 1, 1]], 12)
    failed = [ChunkFailure(0, 2, FailReason.EVICTED)]
    assert await scheduler.resume("r", plan, 4, failed) == 12
    (request,) = agent.called("Resume")
    assert (request.start, [(item.group, item.chunk) for item in request.failed]) == (4, [(0, 2)])
    assert await scheduler.resume("r", plan, 4, []) == 12
    assert len(agent.called("Resume")) == 1


@pytest.mark.parametrize(("start", "length"), [(8, 8), (0, 0), (6, 0)])
async def test_resume_without_an_agent_trusts_only_what_was_local(
    agent: FakeAgent, scheduler: SchedulerClient, start: int, length: int
) -> None:
    async def answer(request: Any, call: Call) -> Any:
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "going down")

    agent.answers["Resume"] = answer
    plan = samples.plan([[1, 1, 1], [0, 1, 1]], 12)
    assert await scheduler.resume("r", plan, start, [ChunkFailure(0, 2, FailReason.EVICTED)]) == length


async def test_release_says_fenced_only_if_the_agent_did(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    assert await scheduler.release("r") is FenceState.FENCED

    async def answer(request: pb.ReleaseRequest, call: Call) -> pb.ReleaseResponse:
        return pb.ReleaseResponse(state=pb.FENCE_UNCONFIRMED, unconfirmed=[3])

    agent.answers["Release"] = answer
    assert await scheduler.release("r") is FenceState.FENCE_UNCONFIRMED
    agent.answers["Release"] = never
    assert await scheduler.release("r", deadline=0.05) is FenceState.FENCE_UNCONFIRMED


async def test_a_dead_agent_is_a_miss_at_once_and_is_attached_again_when_it_is_back(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    agent.answers["Lookup"] = found(samples.plan([[1], [1]], 4).message)
    await agent.stop()
    async with asyncio.timeout(2):
        plan = await scheduler.lookup("r", samples.hashes(3), 12, deadline=60)
    assert plan.miss_reason is MissReason.AGENT_UNAVAILABLE
    agent.epoch += 1
    await agent.start()
    await reattached(scheduler, agent, 2)
    assert (await scheduler.lookup("r", samples.hashes(3), 12)).hit_length == 4
    kinds = [notice.kind for notice in scheduler.notices()]
    assert kinds == [NoticeKind.ATTACHED, NoticeKind.DETACHED, NoticeKind.ATTACHED]
    assert scheduler.notices() == []


async def reattached(client: Any, agent: FakeAgent, attaches: int) -> None:
    """Wait until the agent has seen so many attachments and the client knows of the last."""
    async with asyncio.timeout(5):
        for _ in range(attaches):
            await agent.sessions.get()
    await client.connect(5)


async def test_a_refusal_is_raised_in_the_agents_words_and_tried_again_later(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    agent.refuse = ("ClientVersionSkew", "the pool runs 0.3; upgrade the engine's client")
    other = SchedulerClient(agent.folder, samples.identity(), "engine-2", backoff=FAST)
    with pytest.raises(AttachRefusedError, match="ClientVersionSkew: the pool runs 0.3; upgrade"):
        await other.connect(5)
    assert (await other.lookup("r", samples.hashes(3), 12)).miss_reason is MissReason.AGENT_UNAVAILABLE
    agent.refuse = None
    async with asyncio.timeout(5):
        while (await agent.sessions.get()).request.engine_id != "engine-2":
            pass
    await other.close()


async def test_without_an_agent_connect_says_where_it_looked(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    await agent.stop()
    other = SchedulerClient(agent.folder, samples.identity(), "engine-2", backoff=FAST)
    with pytest.raises(AgentUnavailableError, match=r"not attached within 0.2 s: .*fd.sock"):
        await other.connect(0.2)
    with pytest.raises(AgentUnavailableError, match="no session"):
        await other.status()
    await other.close()
    with pytest.raises(ClientClosedError):
        await other.lookup("r", samples.hashes(3), 12)


async def test_draining_is_seen_and_ends_with_the_session(
    agent: FakeAgent, scheduler: SchedulerClient
) -> None:
    session = await agent.sessions.get()
    session.send(draining=pb.Draining(deadline_ms=1500))
    session.end()
    async with asyncio.timeout(5):
        await agent.sessions.get()
    await scheduler.connect(5)
    attached, draining, detached, *_ = scheduler.notices()
    assert (attached.kind, draining.kind, draining.deadline) == (
        NoticeKind.ATTACHED,
        NoticeKind.DRAINING,
        1.5,
    )
    assert detached.kind is NoticeKind.DETACHED
    assert not scheduler.draining


async def test_status_is_the_agents_own_account(agent: FakeAgent, scheduler: SchedulerClient) -> None:
    async def answer(request: Any, call: Call) -> pb.StatusResponse:
        return pb.StatusResponse(pool="ns.pool", transfers_in_flight=3)

    agent.answers["Status"] = answer
    assert (await scheduler.status()).transfers_in_flight == 3
