"""What the coordinator refuses, and that it says which field, which value and what to do."""

from typing import Any

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, SpecError

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
CHUNKED = GroupSpec(GroupKind.CHUNKED_LOCAL, 16, chunk_size=64)


def build(*groups: GroupSpec, **changes: Any) -> KVCoordinator:
    arguments: dict[str, Any] = {"hash_block_size": 16, "scheduler_block_size": 16, "use_eagle": False}
    return KVCoordinator(groups, **(arguments | changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size must be a whole number of tokens above 0, got 0"),
        ({"block_size": 1.5}, "block_size .*got 1.5"),
        ({"block_size": True}, "block_size .*got True"),
        ({"kind": "ring"}, "kind must be a GroupKind, got 'ring'; use one of full_attention"),
        ({"kind": GroupKind.SLIDING_WINDOW}, "sliding_window of a sliding_window group .*got None"),
        ({"kind": GroupKind.CHUNKED_LOCAL}, "chunk_size of a chunked_local group .*got None"),
        ({"sliding_window": 8}, "sliding_window=8 given for a full_attention group; leave it out"),
        ({"kind": GroupKind.MAMBA, "chunk_size": 8}, "chunk_size=8 given for a mamba group"),
    ],
)
def test_a_group_spec_is_checked_against_its_kind(fields: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"kind": GroupKind.FULL_ATTENTION, "block_size": 16}
    with pytest.raises(SpecError, match=message):
        GroupSpec(**(valid | fields))


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ((), {}, "at least one KV-cache group"),
        ((FULL,), {"hash_block_size": 0}, "hash_block_size must be"),
        ((FULL,), {"scheduler_block_size": -16}, "scheduler_block_size must be"),
        (
            (FULL,),
            {"scheduler_block_size": 24},
            "scheduler_block_size=24 is not a multiple of hash_block_size=16",
        ),
        (
            (FULL,),
            {"hash_block_size": 32, "scheduler_block_size": 32},
            "group 0: block_size=16 is not a multiple",
        ),
        (
            (GroupSpec(GroupKind.MAMBA, 32), FULL),
            {},
            "group 0: block_size=32 does not divide scheduler_block_size=16",
        ),
        (
            (FULL,),
            {"retention_interval": 24},
            "retention_interval=24 must be a multiple of scheduler_block_size=16",
        ),
        ((FULL,), {"retention_interval": -16}, "retention_interval=-16"),
        ((CHUNKED,), {"use_eagle": True}, r"groups \[0\]: chunked local attention cannot be pruned"),
        (
            (FULL, CHUNKED),
            {"scheduler_block_size": 32},
            r"groups \[1\]: .*block_size == hit alignment, got 16 and 32",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(
    groups: tuple[GroupSpec, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        build(*groups, **changes)


def test_chunked_local_beside_a_pruned_group_is_allowed() -> None:
    flagged = GroupSpec(GroupKind.FULL_ATTENTION, 16, eagle=True)
    assert build(flagged, CHUNKED, use_eagle=True).eagle_groups == (0,)


@pytest.mark.parametrize(
    ("exists", "message"),
    [
        ([], "0 arrays for 1 groups"),
        (
            [np.ones((2, 2), dtype=bool)],
            r"group 0 must be a one-dimensional boolean array, got bool with shape \(2, 2\)",
        ),
        ([np.ones(4, dtype=np.int8)], "got int8"),
    ],
)
def test_presence_of_another_shape_is_refused(exists: list[np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(FULL).plan(range(4), 64, exists)


def test_negative_lengths_are_refused() -> None:
    coordinator = build(FULL)
    presence = [np.ones(4, dtype=bool)]
    for call in (
        lambda: coordinator.find_longest_cache_hit(range(4), -1, presence),
        lambda: coordinator.plan(range(4), -1, presence),
        lambda: coordinator.lookup(range(4), -1),
        lambda: coordinator.load_mask(range(4), -1),
        lambda: coordinator.probe_mask(-1),
        lambda: coordinator.store_mask(-1),
        lambda: coordinator.store_mask(16, start=-1),
        lambda: coordinator.store_mask(16, num_prompt_tokens=-1),
    ):
        with pytest.raises(ValueError, match="must not be negative, got -1"):
            call()


def test_eagle_flags_spread_over_equal_specs_and_to_all_if_nobody_is_flagged() -> None:
    window = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32)
    flagged = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32, eagle=True)
    other = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=32, variant="wide heads")
    assert build(FULL, window, flagged, other, use_eagle=True).eagle_groups == (1, 2)
    assert build(FULL, window, use_eagle=True).eagle_groups == (0, 1)
    assert build(FULL, window).eagle_groups == ()
