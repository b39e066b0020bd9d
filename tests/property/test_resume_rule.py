"""The resume rule: never above the hit, equal to it when nothing failed, and a failed chunk made good never lowers it.

PRUNE_ONCE holds here too: the resume never prunes.
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

Loaded = tuple[Case, KVCoordinator, Plan, list[Mask]]


@st.composite
def _loads(draw: st.DrawFn, source: st.SearchStrategy[Case]) -> Loaded:
    """A plan and what of it had arrived (or was local) when the load ended."""
    case = draw(source)
    unit = coordinator(case)
    plan = unit.plan(hashes(case), case.max_length, presence(case))
    assume(plan.hit_length > 0)
    return case, unit, plan, draw(arrivals(as_lists([g.mask for g in plan.groups])))


def _resume(unit: KVCoordinator, plan: Plan, arrived: list[Mask]) -> int:
    return unit.resume_length(plan, [np.array(a, dtype=np.bool_) for a in arrived])


ANY_LOAD = st.one_of(
    _loads(any_case()), _loads(attention_with_states()), _loads(cases(max_groups=1, eagle=True))
)


@given(ANY_LOAD)
def test_resume_rule_equals_oracle(load: Loaded) -> None:
    case, unit, plan, arrived = load
    assert _resume(unit, plan, arrived) == oracle.resume_length(case, plan.hit_length, arrived)


@given(ANY_LOAD)
def test_resume_rule_never_above_the_hit_and_aligned(load: Loaded) -> None:
    case, unit, plan, arrived = load
    length = _resume(unit, plan, arrived)
    assert 0 <= length <= plan.hit_length
    assert length % case.align == 0


@given(ANY_LOAD)
def test_resume_rule_and_prune_once_equals_the_hit_when_nothing_failed(load: Loaded) -> None:
    _, unit, plan, arrived = load
    whole = [
        [a or bool(n) for a, n in zip(row, g.mask, strict=True)]
        for row, g in zip(arrived, plan.groups, strict=True)
    ]
    assert _resume(unit, plan, whole) == plan.hit_length
    assert _resume(unit, plan, as_lists([g.mask for g in plan.groups])) == plan.hit_length


@given(ANY_LOAD, st.data())
def test_resume_rule_a_failed_chunk_made_good_never_lowers_it(load: Loaded, data: st.DataObject) -> None:
    _, unit, plan, arrived = load
    failed = [(g, c) for g, row in enumerate(arrived) for c, good in enumerate(row) if not good]
    assume(failed)
    before = _resume(unit, plan, arrived)
    for g, c in data.draw(st.lists(st.sampled_from(failed), min_size=1, max_size=5)):
        arrived[g][c] = True
        after = _resume(unit, plan, arrived)
        assert after >= before
        before = after


@given(ANY_LOAD)
def test_resume_rule_every_block_that_is_kept_has_arrived(load: Loaded) -> None:
    """What the engine goes on to use is exactly what a load of the resume length would have to fetch."""
    case, unit, plan, arrived = load
    length = _resume(unit, plan, arrived)
    for g, mask in enumerate(unit.load_mask(hashes(case), length)):
        assert all(arrived[g][c] for c, needed in enumerate(mask) if needed)


@given(st.one_of(_loads(attention_with_states()), _loads(cases(kinds=(FULL, MAMBA)))))
def test_resume_rule_a_recurrent_state_serves_its_own_boundary_alone(load: Loaded) -> None:
    case, unit, plan, arrived = load
    length = _resume(unit, plan, arrived)
    assume(length > 0)
    for g, group in enumerate(case.groups):
        if group.kind == MAMBA:
            chunk = oracle.ceil_div(length, group.block) - 1
            assert arrived[g][chunk]
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
