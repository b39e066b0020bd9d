"""Hypothesis strategies for coordinator layouts, stores and damage, and the one place that turns them into API calls.

They promise layouts that the constructor must accept: one to four groups of every kind, mixed block sizes, windows of
one token, chunk sizes that no block divides, stores that look like life (a prefix, a prefix with holes, a tail, what a
store mask kept, noise between the closing units) and hits that may end inside a block.
They refuse to produce invalid layouts: tests that want a refusal write the layout down themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpool_agent.coordinator import GroupKind, GroupSpec, KVCoordinator
from support.oracle import CHUNKED, FULL, MAMBA, WINDOW, Case, Group, Mask, eagle_groups, store_mask

MAX_HASHES = 36
Bits = NDArray[np.bool_]


# --- calls -------------------------------------------------------------------------------------------------------


def coordinator(case: Case) -> KVCoordinator:
    """The coordinator under test for this layout."""
    return KVCoordinator(
        [
            GroupSpec(
                kind=GroupKind(g.kind),
                block_size=g.block,
                sliding_window=g.window if g.kind == WINDOW else None,
                chunk_size=g.chunk if g.kind == CHUNKED else None,
                eagle=g.eagle,
                variant=g.variant,
            )
            for g in case.groups
        ],
        hash_block_size=case.unit,
        scheduler_block_size=case.scheduler_block,
        use_eagle=case.use_eagle,
        retention_interval=case.retention,
        partial_hits=case.partial,
    )


def hashes(case: Case) -> range:
    """A hash chain: only its length matters to the coordinator."""
    return range(case.num_hashes)


def presence(case: Case) -> list[Bits]:
    """What the store holds, one array per group and one entry per hash unit."""
    return [
        np.array([(g, u) in case.exists for u in range(case.num_hashes)], dtype=np.bool_)
        for g in indices(case)
    ]


def indices(case: Case) -> range:
    """The group indices."""
    return range(len(case.groups))


def as_lists(masks: Sequence[Bits]) -> list[Mask]:
    """Masks of the coordinator in the oracle's form."""
    return [[bool(entry) for entry in mask] for mask in masks]


def as_optional_lists(masks: Sequence[Bits | None]) -> list[Mask | None]:
    """Probe and store masks of the coordinator in the oracle's form; None means all."""
    return [None if mask is None else [bool(entry) for entry in mask] for mask in masks]


# --- layouts -----------------------------------------------------------------------------------------------------


@st.composite
def _group(draw: st.DrawFn, kind: str, block: int, *, eagle: bool) -> Group:
    variant = draw(st.sampled_from(["", "", "b"]))
    if kind == WINDOW:
        window = draw(st.one_of(st.integers(1, 6 * block), st.sampled_from([1, block, block + 1, 2 * block])))
        return Group(kind, block, window=window, eagle=eagle, variant=variant)
    if kind == CHUNKED:
        chunk = draw(st.one_of(st.integers(1, 5).map(lambda n: n * block), st.integers(1, 5 * block)))
        return Group(kind, block, chunk=chunk, variant=variant)
    return Group(kind, block, eagle=eagle, variant=variant)


def _flag_someone_else(groups: list[Group]) -> list[Group] | None:
    """EAGLE beside chunked attention is legal only if another group carries the flag; None where there is none."""
    others = [i for i, g in enumerate(groups) if g.kind != CHUNKED]
    if not any(g.kind == CHUNKED for g in groups) or any(g.eagle for g in groups):
        return groups
    if not others:
        return None
    return [replace(g, eagle=True) if i == others[0] else g for i, g in enumerate(groups)]


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = (FULL, WINDOW, CHUNKED, MAMBA),
    max_groups: int = 4,
    partial: bool | None = None,
    eagle: bool | None = None,
) -> Case:
    """A valid layout without a request; `partial` and `eagle` fix those switches (None draws them)."""
    unit = draw(st.sampled_from([1, 4, 16]))
    fine = draw(st.booleans()) if partial is None else partial
    pruned = draw(st.booleans()) if eagle is None else eagle
    names = [draw(st.sampled_from(list(kinds))) for _ in range(draw(st.integers(1, max_groups)))]
    ratios = [draw(st.sampled_from([1, 1, 2, 2, 4, 3])) for _ in names]
    if fine:  # only full attention and states may be found inside a block
        ratios = [r if n in (FULL, MAMBA) else 1 for n, r in zip(names, ratios, strict=True)]
    elif CHUNKED in names:  # a chunked group's block is the alignment itself
        ratios = [r if n != CHUNKED else math.lcm(*ratios) for n, r in zip(names, ratios, strict=True)]
    groups = [
        draw(_group(n, r * unit, eagle=pruned and draw(st.booleans())))
        for n, r in zip(names, ratios, strict=True)
    ]
    flagged = _flag_someone_else(groups) if pruned else groups
    unflagged = flagged is not None and not any(g.eagle for g in flagged)
    return Case(
        groups=tuple(groups if flagged is None else flagged),
        unit=unit,
        scheduler_block=unit * math.lcm(*ratios),
        use_eagle=pruned and flagged is not None and (unflagged or draw(st.booleans())),
        partial=fine,
    )


