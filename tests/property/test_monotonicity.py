"""Where more chunks in the store, or a longer limit, can never lower a hit; and where they can.

Monotone: every layout without the prune; and with it, as long as only full attention (or states) prunes, or the layout
has one spec, or full attention and one other. There each search returns the longest length that its group serves, and
serving only grows with the store.
Not monotone: EAGLE over windows in two or more searches. A group that has pruned is searched again without the
prune unless another group shortened the hit in between; an added chunk can bring about such a shortening, and with it
a second drop for a new candidate. The result is shorter than it could be, never wrong; two counterexamples are below.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from support import oracle
from support.oracle import FULL, MAMBA, WINDOW, Case, Group
from support.strategies import any_case, attention_with_states, cases, coordinator, hashes, indices, presence


def _hit(case: Case) -> int:
    return coordinator(case).plan(hashes(case), case.max_length, presence(case)).hit_length


def _monotone_here(case: Case) -> bool:
    pruning_windows = [
        m for m, eagle in oracle.spec_groups(case) if eagle and case.groups[m[0]].kind == WINDOW
    ]
    sets = oracle.spec_groups(case)
    simple = len(sets) == 1 or (len(sets) == 2 and case.groups[sets[0][0][0]].kind == FULL)
    return not pruning_windows or simple


CASES = st.one_of(any_case(), cases(kinds=(FULL,)), attention_with_states(), cases(max_groups=2)).filter(
    _monotone_here
)


@given(CASES, st.data())
def test_monotonicity_more_present_never_lowers_the_hit(case: Case, data: st.DataObject) -> None:
    missing = [(g, u) for g in indices(case) for u in range(case.num_hashes) if (g, u) not in case.exists]
    assume(missing)
    added = data.draw(st.sets(st.sampled_from(missing), min_size=1, max_size=6))
    assert _hit(replace(case, exists=case.exists | added)) >= _hit(case)


@given(CASES, st.integers(1, 200))
def test_monotonicity_a_longer_limit_never_lowers_the_hit(case: Case, more: int) -> None:
    assert _hit(replace(case, max_length=case.max_length + more)) >= _hit(case)


@given(st.one_of(any_case(), cases(eagle=True)))
def test_monotonicity_a_full_store_gives_the_longest_hit_of_all(case: Case) -> None:
    """Holds for every layout: the answer over any store is bounded by the one over a store that has everything."""
    assert _hit(case) <= _hit(case.everything())


def test_monotonicity_does_not_hold_for_eagle_over_two_windows() -> None:
    """A third chunk in the second group turns a prefix of 1 into nothing."""
    case = Case(
        groups=(Group(WINDOW, 1, window=2, eagle=True), Group(WINDOW, 1, window=4, eagle=True)),
        unit=1,
        scheduler_block=1,
        use_eagle=True,
        num_hashes=4,
        max_length=4,
        exists=frozenset({(0, 0), (0, 2), (0, 3), (1, 0), (1, 1)}),
    )
    assert _hit(case) == oracle.plan(case)[0] == 1
    more = replace(case, exists=case.exists | {(1, 2)})
    assert _hit(more) == oracle.plan(more)[0] == 0


def test_monotonicity_does_not_hold_for_eagle_over_full_attention_and_two_windows() -> None:
    case = Case(
        groups=(
            Group(FULL, 1),
            Group(WINDOW, 1, window=2, eagle=True),
            Group(WINDOW, 1, window=3, eagle=True),
        ),
        unit=1,
        scheduler_block=1,
        use_eagle=True,
        num_hashes=6,
        max_length=6,
        exists=frozenset(
            {(0, 0), (0, 1), (0, 2), (0, 3), (0, 5), (1, 0), (1, 2), (1, 3), (1, 5), (2, 0), (2, 1), (2, 4)}
        ),
    )
    assert _hit(case) == oracle.plan(case)[0] == 1
    more = replace(case, exists=case.exists | {(2, 2)})
    assert _hit(more) == oracle.plan(more)[0] == 0


def test_monotonicity_chunked_local_with_a_longer_limit_may_need_less() -> None:
    """A limit in the next attention chunk makes the one before it free: the hit rises although nothing was added."""
    case = Case(
        groups=(Group(oracle.CHUNKED, 16, chunk=64),),
        unit=16,
        scheduler_block=16,
        num_hashes=8,
        max_length=48,
    )
    assert _hit(case) == 0
    assert _hit(replace(case, max_length=64)) == 64


def test_monotonicity_states_need_one_boundary_in_common() -> None:
    """Full attention alone would hit 64; the state exists at 32 only, and a state at 48 raises the hit to 48."""
    case = Case(
        groups=(Group(FULL, 16), Group(MAMBA, 16)),
        unit=16,
        scheduler_block=16,
        num_hashes=4,
        max_length=64,
        exists=frozenset({(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)}),
    )
    assert _hit(case) == 32
    assert _hit(replace(case, exists=case.exists | {(1, 2)})) == 48
