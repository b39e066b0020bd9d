"""Layouts that no lookup could answer rightly are refused when the coordinator is made, not when it is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.coordinator import GroupKind, GroupSpec, SpecError
from support.oracle import CHUNKED, FULL, WINDOW, Case, Group
from support.strategies import coordinator, layouts

CHUNKS = st.integers(1, 4).map(lambda n: 64 * n)


@given(CHUNKS)
def test_chunked_local_with_its_own_eagle_flag_is_refused(chunk: int) -> None:
    case = Case(
        groups=(Group(CHUNKED, 16, chunk=chunk, eagle=True), Group(FULL, 16)), unit=16, scheduler_block=16
    )
    with pytest.raises(SpecError):
        coordinator(replace(case, use_eagle=True))


@given(layouts(kinds=(CHUNKED, FULL), partial=False))
def test_chunked_local_under_eagle_without_any_flag_is_refused(case: Case) -> None:
    """With no flag anywhere every group counts as flagged, chunked local attention too."""
    plain = tuple(replace(g, eagle=False) for g in case.groups)
    if all(g.kind != CHUNKED for g in plain):
        plain = (*plain, Group(CHUNKED, case.scheduler_block, chunk=4 * case.scheduler_block))
    with pytest.raises(SpecError):
        coordinator(replace(case, groups=plain, use_eagle=True))


@given(st.sampled_from([2, 3, 4]), st.sampled_from([FULL, WINDOW]))
def test_chunked_local_with_a_block_that_is_not_the_alignment_is_refused(ratio: int, kind: str) -> None:
    other = Group(kind, 16 * ratio, window=64 if kind == WINDOW else 0)
    case = Case(groups=(other, Group(CHUNKED, 16, chunk=64)), unit=16, scheduler_block=16 * ratio)
    with pytest.raises(SpecError):
        coordinator(case)


@pytest.mark.parametrize(
    ("blocks", "unit", "scheduler"),
    [((24,), 16, 48), ((32,), 16, 48), ((16, 32), 16, 16), ((16,), 32, 32), ((), 16, 16)],
    ids=["not whole units", "scheduler not whole blocks", "scheduler too short", "unit too long", "no group"],
)
def test_sizes_that_do_not_divide_are_refused(blocks: tuple[int, ...], unit: int, scheduler: int) -> None:
    case = Case(groups=tuple(Group(FULL, b) for b in blocks), unit=unit, scheduler_block=scheduler)
    with pytest.raises(SpecError):
        coordinator(case)


@pytest.mark.parametrize("block", [0, -16])
def test_a_block_of_no_tokens_is_refused(block: int) -> None:
    with pytest.raises(SpecError):
        GroupSpec(kind=GroupKind.FULL_ATTENTION, block_size=block)


@pytest.mark.parametrize("size", [None, 0, -1])
def test_a_window_or_chunk_without_its_size_is_refused(size: int | None) -> None:
    with pytest.raises(SpecError):
        GroupSpec(kind=GroupKind.SLIDING_WINDOW, block_size=16, sliding_window=size)
    with pytest.raises(SpecError):
        GroupSpec(kind=GroupKind.CHUNKED_LOCAL, block_size=16, chunk_size=size)


@given(layouts())
def test_every_layout_that_the_reference_takes_is_accepted(case: Case) -> None:
    assert coordinator(case) is not None
