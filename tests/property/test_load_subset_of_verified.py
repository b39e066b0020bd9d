"""LOAD_SUBSET_OF_VERIFIED: every chunk that a plan loads was present in its lookup, under the very key that it names.

The reference breaks this in two places that have examples here: a window of one token under EAGLE, and a hit that ends
inside a block. A chunk size that no block divides is a third.
"""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from support import oracle
from support.oracle import CHUNKED, FULL, MAMBA, WINDOW, Case, Group
from support.strategies import any_case, attention_with_states, cases, coordinator, hashes, presence

WINDOW_OF_ONE = Case(
    groups=(Group(WINDOW, 16, window=1, eagle=True),),
    unit=16,
    scheduler_block=16,
    use_eagle=True,
    num_hashes=6,
    max_length=96,
    exists=frozenset({(0, 1), (0, 4)}),
)
CHUNK_OF_ODD_SIZE = Case(
    groups=(Group(CHUNKED, 16, chunk=40),),
    unit=16,
    scheduler_block=16,
    num_hashes=3,
    max_length=48,
    exists=frozenset({(0, 0)}),
)
ENDS_INSIDE_A_BLOCK = Case(
    groups=(Group(FULL, 32, eagle=True), Group(MAMBA, 32)),
    unit=16,
    scheduler_block=32,
    use_eagle=True,
    partial=True,
    num_hashes=4,
    max_length=64,
    exists=frozenset({(0, 1), (0, 3), (1, 2)}),
)


def _check(case: Case) -> int:
    plan = coordinator(case).plan(hashes(case), case.max_length, presence(case))
    for g, group in enumerate(plan.groups):
        assert len(group.key_units) == len(group.mask)
        for chunk, (named, unit) in enumerate(zip(group.mask, group.key_units, strict=True)):
            if not named:
                assert unit == -1
                continue
            assert (g, int(unit)) in case.exists
            assert int(unit) in oracle.serving_units(case, g, chunk, plan.hit_length)
    return plan.hit_length


@given(st.one_of(any_case(), attention_with_states()))
@example(WINDOW_OF_ONE)
@example(CHUNK_OF_ODD_SIZE)
@example(ENDS_INSIDE_A_BLOCK)
def test_load_subset_of_verified_names_a_key_that_was_seen(case: Case) -> None:
    _check(case)


@given(
    st.one_of(
        cases(kinds=(WINDOW, FULL), eagle=True, max_groups=2),
        cases(kinds=(CHUNKED, FULL)),
        attention_with_states(),
    )
)
@example(WINDOW_OF_ONE)
@example(CHUNK_OF_ODD_SIZE)
def test_load_subset_of_verified_gives_away_no_verified_length(case: Case) -> None:
    """The hit is the longest verified one that is not above what the lookup itself found."""
    unit = coordinator(case)
    _, found = unit.find_longest_cache_hit(hashes(case), case.max_length, presence(case))
    hit = _check(case)
    assert hit <= found
    assert not any(oracle.verified(case, n) for n in range(hit + case.align, found + 1, case.align))


def test_load_subset_of_verified_window_of_one_token_under_eagle() -> None:
    """The lookup proves block 4 and drops it, its load mask would name block 3, which nobody has: 32 it is, block 1."""
    assert _check(WINDOW_OF_ONE) == 32


def test_load_subset_of_verified_chunk_size_that_no_block_divides() -> None:
    """Two blocks count as the past of the limit's chunk, but a prefix of 32 tokens lies in the chunk before it."""
    assert _check(CHUNK_OF_ODD_SIZE) == 16


def test_load_subset_of_verified_hit_inside_a_block_names_the_key_that_exists() -> None:
    plan = coordinator(ENDS_INSIDE_A_BLOCK).plan(range(4), 64, presence(ENDS_INSIDE_A_BLOCK))
    assert plan.hit_length == 48
    assert [group.key_units.tolist() for group in plan.groups] == [[1, 3], [-1, 2]]
