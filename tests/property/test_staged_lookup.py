"""Staged probing: a lookup that asks in steps gives the plan of one that saw the whole store, and asks little.

LOAD_SUBSET_OF_VERIFIED for the staged path: every chunk that is loaded was asked about, under the key that is loaded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.coordinator import LookupSteps, Plan
from support.oracle import CHUNKED, FULL, MAMBA, WINDOW, Case, Group
from support.strategies import Bits, any_case, coordinator, hashes, layouts, presence

MAX_STEPS = 64  # a step per few hundred units at most: a lookup of these sizes that takes more is stuck
Asked = list[set[int]]


def _run(steps: LookupSteps, store: list[Bits], chain: int) -> tuple[Plan, Asked]:
    """Answer every step from the store; (plan, units asked per group)."""
    asked: Asked = [set() for _ in store]
    for _ in range(MAX_STEPS):
        needed = steps.units_needed
        probes = steps.next_probes()
        if probes is None:
            return steps.result(), asked
        assert len(probes) == len(store)
        for seen, units in zip(asked, probes, strict=True):
            assert all(0 <= u < min(chain, needed) for u in units)
            seen.update(int(u) for u in units)
        assert any(units.size for units in probes), "a step that asks nothing makes no progress"
        steps.feed([bits[units] for bits, units in zip(store, probes, strict=True)])
    raise AssertionError("the lookup does not end")


def _same(staged: Plan, whole: Plan) -> bool:
    return (staged.hit_length, staged.hit_length_without_eagle) == (
        whole.hit_length,
        whole.hit_length_without_eagle,
    ) and all(
        np.array_equal(a.mask, b.mask) and np.array_equal(a.key_units, b.key_units)
        for a, b in zip(staged.groups, whole.groups, strict=True)
    )


@st.composite
def _long_stores(draw: st.DrawFn) -> tuple[Case, list[Bits]]:
    """Chains of several stages (up to 1,500 units), each group a few runs of present units."""
    case = draw(layouts())
    count = draw(st.integers(200, 1500))
    case = replace(case, num_hashes=count, max_length=draw(st.integers(count - 60, count + 2)) * case.unit)
    shared = draw(st.integers(0, count))
    store: list[Bits] = []
    for group in case.groups:
        bits = np.zeros(count, dtype=np.bool_)
        bits[: max(0, shared + draw(st.integers(-40, 40)))] = True
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, count))
            bits[start : start + draw(st.integers(1, 300))] = draw(st.booleans())
        if group.kind == MAMBA and draw(st.booleans()):
            bits[: draw(st.integers(0, count))] = False
        store.append(bits)
    return case, store


@given(any_case())
def test_staged_lookup_equals_the_plan_over_the_whole_store(case: Case) -> None:
    unit = coordinator(case)
    staged, _ = _run(unit.lookup(hashes(case), case.max_length), presence(case), case.num_hashes)
    assert _same(staged, unit.plan(hashes(case), case.max_length, presence(case)))


@given(_long_stores())
def test_staged_lookup_equals_the_plan_over_several_stages(drawn: tuple[Case, list[Bits]]) -> None:
    case, store = drawn
    unit = coordinator(case)
    staged, _ = _run(unit.lookup(hashes(case), case.max_length), store, case.num_hashes)
    assert _same(staged, unit.plan(hashes(case), case.max_length, store))


@given(_long_stores())
def test_staged_lookup_load_subset_of_verified_every_loaded_chunk_was_asked(
    drawn: tuple[Case, list[Bits]],
) -> None:
    case, store = drawn
    plan, asked = _run(coordinator(case).lookup(hashes(case), case.max_length), store, case.num_hashes)
    for g, group in enumerate(plan.groups):
        assert {int(u) for u in group.key_units[group.mask]} <= asked[g]


@given(layouts(), st.sampled_from(["empty", "first block missing"]))
def test_staged_lookup_a_miss_costs_the_same_at_any_length(case: Case, what: str) -> None:
    """With a full-attention group and nothing usable present, probes and hashes needed do not grow with it."""
    if all(g.kind != FULL for g in case.groups):
        case = replace(case, groups=(*case.groups, Group(FULL, case.scheduler_block, variant="added")))
    costs = []
    for count in (3 * 1024, 3 * 16_384):
        longer = replace(case, num_hashes=count, max_length=count * case.unit)
        store = [np.zeros(count, dtype=np.bool_) for _ in case.groups]
        if what == "first block missing":
            for group, bits in zip(case.groups, store, strict=True):
                bits[group.block // case.unit :] = True
        steps = coordinator(longer).lookup(hashes(longer), longer.max_length)
        first = steps.units_needed
        plan, asked = _run(steps, store, count)
        assert plan.hit_length == 0
        costs.append((first, sum(len(a) for a in asked)))
    assert costs[0] == costs[1]
    assert costs[0][0] <= 1024


@given(any_case())
def test_staged_lookup_asks_only_for_keys_that_can_exist(case: Case) -> None:
    """Without partial hits a chunk has one key, that of the unit that closes it."""
    _, asked = _run(coordinator(case).lookup(hashes(case), case.max_length), presence(case), case.num_hashes)
    for group, units in zip(case.groups, asked, strict=True):
        every = group.block // case.unit
        if not case.partial:
            assert all((u + 1) % every == 0 for u in units)


@pytest.mark.parametrize("kind", [WINDOW, CHUNKED, MAMBA])
def test_staged_lookup_without_full_attention_ends_too(kind: str) -> None:
    group = Group(kind, 16, window=64 if kind == WINDOW else 0, chunk=64 if kind == CHUNKED else 0)
    case = Case(groups=(group,), unit=16, scheduler_block=16, num_hashes=1000, max_length=16_000)
    store = [np.zeros(1000, dtype=np.bool_)]
    store[0][300:310] = True
    unit = coordinator(case)
    staged, _ = _run(unit.lookup(hashes(case), case.max_length), store, 1000)
    assert _same(staged, unit.plan(hashes(case), case.max_length, store))
