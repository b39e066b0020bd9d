"""Staged probing: the same plan, fewer questions, and a miss that costs the same at any length."""

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator, LookupStateError, LookupSteps, Plan

FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=1024)
STATE = GroupSpec(GroupKind.MAMBA, 64)


def build(*groups: GroupSpec, use_eagle: bool = True, partial_hits: bool = False) -> KVCoordinator:
    block = max(group.block_size for group in groups)
    return KVCoordinator(
        groups, hash_block_size=16, scheduler_block_size=block, use_eagle=use_eagle, partial_hits=partial_hits
    )


def run(steps: LookupSteps, exists: list[np.ndarray]) -> tuple[Plan, list[list[int]], list[np.ndarray]]:
    """Answer from `exists`; return the plan, how many units each step asked per group, and what was asked."""
    counts: list[list[int]] = []
    asked = [np.zeros(units.size, dtype=bool) for units in exists]
    while (probes := steps.next_probes()) is not None:
        assert steps.units_needed == 1 + max(units[-1] for units in probes if units.size)
        for seen, units in zip(asked, probes, strict=True):
            assert not seen[units].any(), "asked twice"
            seen[units] = True
        counts.append([units.size for units in probes])
        steps.feed([present[units] for present, units in zip(exists, probes, strict=True)])
    assert steps.units_needed == 0
    return steps.result(), counts, asked


@pytest.mark.parametrize("num_units", [1000, 65_536])
def test_a_miss_asks_the_first_256_units_of_full_attention_at_any_length(num_units: int) -> None:
    coordinator = build(FULL, WINDOW, STATE)
    plan, counts, _ = run(
        coordinator.lookup(range(num_units), num_units * 16), [np.zeros(num_units, dtype=bool)] * 3
    )
    assert plan.hit_length == 0
    assert counts == [[256, 0, 0]]


def test_the_first_step_needs_the_first_hashes_only() -> None:
    steps = build(FULL, WINDOW).lookup(range(65_536), 2**20)
    assert steps.units_needed == 256


def test_a_hole_early_in_full_attention_spares_the_rest() -> None:
    exists = [np.arange(4096) < 100, np.ones(4096, dtype=bool)]
    plan, counts, asked = run(build(FULL, WINDOW).lookup(range(4096), 65_536), exists)
    assert plan.hit_length == 99 * 16
    assert counts[0] == [256, 0]
    assert not asked[0][256:].any()
    assert not asked[1][101:].any()


def test_a_long_hit_asks_the_window_at_its_end_only() -> None:
    plan, counts, asked = run(
        build(FULL, WINDOW).lookup(range(8192), 131_072), [np.ones(8192, dtype=bool)] * 2
    )
    assert plan.hit_length == 131_072 - 16
    assert counts[:2] == [[256, 0], [7936, 0]]
    assert len(counts) == 3
    assert asked[1].sum() < 400


def test_windows_are_searched_to_the_left_in_growing_pieces() -> None:
    exists = [np.ones(8192, dtype=bool), np.arange(8192) < 500]
    plan, counts, _ = run(build(FULL, WINDOW).lookup(range(8192), 131_072), exists)
    assert plan.hit_length == 499 * 16
    assert len(counts) <= 7


def test_units_between_aligned_boundaries_are_not_asked_of_windows_and_states() -> None:
    window = GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=17)
    full, state = GroupSpec(GroupKind.FULL_ATTENTION, 128), GroupSpec(GroupKind.MAMBA, 32)
    coordinator = build(full, window, state, use_eagle=False)
    exists = [np.ones(256, dtype=bool), np.zeros(256, dtype=bool), np.zeros(256, dtype=bool)]
    _, _, asked = run(coordinator.lookup(range(256), 4096), exists)
    assert np.flatnonzero(asked[0]).tolist() == list(range(7, 256, 8))
    assert set(np.flatnonzero(asked[1])) <= set(range(7, 256, 8))
    assert set(np.flatnonzero(asked[2])) <= set(range(7, 256, 8))


CASES = {
    "full": build(FULL),
    "full+window": build(FULL, GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=40)),
    "full+state": build(FULL, STATE),
    "window alone": build(GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=40)),
    "window of one token": build(GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=1)),
    "state alone": build(STATE, use_eagle=False),
    "chunked": build(FULL, GroupSpec(GroupKind.CHUNKED_LOCAL, 16, chunk_size=64), use_eagle=False),
    "merged": build(FULL, FULL, use_eagle=True),
    "three": build(FULL, GroupSpec(GroupKind.SLIDING_WINDOW, 16, sliding_window=100), STATE),
    "partial": build(GroupSpec(GroupKind.FULL_ATTENTION, 64), STATE, partial_hits=True),
}


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_plan_over_the_complete_presence(name: str, share: float) -> None:
    coordinator = CASES[name]
    random = np.random.default_rng(7)
    for num_units in (0, 1, 3, 40, 300, 1500):
        exists = [random.random(num_units) < share for _ in coordinator.groups]
        limit = num_units * 16 - int(random.integers(0, 20)) if num_units > 1 else num_units * 16
        plan, _, asked = run(coordinator.lookup(range(num_units), limit), exists)
        assert plan == coordinator.plan(range(num_units), limit, exists)
        for group, seen in zip(plan.groups, asked, strict=True):
            assert seen[group.key_units[group.mask]].all(), "LOAD_SUBSET_OF_VERIFIED: loaded without asking"


def test_next_probes_repeats_itself_until_fed() -> None:
    steps = build(FULL).lookup(range(10), 160)
    first, again = steps.next_probes(), steps.next_probes()
    assert first is not None
    assert again is not None
    assert np.array_equal(first[0], again[0])


def test_the_order_of_use_is_enforced() -> None:
    steps = build(FULL).lookup(range(4), 64)
    with pytest.raises(LookupStateError, match="not finished"):
        steps.result()
    with pytest.raises(LookupStateError, match="2 answers for 1 groups"):
        steps.feed([np.ones(4, dtype=bool)] * 2)
    with pytest.raises(
        LookupStateError, match="group 0: 4 units asked, the answer is bool with shape \\(3,\\)"
    ):
        steps.feed([np.ones(3, dtype=bool)])
    with pytest.raises(LookupStateError, match="int64"):
        steps.feed([np.ones(4, dtype=np.int64)])
    steps.feed([np.ones(4, dtype=bool)])
    assert steps.next_probes() is None
    assert steps.result().hit_length == 48
    with pytest.raises(LookupStateError, match="nothing to feed"):
        steps.feed([])