# --- stores ------------------------------------------------------------------------------------------------------


def kept_units(case: Case, length: int, prompt: int | None) -> frozenset[tuple[int, int]]:
    """What a well-behaved engine has in the store after saving `length` tokens (an aligned length).

    Chunks that the store mask names, and recurrent states at every aligned boundary: the mask leaves states to the
    engine, which puts them itself.
    """
    kept: set[tuple[int, int]] = set()
    for g, mask in enumerate(store_mask(case, length, prompt=prompt)):
        block = case.groups[g].block
        for chunk in range(length // block):
            state = case.groups[g].kind == MAMBA and (chunk + 1) * block % case.align == 0
            if state or mask is None or mask[chunk]:
                kept.add((g, case.closing(g, chunk)))
    return frozenset(kept)


@st.composite
def _units_of_group(draw: st.DrawFn, case: Case, group: int) -> set[int]:
    count, every = case.num_hashes, case.groups[group].block // case.unit
    pattern = draw(st.sampled_from(["all", "all", "prefix", "holes", "holes", "tail", "random"]))
    if pattern == "random":
        bits = draw(st.integers(0, 2**count - 1))
        return {u for u in range(count) if bits >> u & 1}
    units = set(range(count)) if draw(st.booleans()) else set(range(every - 1, count, every))
    if pattern == "prefix":
        units &= set(range(draw(st.integers(0, count))))
    elif pattern == "tail":
        units -= set(range(draw(st.integers(0, max(0, count - 2)))))
    elif pattern == "holes":
        units -= draw(st.sets(st.integers(0, max(0, count - 1)), max_size=4))
    return units


@st.composite
def stores(draw: st.DrawFn, case: Case) -> frozenset[tuple[int, int]]:
    """What the store holds for this request."""
    if draw(st.integers(0, 4)) == 0:
        length = draw(st.integers(0, case.chain // case.align)) * case.align
        return kept_units(case, length, draw(st.one_of(st.none(), st.just(length + 1))))
    if draw(st.integers(0, 2)) == 0:
        shared = draw(_units_of_group(case, 0))
        return frozenset((g, u) for g in indices(case) for u in shared)
    return frozenset((g, u) for g in indices(case) for u in draw(_units_of_group(case, g)))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = (FULL, WINDOW, CHUNKED, MAMBA),
    max_groups: int = 4,
    partial: bool | None = None,
    eagle: bool | None = None,
) -> Case:
    """A layout, a request and a store. The longest hit allowed is often the chain, sometimes shorter or beyond it."""
    case = draw(layouts(kinds=kinds, max_groups=max_groups, partial=partial, eagle=eagle))
    count = draw(st.one_of(st.integers(0, MAX_HASHES), st.integers(8, MAX_HASHES)))
    longest = count * case.unit
    limit = draw(
        st.one_of(st.just(longest), st.integers(0, longest + 2 * case.unit), st.just(max(0, longest - 1)))
    )
    retention = draw(st.one_of(st.none(), st.integers(0, 3).map(lambda n: n * case.scheduler_block)))
    case = replace(case, num_hashes=count, max_length=limit, retention=retention)
    return replace(case, exists=draw(stores(case)))


def attention_with_states(*, eagle: bool | None = None) -> st.SearchStrategy[Case]:
    """Full attention and Mamba (and EAGLE) with partial hits: where worked examples are thin."""
    return cases(kinds=(FULL, MAMBA, MAMBA), partial=True, eagle=eagle, max_groups=3)


def any_case() -> st.SearchStrategy[Case]:
    """Every kind of case, single groups and partial hits with states given their own share."""
    return st.one_of(cases(), cases(max_groups=1), cases(eagle=True), attention_with_states())


@st.composite
def arrivals(draw: st.DrawFn, masks: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """What had arrived (or was local) when a load ended: everything named, all but a few, or anything."""
    style = draw(st.sampled_from(["few lost", "few lost", "random", "nothing"]))
    if style == "random":
        return [[draw(st.booleans()) for _ in mask] for mask in masks]
    arrived = [[style != "nothing" and (named or draw(st.booleans())) for named in mask] for mask in masks]
    places = [(g, c) for g, mask in enumerate(masks) for c, named in enumerate(mask) if named]
    if style == "few lost" and places:
        for g, c in draw(st.lists(st.sampled_from(places), max_size=3)):
            arrived[g][c] = False
    return arrived


def prunes(case: Case, group: int) -> bool:
    """Whether the prune applies to this group."""
    return group in eagle_groups(case)
