"""`resume_length`: never above the hit, the hit if nothing failed, never lower for one more good chunk."""

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, Plan

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)
CHUNKED = GroupSpec(GroupKind.CHUNKED_LOCAL, 16, chunk_size=64)
STATE = GroupSpec(GroupKind.MAMBA, 16)


def planned(
    *groups: GroupSpec, num_units: int = 8, use_eagle: bool = False, partial_hits: bool = False
) -> tuple[KVCoordinator, Plan]:
    block = max(group.block_size for group in groups)
    coordinator = KVCoordinator(
        groups, hash_block_size=16, scheduler_block_size=block, use_eagle=use_eagle, partial_hits=partial_hits
    )
    exists = [np.ones(num_units, dtype=bool) for _ in groups]
    return coordinator, coordinator.plan(range(num_units), num_units * 16, exists)


def arrived(
    plan: Plan, *failed: tuple[int, int], local: tuple[tuple[int, int], ...] = ()
) -> list[np.ndarray]:
    masks = [group.mask.copy() for group in plan.groups]
    for group, chunk in failed:
        masks[group][chunk] = False
    for group, chunk in local:
        masks[group][chunk] = True
    return masks


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize(
    "groups",
    [(FULL,), (WINDOW,), (STATE,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)],
    ids=lambda groups: "+".join(group.kind.value for group in groups),
)
def test_prune_once_resume_equals_the_hit_when_nothing_failed(
    groups: tuple[GroupSpec, ...], use_eagle: bool
) -> None:
    coordinator, plan = planned(*groups, use_eagle=use_eagle)
    assert plan.hit_length > 0
    assert coordinator.resume_length(plan, arrived(plan)) == plan.hit_length


@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize("failed", range(7))
def test_prune_once_full_attention_resumes_at_the_failed_chunk_itself(failed: int, use_eagle: bool) -> None:
    """Not one block before it: the drafter's block was given up by the lookup already."""
    coordinator, plan = planned(FULL, use_eagle=use_eagle)
    assert coordinator.resume_length(plan, arrived(plan, (0, failed))) == failed * 16


def test_a_failed_window_chunk_resumes_where_a_whole_window_is_there() -> None:
    coordinator, plan = planned(FULL, WINDOW)
    assert coordinator.resume_length(plan, arrived(plan, (1, 7))) == 0
    kept = arrived(plan, (1, 7), local=((1, 3), (1, 4)))
    assert coordinator.resume_length(plan, kept) == 80
    assert coordinator.resume_length(plan, arrived(plan, (1, 7), local=((1, 5),))) == 112


def test_a_failed_state_resumes_at_a_state_that_is_local() -> None:
    coordinator, plan = planned(FULL, STATE)
    assert coordinator.resume_length(plan, arrived(plan, (1, 7))) == 0
    assert coordinator.resume_length(plan, arrived(plan, (1, 7), local=((1, 4),))) == 80


def test_a_failed_block_of_chunked_attention_resumes_at_the_attention_chunk() -> None:
    coordinator, plan = planned(FULL, CHUNKED, num_units=6)
    assert plan.hit_length == 96
    assert coordinator.resume_length(plan, arrived(plan, (1, 5))) == 80
    assert coordinator.resume_length(plan, arrived(plan, (1, 4))) == 64


def test_all_groups_resume_at_one_length() -> None:
    coordinator, plan = planned(FULL, WINDOW, STATE)
    local = tuple((group, chunk) for group in (1, 2) for chunk in range(8))
    assert coordinator.resume_length(plan, arrived(plan, (0, 6), (1, 4), local=())) == 0
    masks = arrived(plan, local=local)
    masks[0][6] = masks[1][4] = masks[2][3] = False
    # Full attention allows 96, the window at 96 lacks chunk 4, and at 80 too; the state at 64 failed; 48 has it all.
    assert coordinator.resume_length(plan, masks) == 48


def test_partial_hit_tail_that_arrived_covers_up_to_the_hit_only() -> None:
    full, state = GroupSpec(GroupKind.FULL_ATTENTION, 64), GroupSpec(GroupKind.MAMBA, 64)
    coordinator, _ = planned(full, state, partial_hits=True)
    exists = [np.ones(8, dtype=bool), np.arange(8) == 6]
    plan = coordinator.plan(range(8), 128, exists)
    assert plan.hit_length == 112
    assert coordinator.resume_length(plan, arrived(plan)) == 112
    # The state of the tail is the state at 112, nothing shorter; the state at 64 is the end of the block before.
    assert coordinator.resume_length(plan, arrived(plan, (1, 1))) == 0
    assert coordinator.resume_length(plan, arrived(plan, (0, 1), local=((1, 0),))) == 64


def test_resume_of_an_empty_plan_is_zero() -> None:
    coordinator, plan = planned(FULL, WINDOW, num_units=0)
    assert coordinator.resume_length(plan, [np.zeros(0, dtype=bool)] * 2) == 0


@pytest.mark.parametrize("use_eagle", [False, True])
def test_one_more_good_chunk_never_lowers_the_resume_length(use_eagle: bool) -> None:
    coordinator, plan = planned(FULL, WINDOW, STATE, use_eagle=use_eagle)
    random = np.random.default_rng(20)
    for _ in range(100):
        masks = [random.random(group.mask.size) < 0.8 for group in plan.groups]
        length = coordinator.resume_length(plan, masks)
        for mask in masks:
            for chunk in np.flatnonzero(~mask).tolist():
                mask[chunk] = True
                better = coordinator.resume_length(plan, masks)
                assert length <= better <= plan.hit_length
                length = better


@pytest.mark.parametrize(
    "wrong",
    [[np.ones(8, dtype=bool)], [np.ones(7, dtype=bool)] * 2, [np.ones(8, dtype=np.int64)] * 2],
    ids=["a group missing", "too short", "not booleans"],
)
def test_arrived_of_another_shape_is_refused(wrong: list[np.ndarray]) -> None:
    coordinator, plan = planned(FULL, WINDOW)
    with pytest.raises(ValueError, match="arrived"):
        coordinator.resume_length(plan, wrong)
