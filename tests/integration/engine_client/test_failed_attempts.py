"""NO_SAVE_AFTER_FAILURE over real agents: one rank's failed load, and what the others save before they hear of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.engine_client.conftest import MakeEngine
from integration.engine_client.engine import LibraryEngine
from kvpool_engine import failures as memory
from kvpool_engine.failures import Failures
from kvpool_engine.types import ChunkFailure, FailReason, Mode, TransferResult
from support import hybrid_engine as model
from support.agents import AgentProcess

UNITS = 12
LONGER = UNITS + 4
SAVED = list(range(1, UNITS + 1))
INTO = list(range(40, 40 + UNITS - 1))
BLOCKS = list(range(20, 20 + LONGER))

pytestmark = pytest.mark.timeout(120)


@contextmanager
def frozen_segment(agent: AgentProcess) -> Iterator[None]:
    """Whoever holds the node's chunks does not answer for a while."""
    [pid] = [
        pid for pid in agent.workers() if b"segment" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def save(one: LibraryEngine, prompt: str, *, attempt: int) -> list[TransferResult]:
    chain = model.hashes(prompt, LONGER)
    return [
        await (
            await rank.save(
                prompt, chain, 0, LONGER * model.BLOCK, [BLOCKS, BLOCKS], attempt=attempt, deadline=10
            )
        )
        for rank in one.ranks
    ]


def compute(one: LibraryEngine, prompt: str) -> None:
    """The right content everywhere."""
    chain = model.hashes(prompt, LONGER)
    for one_memory in one.memories:
        for unit, block in enumerate(BLOCKS):
            for group in model.LAYERS:
                one_memory.write(group, block, model.payload(chain[unit], group, one_memory.shard))


async def loads_right_or_nothing(agent: AgentProcess, engine: MakeEngine, prompt: str) -> int:
    """Another engine loads what it finds, every byte of it right; its hit."""
    reader = await engine(agent, Mode.MAPPED, Mode.MAPPED, name=f"reader of {prompt}")
    plan = await reader.lookup(prompt, LONGER)
    if plan.hit_length:
        into = list(range(30, 30 + len(plan.masks[0])))
        for transfer in await reader.begin(prompt, plan, into):
            assert (await transfer).ok
        reader.check(prompt, plan, into, units=LONGER)
    return plan.hit_length


@pytest.fixture
def each_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes of their own: none knows from its memory what another has seen."""
    monkeypatch.setattr(memory, "join", lambda engine_id: Failures())
    monkeypatch.setattr(memory, "leave", lambda engine_id: None)


@pytest.mark.usefixtures("each_its_own_process")
async def test_no_save_after_failure_of_one_rank_the_other_ranks_save_nothing_wrong(
    agent_a: AgentProcess, agent_b: AgentProcess, engine: MakeEngine
) -> None:
    saver = await engine(agent_a, Mode.MAPPED, Mode.MAPPED, name="a")
    await saver.save("x", UNITS, SAVED)
    one = await engine(agent_b, Mode.MAPPED, Mode.MAPPED, name="b")
    plan = await one.lookup("x", UNITS)
    assert (await (await one.ranks[1].load("x", plan, 0, [INTO, INTO]))).ok
    with frozen_segment(agent_a):
        lost = await (await one.ranks[0].load("x", plan, 0, [INTO, INTO], deadline=1.0))
    assert lost.failed
    # Workers learn of each other's failures only after the step: what it computed is worthless on every rank.
    for result in await save(one, "x", attempt=0):
        assert (result.good, "failed" in result.skipped) == (0, True)
    compute(one, "x")
    async with asyncio.timeout(30):
        while not all(result.ok for result in await save(one, "x", attempt=1)):  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # until the store has forgiven the frozen peer, which has no event
    assert await loads_right_or_nothing(agent_a, engine, "x") == (LONGER - 1) * model.BLOCK


@pytest.mark.usefixtures("each_its_own_process")
@pytest.mark.parametrize("by", ["note_failure", "resume"])
async def test_no_save_after_failure_on_another_node_is_taken_back_when_the_engine_says_so(
    agent_a: AgentProcess, agent_b: AgentProcess, engine: MakeEngine, by: str
) -> None:
    prompt = f"far {by}"
    saver = await engine(agent_a, Mode.MAPPED, Mode.MAPPED, name=f"a {by}")
    await saver.save(prompt, UNITS, SAVED)
    one = await engine(agent_b, Mode.MAPPED, Mode.MAPPED, name=f"b {by}")
    plan = await one.lookup(prompt, UNITS)
    assert all(result.good for result in await save(one, prompt, attempt=0)), "garbage past the hit"
    token = (UNITS - 1) * model.BLOCK
    if by == "note_failure":
        assert await one.ranks[0].note_failure(prompt, 0, token - model.BLOCK)
    else:
        await one.scheduler.resume(prompt, plan, 0, [ChunkFailure(0, UNITS - 2, FailReason.TIMED_OUT)])
    for result in await save(one, prompt, attempt=0):
        assert result.good == 0
    assert await loads_right_or_nothing(agent_b, engine, prompt) <= token
    async with asyncio.timeout(30):
        while True:
            compute(one, prompt)
            if all(result.ok for result in await save(one, prompt, attempt=1)):
                break
            await asyncio.sleep(0.5)  # leases have no event
    assert await loads_right_or_nothing(agent_a, engine, prompt) == (LONGER - 1) * model.BLOCK


async def test_a_request_that_was_released_in_mid_load_saves_again_in_its_next_attempt(
    agent_a: AgentProcess, agent_b: AgentProcess, engine: MakeEngine
) -> None:
    saver = await engine(agent_a, Mode.MAPPED, Mode.MAPPED, name="a released")
    await saver.save("released", UNITS, SAVED)
    one = await engine(agent_b, Mode.MAPPED, Mode.MAPPED, name="b released")
    plan = await one.lookup("released", UNITS)
    with frozen_segment(agent_a):
        loading = await one.ranks[0].load("released", plan, 0, [INTO, INTO], deadline=5)
        await one.ranks[0].release(request_id="released")
        assert (await loading).failed
    for result in await save(one, "released", attempt=0):
        assert result.good == 0
    compute(one, "released")
    async with asyncio.timeout(30):
        while not all(result.ok for result in await save(one, "released", attempt=1)):  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # as above
    assert await loads_right_or_nothing(agent_a, engine, "released") == (LONGER - 1) * model.BLOCK
