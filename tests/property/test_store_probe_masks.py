"""What is saved serves the hit that it was saved for, and what is asked about is enough to find it.

The exceptions are the reference's own: a window of one token is never stored, or under EAGLE stored one block too far
to be loaded, and a prefix shorter than a pruned window is rounded down twice.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from support import oracle
from support.oracle import FULL, WINDOW, Case, Group
from support.strategies import (
    as_optional_lists,
    cases,
    coordinator,
    hashes,
    indices,
    kept_units,
    layouts,
    presence,
)


@st.composite
def _requests(draw: st.DrawFn) -> tuple[Case, int]:
    """A layout and an aligned number of saved tokens, at least two scheduler blocks."""
    case = draw(layouts())
    blocks = draw(st.integers(2, 6))
    retention = draw(st.one_of(st.none(), st.integers(0, 3).map(lambda n: n * case.scheduler_block)))
    length = blocks * case.scheduler_block
    return replace(case, retention=retention, num_hashes=length // case.unit, max_length=length), length


def _never_stored(case: Case) -> bool:
    """A window of one token looks at no past at all: without EAGLE its masks name nothing."""
    eagle = oracle.eagle_groups(case)
    return any(g.kind == WINDOW and g.window == 1 and i not in eagle for i, g in enumerate(case.groups))


def _short_prefix(case: Case, hit: int) -> bool:
    """The hit is shorter than a pruned window: the prefix fallback, which may round down twice, decides."""
    return any(
        case.groups[g].kind == WINDOW
        and hit // case.groups[g].block
        < max(1, oracle.ceil_div(case.groups[g].window - 1, case.groups[g].block))
        for g in oracle.eagle_groups(case)
    )


def _window_of_one_under_eagle(case: Case) -> bool:
    """Saved and asked for is the block past the boundary, needed to load is the one before it."""
    return any(
        case.groups[g].kind == WINDOW and case.groups[g].window == 1 for g in oracle.eagle_groups(case)
    )


def _hit(case: Case, limit: int) -> int:
    return coordinator(case).plan(hashes(case), limit, presence(case)).hit_length


@given(cases(), st.integers(0, 20), st.integers(0, 400), st.one_of(st.none(), st.integers(1, 700)))
def test_store_mask_equals_oracle(case: Case, blocks: int, start: int, prompt: int | None) -> None:
    length = blocks * case.scheduler_block
    start = min(start // case.scheduler_block * case.scheduler_block, length)
    ours = coordinator(case).store_mask(length, start=start, num_prompt_tokens=prompt)
    assert as_optional_lists(ours) == oracle.store_mask(case, length, start=start, prompt=prompt)


@given(cases(), st.integers(0, 30))
def test_probe_mask_equals_oracle(case: Case, steps: int) -> None:
    length = steps * case.align
    assert as_optional_lists(coordinator(case).probe_mask(length)) == oracle.probe_mask(case, length)


@given(_requests())
def test_store_mask_round_trip_dense(request_: tuple[Case, int]) -> None:
    """What a dense store keeps of a prompt serves all of it, less the one scheduler block that EAGLE costs."""
    case, length = request_
    case = replace(case, retention=None, exists=kept_units(replace(case, retention=None), length, None))
    eagle = oracle.eagle_groups(case)
    due = length - case.scheduler_block if eagle else length
    assume(not _never_stored(case) and not _window_of_one_under_eagle(case) and not _short_prefix(case, due))
    hit = _hit(case, length)
    assert hit >= due > 0


@given(_requests(), st.integers(1, 64))
def test_store_mask_round_trip_of_the_same_prompt_sent_again(request_: tuple[Case, int], tail: int) -> None:
    """Sparse retention keeps what the same prompt needs when it comes again, whatever the interval."""
    case, length = request_
    prompt = length - case.scheduler_block + 1 + (tail - 1) % case.scheduler_block
    saved = prompt // case.scheduler_block * case.scheduler_block
    case = replace(case, num_hashes=prompt // case.unit, max_length=prompt)
    case = replace(case, exists=kept_units(case, saved, prompt))
    eagle = oracle.eagle_groups(case)
    due = (prompt - 1) // case.scheduler_block * case.scheduler_block - (case.scheduler_block if eagle else 0)
    assume(due > 0 and not _never_stored(case) and not _window_of_one_under_eagle(case))
    assume(not _short_prefix(case, due))
    assert _hit(case, prompt - 1) >= due


@given(_requests(), st.integers(0, 5))
def test_store_mask_of_a_suffix_is_the_tail_of_the_whole(request_: tuple[Case, int], blocks: int) -> None:
    case, length = request_
    start = min(blocks * case.scheduler_block, length)
    unit = coordinator(case)
    whole = unit.store_mask(length, num_prompt_tokens=length)
    tail = unit.store_mask(length, start=start, num_prompt_tokens=length)
    for group, all_of_it, rest in zip(case.groups, whole, tail, strict=True):
        assert (all_of_it is None) == (rest is None)
        if all_of_it is not None and rest is not None:
            assert rest.tolist() == all_of_it[start // group.block :].tolist()


@given(cases(partial=False))
def test_probe_mask_is_enough_to_find_the_hit(case: Case) -> None:
    """A lookup that saw only what the probe mask names finds the hit of one that saw all; the chain ends there."""
    length = case.chain // case.align * case.align
    case = replace(case, num_hashes=length // case.unit, max_length=length)
    case = replace(case, exists=frozenset((g, u) for g, u in case.exists if u < case.num_hashes))
    assume(not _never_stored(case) and not _window_of_one_under_eagle(case))
    unit = coordinator(case)
    masks = unit.probe_mask(length)
    asked = {
        (g, case.closing(g, c))
        for g, mask in enumerate(masks)
        for c in range(length // case.groups[g].block)
        if mask is None or mask[c]
    }
    seen = replace(case, exists=case.exists & asked)
    _, whole = unit.find_longest_cache_hit(hashes(case), length, presence(case))
    _, probed = unit.find_longest_cache_hit(hashes(case), length, presence(seen))
    assert probed == whole


@given(_requests())
def test_store_mask_keeps_nothing_that_no_lookup_asks_for(request_: tuple[Case, int]) -> None:
    case, length = request_
    case = replace(case, retention=None)
    unit = coordinator(case)
    for g, (kept, probed) in enumerate(zip(unit.store_mask(length), unit.probe_mask(length), strict=True)):
        if case.groups[g].kind == WINDOW:
            assert (kept is None) == (probed is None)
            assert kept is None or probed is None or kept.tolist() == probed.tolist()
    assert len(indices(case)) == len(unit.store_mask(length))


def test_store_mask_of_a_window_of_one_token_keeps_nothing() -> None:
    case = Case(groups=(Group(WINDOW, 16, window=1),), unit=16, scheduler_block=16)
    assert as_optional_lists(coordinator(case).store_mask(64)) == [[False] * 4]


def test_store_mask_round_trip_of_a_short_prefix_is_rounded_down_twice() -> None:
    """Conservative, never wrong: three blocks of 8 under a window of 128 give nothing at an alignment of 16."""
    case = Case(
        groups=(Group(FULL, 16), Group(WINDOW, 8, window=128)),
        unit=8,
        scheduler_block=16,
        use_eagle=True,
        num_hashes=8,
        max_length=64,
        exists=frozenset({(0, 1), (0, 3), (0, 5), (0, 7), (1, 0), (1, 1), (1, 2)}),
    )
    assert _hit(case, 64) == 0
