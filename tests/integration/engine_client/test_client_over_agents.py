"""The client library over real agents: bytes saved on one node are loaded on another, and no death of an agent lies."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from integration.engine_client.conftest import MakeAgent, MakeEngine
from integration.engine_client.engine import FAST, Memory, check_memory
from kvpool_engine.client import SchedulerClient, WorkerClient
from kvpool_engine.errors import AttachRefusedError, RequestRejectedError
from kvpool_engine.plan import Plan
from kvpool_engine.types import ChunkFailure, FailReason, FenceState, MissReason, Mode
from support import hybrid_engine as model
from support.agents import AgentProcess

UNITS = 12
SAVED = list(range(1, UNITS + 1))
INTO = list(range(40, 40 + UNITS - 1))
FREE: tuple[frozenset[int], ...] = (frozenset(), frozenset())

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "modes", [(Mode.MAPPED, Mode.MAPPED), (Mode.COPY, Mode.COPY), (Mode.MAPPED, Mode.COPY)]
)
async def test_what_one_node_saved_another_loads_byte_for_byte(
    agent_a: AgentProcess, agent_b: AgentProcess, engine: MakeEngine, modes: tuple[Mode, ...]
) -> None:
    prompt = f"prompt {modes}"
    saver = await engine(agent_a, *modes, name="a")
    assert [rank.mode for rank in saver.ranks] == list(modes)
    for result in await saver.save(prompt, UNITS, SAVED):
        assert result.ok
        assert result.good >= UNITS
    loader = await engine(agent_b, *modes, name="b")
    looked_up = await loader.lookup(prompt, UNITS)
    # EAGLE takes one block off, once (PRUNE_ONCE).
    assert (looked_up.hit_length, looked_up.pruned_tokens) == ((UNITS - 1) * model.BLOCK, model.BLOCK)
    plan = Plan.from_bytes(looked_up.to_bytes())
    for transfer in await loader.begin(prompt, plan, INTO):
        result = await transfer
        assert (result.ok, result.resume_length) == (True, plan.hit_length)
        assert result.good == sum(int(mask.sum()) for mask in plan.masks)
    loader.check(prompt, plan, INTO, units=UNITS)
    failed = [ChunkFailure(0, 3, FailReason.EVICTED)]
    # No length before chunk 3 can be resumed at: its own window was never in the plan.
    assert await loader.scheduler.resume(prompt, plan, 0, failed) == 0
    assert await loader.scheduler.resume(prompt, plan, 0, []) == plan.hit_length


async def test_a_long_prompt_that_is_not_stored_is_a_miss_on_its_first_hashes(
    agent_a: AgentProcess, engine: MakeEngine
) -> None:
    one = await engine(agent_a, Mode.COPY)
    plan = await one.lookup("never saved", 2000)
    assert (plan.hit_length, plan.miss_reason) == (0, MissReason.NONE)


async def test_a_null_block_is_refused_and_nothing_is_touched(
    agent_a: AgentProcess, engine: MakeEngine
) -> None:
    one = await engine(agent_a, Mode.MAPPED, Mode.MAPPED)
    await one.save("null", UNITS, SAVED)
    plan = await one.lookup("null", UNITS)
    with pytest.raises(RequestRejectedError, match="null block"):
        await one.begin("null", plan, [*INTO[:3], 0, *INTO[4:]])
    assert one.ranks[0].withheld_blocks == FREE


async def test_an_agent_refuses_a_second_engine_of_another_protocol_with_its_reason(
    agent_a: AgentProcess, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_engine.base.PROTOCOLS", (99,))
    with pytest.raises(AttachRefusedError, match="ProtocolUnknown"):
        await engine(agent_a, Mode.COPY)


@pytest.mark.parametrize("mode", [Mode.MAPPED, Mode.COPY])
async def test_fenced_a_killed_agent_is_a_miss_at_once_and_is_attached_again(
    mortal: AgentProcess, mortals: MakeAgent, agent_a: AgentProcess, engine: MakeEngine, mode: Mode
) -> None:
    prompt = f"killed {mode}"
    saver = await engine(agent_a, mode, mode, name="a")
    await saver.save(prompt, UNITS, SAVED)
    one = await engine(mortal, mode, mode, name="m")
    plan = await one.lookup(prompt, UNITS)
    assert plan.hit_length == (UNITS - 1) * model.BLOCK
    pid = mortal.pid
    # Frozen first: so it is certain that the load is under way when the agent dies.
    loading = asyncio.ensure_future(one.begin(prompt, plan, INTO, deadline=30))
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(mortal.kill)
    results = [await transfer for transfer in await loading]
    # It died before it read the load: no chunk is good, each is reported, and no byte has moved.
    wanted = {(group, chunk) for group, mask in enumerate(plan.masks) for chunk in mask.nonzero()[0].tolist()}
    for result in results:
        assert (result.good, result.resume_length) == (0, 0)
        assert len(result.failed) == len(wanted)
        assert {(one.group, one.chunk) for one in result.failed} == wanted
    one.check(prompt, plan, INTO, units=UNITS, failed=[result.failed for result in results])
    for rank in one.ranks:
        assert await rank.release(deadline=5) is FenceState.FENCED
        assert rank.withheld_blocks == FREE
    begun = time.monotonic()
    miss = await one.lookup(prompt, UNITS, deadline=30)
    assert (miss.hit_length, miss.miss_reason) == (0, MissReason.AGENT_UNAVAILABLE)
    skipped = await (await one.ranks[0].save("s", model.hashes("s", 1), 0, 16, [[1], [1]]))
    assert skipped.skipped
    assert time.monotonic() - begun < 5, "without an agent nobody waits"
    await asyncio.to_thread(mortals().start)
    for client in (one.scheduler, *one.ranks):
        await client.connect(20)
    again = await one.lookup(prompt, UNITS)
    for transfer in await one.begin(prompt, again, INTO):
        assert (await transfer).ok
    one.check(prompt, again, INTO, units=UNITS)


async def test_fenced_a_frozen_agent_keeps_blocks_withheld_until_its_process_is_gone(
    mortal: AgentProcess, agent_a: AgentProcess, engine: MakeEngine
) -> None:
    saver = await engine(agent_a, Mode.MAPPED, Mode.MAPPED, name="a")
    await saver.save("frozen", UNITS, SAVED)
    one = await engine(mortal, Mode.MAPPED, name="m")
    plan = await one.lookup("frozen", UNITS)
    os.kill(mortal.pid, signal.SIGSTOP)
    (transfer,) = await one.begin("frozen", plan, INTO, deadline=0.3)
    result = await transfer
    assert {item.reason for item in result.failed} == {FailReason.TIMED_OUT}
    assert result.withheld
    rank = one.ranks[0]
    assert await rank.release(request_id="frozen", deadline=0.3) is FenceState.FENCE_UNCONFIRMED
    assert rank.withheld_blocks[0] == frozenset(INTO)
    await asyncio.to_thread(mortal.kill)
    assert await rank.release(request_id="frozen", deadline=5) is FenceState.FENCED
    assert rank.withheld_blocks == FREE


async def test_fenced_a_thawed_agent_frees_the_blocks_itself(
    mortal: AgentProcess, agent_a: AgentProcess, engine: MakeEngine
) -> None:
    saver = await engine(agent_a, Mode.MAPPED, Mode.MAPPED, name="a")
    await saver.save("thawed", UNITS, SAVED)
    one = await engine(mortal, Mode.MAPPED, name="m")
    plan = await one.lookup("thawed", UNITS)
    os.kill(mortal.pid, signal.SIGSTOP)
    try:
        (transfer,) = await one.begin("thawed", plan, INTO, deadline=0.2)
        assert (await transfer).withheld
        assert one.ranks[0].withheld_blocks[0] == frozenset(INTO)
    finally:
        os.kill(mortal.pid, signal.SIGCONT)
    assert await one.ranks[0].release(request_id="thawed", deadline=10) is FenceState.FENCED
    assert one.ranks[0].withheld_blocks == FREE


async def test_fenced_the_agent_closes_its_descriptor_socket_last(
    mortal: AgentProcess, engine: MakeEngine
) -> None:
    """What `kvpool_engine.proof` relies on: a session that ended, but whose agent lives, is proven over."""
    one = await engine(mortal, Mode.MAPPED)
    session = one.ranks[0]._link.session
    assert session is not None
    inode = os.fstat(one.memories[0].storage.fd).st_ino
    assert mapped(mortal.pid, inode)
    assert session._stream is not None
    session._stream.cancel()
    async with asyncio.timeout(10):
        await session.writer.wait()
    assert not mapped(mortal.pid, inode), "unmapped before the socket was closed"
    await one.ranks[0].connect(20)


def mapped(pid: int, inode: int) -> bool:
    with open(f"/proc/{pid}/maps") as maps:
        return any(line.split()[4] == str(inode) for line in maps)


def test_the_synchronous_client_does_the_same(agent_a: AgentProcess) -> None:
    memories = [Memory.create(shard, shared=True) for shard in (0, 1)]
    chain = model.hashes("sync", UNITS)
    with SchedulerClient(agent_a.directory, model.identity(), "sync", backoff=FAST) as scheduler:
        scheduler.connect(20)
        for memory in memories:
            for unit, block in enumerate(SAVED):
                for group in model.LAYERS:
                    memory.write(group, block, model.payload(chain[unit], group, memory.shard))
            with WorkerClient(
                agent_a.directory, model.identity(), "sync", memory.declaration, backoff=FAST
            ) as rank:
                rank.connect(20)
                assert rank.mode is Mode.MAPPED
                assert rank.save("sync", chain, 0, UNITS * model.BLOCK, [SAVED, SAVED]).wait(20).ok
        plan = scheduler.lookup("sync", chain, UNITS * model.BLOCK, deadline=5)
        assert plan.hit_length == (UNITS - 1) * model.BLOCK
        for memory in memories:
            memory.scribble()
            with WorkerClient(
                agent_a.directory, model.identity(), "sync", memory.declaration, backoff=FAST
            ) as rank:
                rank.connect(20)
                assert rank.load("sync", plan, 0, [INTO, INTO]).wait(20).ok
                assert rank.close() is FenceState.FENCED
            check_memory(memory, "sync", plan, INTO, units=UNITS)
        assert scheduler.status().pool == "default.pool"
