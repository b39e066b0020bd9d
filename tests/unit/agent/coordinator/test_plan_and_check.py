"""Plans name only keys that were seen, and a plan that says something else than its hit length is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool_agent.coordinator import (
    GroupKind,
    GroupPlan,
    GroupSpec,
    KVCoordinator,
    Plan,
    PlanError,
    check_plan,
)

FULL16 = GroupSpec(GroupKind.FULL_ATTENTION, 16)
FULL32 = GroupSpec(GroupKind.FULL_ATTENTION, 32)
WINDOW16 = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)
ONE_TOKEN = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=1)
STATE32 = GroupSpec(GroupKind.MAMBA, 32)


def build(*groups: GroupSpec, use_eagle: bool = False, partial_hits: bool = False) -> KVCoordinator:
    block = max(group.block_size for group in groups)
    return KVCoordinator(
        groups, hash_block_size=16, scheduler_block_size=block, use_eagle=use_eagle, partial_hits=partial_hits
    )


def units(num_units: int, *present: int) -> np.ndarray:
    array = np.zeros(num_units, dtype=bool)
    array[list(present)] = True
    return array


def key_units(plan: Plan) -> list[list[int]]:
    return [group.key_units.tolist() for group in plan.groups]


def test_load_subset_of_verified_names_the_closing_unit_of_each_chunk() -> None:
    plan = build(FULL32, WINDOW16).plan(range(6), 96, [units(6, 1, 3, 5), units(6, 2, 3, 4, 5)])
    assert plan.hit_length == 96
    assert key_units(plan) == [[1, 3, 5], [-1, -1, -1, -1, 4, 5]]


def test_load_subset_of_verified_shortens_a_hit_whose_last_chunk_was_never_seen() -> None:
    """A window of one token, pruned: vLLM answers 48 and would load chunk 2, which is not there."""
    coordinator = build(ONE_TOKEN, use_eagle=True)
    exists = [units(4, 0, 3)]
    assert coordinator.find_longest_cache_hit(range(4), 64, exists)[1] == 48
    plan = coordinator.plan(range(4), 64, exists)
    assert plan.hit_length == 16
    assert key_units(plan) == [[0]]


def test_load_subset_of_verified_keeps_the_hit_if_that_chunk_happens_to_be_there() -> None:
    """The lookup's own mask is empty here; the plan's is the load mask, because that is what will be recomputed."""
    coordinator = build(ONE_TOKEN, use_eagle=True)
    plan = coordinator.plan(range(4), 64, [units(4, 2, 3)])
    assert plan.hit_length == 48
    assert (
        plan.groups[0].mask.tolist()
        == coordinator.load_mask(range(4), 48)[0].tolist()
        == [False, False, True]
    )


def test_load_subset_of_verified_where_attention_chunks_do_not_end_on_blocks() -> None:
    """Attention chunks of 24 tokens: a hit that falls back over an edge needs blocks never looked at."""
    coordinator = build(GroupSpec(GroupKind.CHUNKED_LOCAL, 16, chunk_size=24))
    assert coordinator.find_longest_cache_hit(range(2), 32, [units(2)])[1] == 16
    assert coordinator.plan(range(2), 32, [units(2)]).hit_length == 0
    assert coordinator.plan(range(2), 32, [units(2, 0)]).hit_length == 16


@pytest.mark.parametrize(
    ("full", "state", "hit", "keys"),
    [
        ((1, 2), (2,), 48, [[1, 2], [-1, 2]]),
        ((1, 3), (2,), 48, [[1, 3], [-1, 2]]),
        ((1, 2, 3), (2,), 48, [[1, 2], [-1, 2]]),
        ((1, 2, 3), (1,), 32, [[1], [1]]),
        ((1,), (2,), 0, [[], []]),
    ],
    ids=["own key", "key of the full block", "both keys", "state on the block", "no state in reach"],
)
def test_load_subset_of_verified_inside_a_block_names_the_key_that_was_seen(
    full: tuple[int, ...], state: tuple[int, ...], hit: int, keys: list[list[int]]
) -> None:
    coordinator = build(FULL32, STATE32, partial_hits=True)
    plan = coordinator.plan(range(4), 64, [units(4, *full), units(4, *state)])
    assert (plan.hit_length, key_units(plan)) == (hit, keys)
    coordinator.check_plan(range(4), plan)


def test_a_limit_that_is_not_aligned_is_searched_not_clamped() -> None:
    """A 64-token prompt of which only the window before 64 is there: a clamp to 48 would claim an absent window."""
    coordinator = build(FULL16, WINDOW16)
    exists = [units(4, 0, 1, 2, 3), units(4, 2, 3)]
    assert coordinator.plan(range(4), 64, exists).hit_length == 64
    assert coordinator.plan(range(4), 63, exists).hit_length == 0


def test_chain_and_presence_and_limit_may_differ_in_length() -> None:
    coordinator = build(FULL16)
    long = [np.ones(10, dtype=bool)]
    assert coordinator.plan(range(4), 1000, long).hit_length == 64
    assert coordinator.plan(range(10), 64, long).hit_length == 64
    assert coordinator.plan(range(10), 160, [np.ones(3, dtype=bool)]).hit_length == 48
    assert coordinator.plan(range(0), 64, long).hit_length == 0
    assert coordinator.load_mask(range(3), 64)[0].tolist() == [True] * 3


def test_answers_are_read_only_and_compare_by_content() -> None:
    coordinator = build(FULL32, WINDOW16)
    exists = [np.ones(6, dtype=bool)] * 2
    plan = coordinator.plan(range(6), 96, exists)
    assert plan == coordinator.plan(range(6), 96, exists)
    assert plan != coordinator.plan(range(6), 64, exists)
    for group in plan.groups:
        for array in (group.mask, group.key_units):
            assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        coordinator.load_mask(range(6), 96)[0][0] = False


def tampered(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with arrays of group 0 replaced."""
    return replace(plan, groups=(replace(plan.groups[0], **changes), *plan.groups[1:]))


