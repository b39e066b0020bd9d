"""MASK_COVERS_HIT: a load mask has exactly one entry per block of the hit, and a plan that differs is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpool_agent.coordinator import GroupPlan, Plan, PlanError, check_plan
from support import oracle
from support.oracle import Case
from support.strategies import any_case, as_lists, coordinator, hashes, presence


def _plan(case: Case) -> Plan:
    return coordinator(case).plan(hashes(case), case.max_length, presence(case))


def _with_group(plan: Plan, index: int, group: GroupPlan) -> Plan:
    return replace(plan, groups=(*plan.groups[:index], group, *plan.groups[index + 1 :]))


def _refused(case: Case, plan: Plan) -> None:
    with pytest.raises(PlanError):
        check_plan(coordinator(case), hashes(case), plan)


@st.composite
def _places(draw: st.DrawFn) -> tuple[Case, Plan, int, int]:
    """A case, its plan (of a hit above zero), a group and a chunk of that group."""
    case = draw(any_case())
    plan = _plan(case)
    assume(plan.hit_length > 0)
    group = draw(st.integers(0, len(plan.groups) - 1))
    return case, plan, group, draw(st.integers(0, len(plan.groups[group].mask) - 1))


@given(any_case())
def test_mask_covers_hit_one_entry_per_block(case: Case) -> None:
    plan = _plan(case)
    assert plan.hit_length % case.align == 0
    assert 0 <= plan.hit_length <= case.limit
    for group, planned in zip(case.groups, plan.groups, strict=True):
        assert len(planned.mask) == len(planned.key_units) == oracle.ceil_div(plan.hit_length, group.block)


@given(any_case())
def test_mask_covers_hit_plan_says_what_its_loader_recomputes(case: Case) -> None:
    plan = _plan(case)
    recomputed = coordinator(case).load_mask(hashes(case), plan.hit_length)
    assert as_lists([g.mask for g in plan.groups]) == as_lists(recomputed)
    check_plan(coordinator(case), hashes(case), plan)


@given(_places())
def test_mask_covers_hit_shortened_mask_is_refused(place: tuple[Case, Plan, int, int]) -> None:
    """The original bug: a tail entry goes missing and nothing is said."""
    case, plan, g, keep = place
    group = plan.groups[g]
    _refused(
        case, _with_group(plan, g, replace(group, mask=group.mask[:keep], key_units=group.key_units[:keep]))
    )


@given(_places())
def test_mask_covers_hit_flipped_entry_is_refused(place: tuple[Case, Plan, int, int]) -> None:
    case, plan, g, chunk = place
    mask, units = plan.groups[g].mask.copy(), plan.groups[g].key_units.copy()
    mask[chunk] = not mask[chunk]
    _refused(case, _with_group(plan, g, replace(plan.groups[g], mask=mask)))
    units[chunk] = case.closing(g, chunk) if mask[chunk] else -1
    _refused(case, _with_group(plan, g, replace(plan.groups[g], mask=mask, key_units=units)))


@given(_places(), st.integers(-2, 40))
def test_mask_covers_hit_foreign_key_unit_is_refused(place: tuple[Case, Plan, int, int], unit: int) -> None:
    case, plan, g, chunk = place
    named = bool(plan.groups[g].mask[chunk])
    allowed = oracle.serving_units(case, g, chunk, plan.hit_length) if named else [-1]
    assume(unit not in allowed)
    units = plan.groups[g].key_units.copy()
    units[chunk] = unit
    _refused(case, _with_group(plan, g, replace(plan.groups[g], key_units=units)))


@given(_places(), st.integers(1, 3))
def test_mask_covers_hit_extended_hit_is_refused(place: tuple[Case, Plan, int, int], steps: int) -> None:
    """A longer hit over the same chunks; unless every chunk that it names is served by the keys already there."""
    case, plan, _, _ = place
    longer = plan.hit_length + steps * case.align
    chunks = [len(m) for m in oracle.load_mask(case, longer)]
    still_served = chunks == [len(g.mask) for g in plan.groups] and all(
        int(unit) in oracle.serving_units(case, g, c, longer)
        for g, group in enumerate(plan.groups)
        for c, unit in enumerate(group.key_units)
        if unit >= 0
    )
    assume(not still_served or longer > case.chain)
    _refused(case, replace(plan, hit_length=longer))


@given(_places())
def test_mask_covers_hit_unaligned_or_negative_hit_is_refused(place: tuple[Case, Plan, int, int]) -> None:
    case, plan, _, _ = place
    if case.align > 1:
        _refused(case, replace(plan, hit_length=plan.hit_length - 1))
    _refused(case, replace(plan, hit_length=-case.align))


@given(_places())
def test_mask_covers_hit_missing_or_surplus_group_is_refused(place: tuple[Case, Plan, int, int]) -> None:
    case, plan, g, _ = place
    _refused(case, replace(plan, groups=plan.groups[:-1]))
    _refused(case, replace(plan, groups=(*plan.groups, plan.groups[g])))


@given(_places())
def test_mask_covers_hit_shorter_chain_is_refused(place: tuple[Case, Plan, int, int]) -> None:
    """The loader knows fewer hashes than the hit covers: it could not name the keys."""
    case, plan, _, _ = place
    with pytest.raises(PlanError):
        check_plan(coordinator(case), range(plan.hit_length // case.unit - 1), plan)


def test_mask_covers_hit_of_nothing_is_an_empty_mask() -> None:
    case = Case(
        groups=(oracle.Group(oracle.FULL, 16),), unit=16, scheduler_block=16, num_hashes=0, max_length=64
    )
    plan = _plan(case)
    assert plan.hit_length == 0
    assert plan.groups[0].mask.shape == plan.groups[0].key_units.shape == (0,)
    assert plan.groups[0].mask.dtype == np.bool_
