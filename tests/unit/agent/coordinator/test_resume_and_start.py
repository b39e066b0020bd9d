"""LOADED_OR_REPORTED: a resume below `start` uses only blocks that an engine with `start` tokens still has."""

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, Plan

FULL_32 = GroupSpec(GroupKind.FULL_ATTENTION, 32)
WINDOW_8 = GroupSpec(GroupKind.SLIDING_WINDOW, 8, sliding_window=17)
STATE_32 = GroupSpec(GroupKind.MAMBA, 32)
CHUNKED_32 = GroupSpec(GroupKind.CHUNKED_LOCAL, 32, chunk_size=64)
UNITS = 16
HYBRIDS = (
    (FULL_32,),
    (FULL_32, WINDOW_8),
    (FULL_32, STATE_32),
    (FULL_32, WINDOW_8, STATE_32),
)


def planned(*groups: GroupSpec, partial_hits: bool = False) -> tuple[KVCoordinator, Plan]:
    coordinator = KVCoordinator(
        groups, hash_block_size=8, scheduler_block_size=32, use_eagle=False, partial_hits=partial_hits
    )
    plan = coordinator.plan(range(UNITS), 8 * UNITS, [np.ones(UNITS, dtype=bool) for _ in groups])
    assert plan.hit_length == 128
    return coordinator, plan


def without(plan: Plan, group: int, chunk: int) -> list[np.ndarray]:
    masks = [one.mask.copy() for one in plan.groups]
    masks[group][chunk] = False
    return masks


def kept_at(group: GroupSpec, start: int) -> set[int]:
    """The whole blocks below `start` that an engine which goes on there still reads."""
    first = {
        GroupKind.FULL_ATTENTION: 0,
        GroupKind.SLIDING_WINDOW: max(0, start - (group.sliding_window or 1) + 1) // group.block_size,
        GroupKind.CHUNKED_LOCAL: start
        // (group.chunk_size or 1)
        * (group.chunk_size or 1)
        // group.block_size,
        GroupKind.MAMBA: start // group.block_size - (0 if start % group.block_size else 1),
    }[group.kind]
    return set(range(max(0, first), start // group.block_size))


@pytest.mark.parametrize(
    ("groups", "partial_hits"),
    [
        *((groups, partial) for groups in HYBRIDS for partial in (False, True)),
        ((FULL_32, CHUNKED_32), False),
    ],
    ids=lambda value: (
        "+".join(group.kind.value for group in value) if isinstance(value, tuple) else str(value)
    ),
)
def test_loaded_or_reported_a_resume_never_rests_on_blocks_that_are_not_local(
    groups: tuple[GroupSpec, ...], partial_hits: bool
) -> None:
    coordinator, plan = planned(*groups, partial_hits=partial_hits)
    for start in range(0, plan.hit_length + 1, 8):
        local = [kept_at(group, start) for group in groups]
        for victim, group in enumerate(groups):
            for chunk in np.flatnonzero(plan.groups[victim].mask).tolist():
                if (chunk + 1) * group.block_size <= start:
                    continue
                arrived = without(plan, victim, chunk)
                length = coordinator.resume_length(plan, arrived, start=start)
                for index, mask in enumerate(coordinator.load_mask(range(UNITS), length)):
                    needed = set(np.flatnonzero(mask).tolist())
                    there = set(np.flatnonzero(arrived[index]).tolist()) | local[index]
                    assert needed <= there, (start, victim, chunk, length, index, needed - there)
                if all(start % size.block_size == 0 for size in groups) and start % 32 == 0:
                    assert length >= start, (start, victim, chunk, length)


def test_resume_falls_to_nothing_where_start_cuts_a_block_and_the_window_below_is_gone() -> None:
    """With 48 tokens the engine keeps the window's blocks 4 and 5; 32 would need 2 and 3."""
    coordinator, plan = planned(FULL_32, WINDOW_8)
    assert coordinator.resume_length(plan, without(plan, 0, 1), start=48) == 0


def test_full_attention_alone_resumes_below_a_start_that_cuts_a_block() -> None:
    coordinator, plan = planned(FULL_32)
    assert coordinator.resume_length(plan, without(plan, 0, 1), start=48) == 32
    assert coordinator.resume_length(plan, without(plan, 0, 3), start=48) == 96


def test_a_chunk_that_is_reported_failed_is_not_local_whatever_start_says() -> None:
    coordinator, plan = planned(FULL_32)
    assert coordinator.resume_length(plan, without(plan, 0, 0), start=64) == 0


def test_a_start_past_the_hit_or_past_any_number_changes_nothing_above_the_hit() -> None:
    coordinator, plan = planned(FULL_32, WINDOW_8)
    assert coordinator.resume_length(plan, [one.mask for one in plan.groups], start=2**63) == 128
    assert coordinator.resume_length(plan, without(plan, 1, 15), start=2**63) == 0


def test_a_negative_start_is_refused() -> None:
    coordinator, plan = planned(FULL_32)
    with pytest.raises(ValueError, match="start must not be negative"):
        coordinator.resume_length(plan, [one.mask for one in plan.groups], start=-1)
