"""Lookup, resume and save over the wire: what an engine relies on beside a plain load."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from support import hybrid_engine as model
from support.agents import AgentProcess
from support.engine_on_wire import engine_on_wire

NOWHERE = -1


async def test_first_hashes_decide_a_miss_whatever_the_length(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-miss") as engine:
        short = await engine.lookup("absent", 300, sent=limits.FIRST_HASHES)
        long = await engine.lookup("absent", 60_000, sent=limits.FIRST_HASHES)
        assert short.need_hashes == long.need_hashes == 0
        assert short.plan.hit_length == long.plan.hit_length == 0
        assert 0 < short.probed_keys == long.probed_keys


async def test_a_lookup_asks_for_more_hashes_only_when_it_needs_them(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-more") as engine:
        units = 20
        await engine.save("more", units, list(range(1, units + 1)))
        first = await engine.lookup("more", units, sent=8)
        assert 8 < first.need_hashes <= units
        assert not first.plan.hit_length
        second = await engine.lookup("more", units, sent=first.need_hashes)
        assert second.plan.hit_length == (units - 1) * model.BLOCK


async def test_resume_after_a_failure_never_prunes_prune_once(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-resume") as engine:
        await engine.save("resume", 12, list(range(1, 13)))
        plan = (await engine.lookup("resume", 12)).plan
        whole = await engine.scheduler.call("Resume", pb.ResumeRequest(request_id="resume", plan=plan))
        assert whole.resume_length == plan.hit_length == 11 * model.BLOCK
        failed = [pb.ChunkFailure(group=0, chunk=7, reason=pb.EVICTED)]
        shorter = await engine.scheduler.call(
            "Resume", pb.ResumeRequest(request_id="resume", plan=plan, failed=failed)
        )
        # The window's past was not loaded, so no length but those whose own window arrived can be resumed at; chunk 7
        # of full attention bounds them all. Here that is 0: the window of a hit at 112 tokens was never in the plan.
        assert shorter.resume_length == 0
        local = await engine.scheduler.call(
            "Resume", pb.ResumeRequest(request_id="resume", plan=plan, start=7 * model.BLOCK, failed=failed)
        )
        assert local.resume_length == 7 * model.BLOCK


async def test_a_load_skips_what_the_engine_has(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-start") as engine:
        await engine.save("start", 12, list(range(1, 13)))
        plan = (await engine.lookup("start", 12)).plan
        for ranked in engine.ranks:
            ranked.memory.scribble(b"\xa5")
        blocks = list(range(30, 38))
        reports = await engine.load("start", plan, blocks, start=3 * model.BLOCK)
        assert [list(one.failed) for one in reports] == [[], []]
        # What the engine has is in no block of ours; every other byte of both groups is accounted for.
        engine.check_loaded("start", plan, [NOWHERE] * 3 + blocks)


async def test_saving_again_stores_nothing_again(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-again") as engine:
        first = await engine.save("again", 6, list(range(1, 7)))
        second = await engine.save("again", 6, list(range(1, 7)))
        for one, two in zip(first, second, strict=True):
            assert one.good > 0
            assert one.already_stored == 0
            assert (two.good, two.already_stored) == (0, one.good)


async def test_engines_of_other_identities_see_nothing_same_identity(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-one") as one:
        await one.save("identity", 8, list(range(1, 9)))
        plan = (await one.lookup("identity", 8)).plan
        assert plan.hit_length
        async with engine_on_wire(agent.directory, "engine-two", identity="another") as two:
            assert (await two.lookup("identity", 8)).plan.hit_length == 0
            with pytest.raises(grpc.aio.AioRpcError, match="plan of identity") as caught:
                await two.ranks[0].client.call("Load", two.load_request("identity", plan, list(range(1, 8))))
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert two.ranks[0].memory.read(0, 1) == b"\xa5" * len(two.ranks[0].memory.read(0, 1))


async def test_salted_requests_have_keys_of_their_own(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-salt") as engine:
        await engine.save("salt", 8, list(range(1, 9)))
        chain = b"".join(model.hashes("salt", 8))
        request = pb.LookupRequest(
            request_id="r",
            total_hashes=8,
            hash_size=32,
            hashes=chain,
            max_length=128,
            extras=pb.Extras(cache_salt="s"),
        )
        assert (await engine.scheduler.call("Lookup", request)).plan.hit_length == 0


async def test_chunk_gone_between_lookup_and_load_is_reported_evicted(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-evicted") as engine:
        await engine.save("kept", 8, list(range(1, 9)))
        plan = (await engine.lookup("kept", 8)).plan
        # The same plan under hashes that nobody saved: what a lookup saw and the store lost since.
        plan.hashes = b"".join(model.hashes("lost", 8)[:7])
        for ranked in engine.ranks:
            ranked.memory.scribble(b"\xa5")
        reports = await engine.load("kept", plan, list(range(30, 37)))
        for report, ranked in zip(reports, engine.ranks, strict=True):
            assert {failure.reason for failure in report.failed} == {pb.EVICTED}
            assert report.good == 0
            assert report.resume_length == 0
            assert set(ranked.memory.memory[:]) == {0xA5}
    before = agent.metric("kvpool_load_blocks_total", result="evicted")
    assert before >= 14


async def test_many_engines_at_once(agent: AgentProcess) -> None:
    async def one(name: str) -> None:
        async with engine_on_wire(agent.directory, name) as engine:
            await engine.save(name, 5, list(range(1, 6)))
            plan = (await engine.lookup(name, 5)).plan
            for ranked in engine.ranks:
                ranked.memory.scribble(b"\xa5")
            await engine.load(name, plan, list(range(20, 24)))
            engine.check_loaded(name, plan, list(range(20, 24)))

    await asyncio.gather(*(one(f"engine-{number}") for number in range(3)))
