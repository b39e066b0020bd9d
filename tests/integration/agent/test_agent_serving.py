"""A real agent over a real Mooncake: what is saved on one node is loaded on another, every byte of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool_wire import agent_pb2 as pb
from support.agents import AgentProcess
from support.engine_on_wire import engine_on_wire

PROMPT, UNITS = "prompt", 12
SAVED_IN = list(range(1, UNITS + 1))
LOADED_INTO = list(range(40, 40 + UNITS))


def mask(plan: pb.Plan, group: int) -> list[bool]:
    bits = np.unpackbits(np.frombuffer(plan.groups[group].mask, np.uint8), bitorder="little")
    return [bool(bit) for bit in bits[: plan.groups[group].blocks]]


@pytest.mark.parametrize("modes", [(pb.MAPPED, pb.MAPPED), (pb.COPY, pb.COPY), (pb.MAPPED, pb.COPY)])
async def test_what_one_engine_saved_another_node_loads(
    agent: AgentProcess, other_agent: AgentProcess, modes: tuple[pb.Mode.ValueType, ...]
) -> None:
    prompt = f"prompt {modes}"
    async with engine_on_wire(agent.directory, "engine-a", *modes) as saver:
        reports = await saver.save(prompt, UNITS, SAVED_IN)
        assert [list(report.failed) for report in reports] == [[], []]
        # The window's past can never serve a hit, so less than all 24 chunks may be worth saving; none is lost.
        assert all(report.good >= UNITS for report in reports)
    async with engine_on_wire(other_agent.directory, "engine-b", *modes) as loader:
        found = await loader.lookup(prompt, UNITS)
        plan = found.plan
        assert found.miss_reason == pb.MISS_UNSPECIFIED
        # 12 blocks of 16 are there; EAGLE takes one off, once (PRUNE_ONCE).
        assert plan.hit_length == (UNITS - 1) * 16
        assert plan.hit_length_without_eagle == UNITS * 16
        assert mask(plan, 0) == [True] * (UNITS - 1)
        blocks = LOADED_INTO[: UNITS - 1]
        results = await loader.load(prompt, plan, blocks)
        assert [list(result.failed) for result in results] == [[], []]
        assert {result.resume_length for result in results} == {plan.hit_length}
        loader.check_loaded(prompt, plan, blocks)


@pytest.mark.parametrize("mode", [pb.MAPPED, pb.COPY])
async def test_a_plan_is_loaded_at_an_agent_that_never_saw_its_lookup(
    agent: AgentProcess, other_agent: AgentProcess, mode: pb.Mode.ValueType
) -> None:
    prompt = f"travels {mode}"
    blocks = LOADED_INTO[: UNITS - 1]
    async with engine_on_wire(agent.directory, "engine-far", mode, mode) as asker:
        await asker.save(prompt, UNITS, SAVED_IN)
        found = (await asker.lookup(prompt, UNITS)).plan
        assert found.hit_length == (UNITS - 1) * 16
    # As an engine does whose ranks sit on other nodes than its scheduler: the plan's bytes are all that travels.
    plan = pb.Plan.FromString(found.SerializeToString())
    async with engine_on_wire(other_agent.directory, "engine-far", mode, mode) as loader:
        results = await loader.load(prompt, plan, blocks)
        assert [list(result.failed) for result in results] == [[], []]
        assert {result.resume_length for result in results} == {plan.hit_length}
        loader.check_loaded(prompt, plan, blocks)