GOOD = build(FULL16, WINDOW16)
GOOD_PLAN = GOOD.plan(range(4), 64, [np.ones(4, dtype=bool)] * 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(GOOD_PLAN, hit_length=48), "mask has 4 entries, the hit covers 3 blocks"),
        (
            replace(GOOD_PLAN, hit_length=80, hit_length_without_eagle=80),
            "hit of 80 tokens, the chain covers 0 to 64",
        ),
        (replace(GOOD_PLAN, hit_length=-16), "hit of -16 tokens"),
        (replace(GOOD_PLAN, hit_length=40), "no hit can end at 40 tokens; the longest below it ends at 32"),
        (replace(GOOD_PLAN, hit_length_without_eagle=48), "above its 48 without the prune"),
        (replace(GOOD_PLAN, groups=GOOD_PLAN.groups[:1]), "plan has 1 groups, the coordinator 2"),
        (tampered(GOOD_PLAN, mask=np.ones(3, dtype=bool)), "mask has 3 entries"),
        (tampered(GOOD_PLAN, mask=np.array([True, True, True, False])), "chunk 3 is masked off"),
        (
            tampered(GOOD_PLAN, mask=np.ones(4, dtype=np.int64)),
            "mask is not a one-dimensional array of the right type",
        ),
        (tampered(GOOD_PLAN, mask=[True] * 4), "mask is not a one-dimensional array"),
        (tampered(GOOD_PLAN, key_units=np.array([0, 1, 2])), "key_units has 3 entries"),
        (tampered(GOOD_PLAN, key_units=np.array([0, 1, 2, 2])), "chunk 3 names hash unit 2, expected 3"),
        (tampered(GOOD_PLAN, key_units=np.array([0, -1, 2, 3])), "chunk 1 names hash unit -1, expected 1"),
        (
            replace(GOOD_PLAN, groups=(GOOD_PLAN.groups[0], GOOD_PLAN.groups[0])),
            "group 1 .*chunk 0 is loaded",
        ),
    ],
)
def test_mask_covers_hit_refuses_a_plan_that_says_otherwise(plan: Plan, message: str) -> None:
    GOOD.check_plan(range(4), GOOD_PLAN)
    with pytest.raises(PlanError, match=message):
        check_plan(GOOD, range(4), plan)


@pytest.mark.parametrize(("group", "unit"), [(0, 1), (0, 4), (1, 3), (1, 1)])
def test_mask_covers_hit_refuses_a_tail_key_of_another_boundary(group: int, unit: int) -> None:
    """A hit of 48 in blocks of 32: attention may use units 2 and 3, the state only unit 2."""
    coordinator = build(FULL32, STATE32, partial_hits=True)
    plan = coordinator.plan(range(8), 64, [units(8, 1, 3), units(8, 2)])
    assert plan.hit_length == 48
    coordinator.check_plan(range(8), plan)
    keys = plan.groups[group].key_units.copy()
    keys[-1] = unit
    groups = list(plan.groups)
    groups[group] = GroupPlan(plan.groups[group].mask, keys)
    with pytest.raises(PlanError, match=f"group {group} .*chunk 1 names hash unit {unit}"):
        coordinator.check_plan(range(8), replace(plan, groups=tuple(groups)))
