"""The contract that the original bug broke (vLLM #43516): a lookup prunes for EAGLE, nothing else does."""

from collections.abc import Iterable

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, PlanError

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)
CHAIN = range(4)


def coordinator(*groups: GroupSpec, use_eagle: bool) -> KVCoordinator:
    return KVCoordinator(groups, hash_block_size=16, scheduler_block_size=16, use_eagle=use_eagle)


def everything(groups: int) -> list[np.ndarray]:
    return [np.ones(len(CHAIN), dtype=bool) for _ in range(groups)]


def as_lists(masks: Iterable[np.ndarray]) -> list[list[bool]]:
    return [mask.tolist() for mask in masks]


def test_lookup_with_eagle_pops_the_last_full_attention_block() -> None:
    masks, hit = coordinator(FULL, use_eagle=True).find_longest_cache_hit(CHAIN, 64, everything(1))
    assert hit == 48
    assert as_lists(masks) == [[True, True, True]]


def test_load_mask_with_eagle_does_not_prune_again() -> None:
    pruning = coordinator(FULL, use_eagle=True)
    _, hit = pruning.find_longest_cache_hit(CHAIN, 64, everything(1))
    assert hit == 48
    assert as_lists(pruning.load_mask(CHAIN, hit)) == [[True, True, True]]


def test_hybrid_full_and_sliding_window_prunes_once() -> None:
    pruning = coordinator(FULL, WINDOW, use_eagle=True)
    masks, hit = pruning.find_longest_cache_hit(CHAIN, 64, everything(2))
    assert hit == 48
    assert as_lists(masks) == [[True, True, True], [False, True, True]]
    assert as_lists(pruning.load_mask(CHAIN, hit)) == as_lists(masks)
    # Also when the loading side holds no more hashes than the hit: there is then no block past it to fall back onto.
    assert as_lists(pruning.load_mask(range(3), hit)) == as_lists(masks)


def test_without_eagle_nothing_changes() -> None:
    for groups in ((FULL,), (FULL, WINDOW)):
        plain = coordinator(*groups, use_eagle=False)
        masks, hit = plain.find_longest_cache_hit(CHAIN, 64, everything(len(groups)))
        assert hit == 64
        assert as_lists(plain.load_mask(CHAIN, hit)) == as_lists(masks)
        plan = plain.plan(CHAIN, 64, everything(len(groups)))
        assert plan.hit_length == plan.hit_length_without_eagle == 64


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW)], ids=["full", "window", "hybrid"])
def test_prune_once_resume_after_a_complete_load_is_the_hit(groups: tuple[GroupSpec, ...]) -> None:
    pruning = coordinator(*groups, use_eagle=True)
    plan = pruning.plan(CHAIN, 64, everything(len(groups)))
    assert pruning.resume_length(plan, [group.mask for group in plan.groups]) == plan.hit_length == 48


def test_prune_once_plan_shows_what_the_prune_cost() -> None:
    plan = coordinator(FULL, WINDOW, use_eagle=True).plan(CHAIN, 64, everything(2))
    assert (plan.hit_length, plan.hit_length_without_eagle) == (48, 64)


def test_mask_covers_hit_refuses_the_mask_of_the_original_bug() -> None:
    """The guard at run time: a plan whose trailing block fell out of the mask never loads."""
    pruning = coordinator(FULL, use_eagle=True)
    honest = pruning.plan(CHAIN, 64, everything(1))
    pruned_twice = pruning.plan(CHAIN, 48, everything(1))
    assert pruned_twice.hit_length == 32
    bug = type(honest)(honest.hit_length, honest.hit_length_without_eagle, pruned_twice.groups)
    with pytest.raises(PlanError, match=r"group 0 .*mask has 2 entries, the hit covers 3 blocks"):
        pruning.check_plan(CHAIN, bug)
