"""The resume rule: never above the hit, equal to it when nothing failed, and a failed chunk made good never lowers it.

PRUNE_ONCE holds here too: the resume never prunes. Below `start` it rests on what a hit of exactly `start` needs, and
on nothing else that the engine may have had once.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpool_agent.coordinator import KVCoordinator, Plan
from support import oracle
from support.oracle import FULL, MAMBA, WINDOW, Case, Group, Mask
from support.strategies import (
    any_case,
    arrivals,
    as_lists,
    attention_with_states,
    cases,
    coordinator,
    hashes,
    presence,
)

Loaded = tuple[Case, KVCoordinator, Plan, list[Mask], int]
"""The last: tokens that the engine had before the load."""


@st.composite
def _loads(draw: st.DrawFn, source: st.SearchStrategy[Case]) -> Loaded:
    """A plan and what of it had arrived (or was local) when the load ended."""
    case = draw(source)
    unit = coordinator(case)
    plan = unit.plan(hashes(case), case.max_length, presence(case))
    assume(plan.hit_length > 0)
    arrived = draw(arrivals(as_lists([g.mask for g in plan.groups])))
    start = draw(
        st.just(0) | st.integers(0, plan.hit_length // case.unit).map(lambda units: units * case.unit)
    )
    return case, unit, plan, arrived, start


def _resume(unit: KVCoordinator, plan: Plan, arrived: list[Mask], start: int = 0) -> int:
    return unit.resume_length(plan, [np.array(a, dtype=np.bool_) for a in arrived], start=start)


ANY_LOAD = st.one_of(
    _loads(any_case()), _loads(attention_with_states()), _loads(cases(max_groups=1, eagle=True))
)


@given(ANY_LOAD)
def test_resume_rule_equals_oracle(load: Loaded) -> None:
    case, unit, plan, arrived, start = load
    expected = oracle.resume_length(case, plan.hit_length, arrived, start)
    assert _resume(unit, plan, arrived, start) == expected


@given(ANY_LOAD)
def test_resume_rule_never_above_the_hit_and_aligned(load: Loaded) -> None:
    case, unit, plan, arrived, start = load
    length = _resume(unit, plan, arrived, start)
    assert 0 <= length <= plan.hit_length
    assert length % case.align == 0


@given(ANY_LOAD)
def test_resume_rule_and_prune_once_equals_the_hit_when_nothing_failed(load: Loaded) -> None:
    _, unit, plan, arrived, start = load
    whole = [
        [a or bool(n) for a, n in zip(row, g.mask, strict=True)]
        for row, g in zip(arrived, plan.groups, strict=True)
    ]
    assert _resume(unit, plan, whole, start) == plan.hit_length
    assert _resume(unit, plan, as_lists([g.mask for g in plan.groups]), start) == plan.hit_length


@given(ANY_LOAD, st.data())
def test_resume_rule_a_failed_chunk_made_good_never_lowers_it(load: Loaded, data: st.DataObject) -> None:
    _, unit, plan, arrived, start = load
    failed = [(g, c) for g, row in enumerate(arrived) for c, good in enumerate(row) if not good]
    assume(failed)
    before = _resume(unit, plan, arrived, start)
    for g, c in data.draw(st.lists(st.sampled_from(failed), min_size=1, max_size=5)):
        arrived[g][c] = True
        after = _resume(unit, plan, arrived, start)
        assert after >= before
        before = after


@given(ANY_LOAD)
def test_resume_rule_every_block_that_is_kept_arrived_or_is_local(load: Loaded) -> None:
    """What the engine goes on to use is exactly what a load of the resume length would have to fetch."""
    case, unit, plan, arrived, start = load
    length = _resume(unit, plan, arrived, start)
    for g, mask in enumerate(unit.load_mask(hashes(case), length)):
        local = oracle.local_chunks(case, g, start)
        assert all(arrived[g][c] or c in local for c, needed in enumerate(mask) if needed)


@given(ANY_LOAD, st.data())
def test_resume_rule_never_below_a_start_on_a_boundary_of_every_group(
    load: Loaded, data: st.DataObject
) -> None:
    """LOADED_OR_REPORTED: what failed past the start costs nothing that the engine had before the load."""
    case, unit, plan, _, _ = load
    start = data.draw(st.integers(0, plan.hit_length // case.scheduler_block)) * case.scheduler_block
    arrived = as_lists([g.mask for g in plan.groups])
    for g, row in enumerate(arrived):
        for c, named in enumerate(row):
            if named and (c + 1) * case.groups[g].block > start:
                row[c] = data.draw(st.booleans())
    assert start <= _resume(unit, plan, arrived, start) <= plan.hit_length


@given(st.one_of(_loads(attention_with_states()), _loads(cases(kinds=(FULL, MAMBA)))))
def test_resume_rule_a_recurrent_state_serves_its_own_boundary_alone(load: Loaded) -> None:
    case, unit, plan, arrived, start = load
    length = _resume(unit, plan, arrived, start)
    assume(length > 0)
    for g, group in enumerate(case.groups):
        if group.kind == MAMBA:
            chunk = oracle.ceil_div(length, group.block) - 1
            assert arrived[g][chunk] or length == start
            assert length in ((chunk + 1) * group.block, plan.hit_length)


def test_resume_rule_of_nothing_is_zero() -> None:
    case = Case(
        groups=(Group(WINDOW, 16, window=32),), unit=16, scheduler_block=16, num_hashes=4, max_length=64
    )
    unit = coordinator(case)
    plan = unit.plan(range(4), 64, presence(case))
    assert plan.hit_length == 0
    assert unit.resume_length(plan, [np.zeros(0, dtype=np.bool_)]) == 0


def test_resume_rule_inside_a_block_falls_back_to_the_state_that_is_local() -> None:
    """A hit of 48 loses the state at 48; the engine has the one at 32, and full attention's first block is enough."""
    case = Case(
        groups=(Group(FULL, 32), Group(MAMBA, 32)),
        unit=16,
        scheduler_block=32,
        partial=True,
        num_hashes=4,
        max_length=64,
        exists=frozenset({(0, 1), (0, 3), (1, 2)}),
    )
    unit = coordinator(case)
    plan = unit.plan(range(4), 64, presence(case))
    assert plan.hit_length == 48
    assert _resume(unit, plan, [[True, True], [True, False]]) == 32
    assert _resume(unit, plan, [[True, False], [True, True]]) == 32
    assert _resume(unit, plan, [[True, False], [False, True]]) == 0
    assert _resume(unit, plan, [[True, True], [False, True]]) == 48
