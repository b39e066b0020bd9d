"""Overlap and fusion against the obvious: sets of byte numbers, and copies of numbered bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool_wire.strides import Axis, ByteSet, Part, byte_set, first_overlap, fuse, part_set

AXES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), max_size=3)


def covered(offset: int, axes: Sequence[Axis], itemsize: int) -> list[int]:
    """Every byte number, doubles kept."""
    starts = itertools.product(*([index * stride for index in range(extent)] for extent, stride in axes))
    return [offset + sum(start) + byte for start in starts for byte in range(itemsize)]


@given(AXES, st.integers(0, 50), st.integers(1, 4))
def test_a_byte_set_covers_exactly_the_tensors_bytes(axes: list[Axis], offset: int, itemsize: int) -> None:
    found = byte_set(offset, axes, itemsize)
    wanted = covered(offset, axes, itemsize)
    if len(set(wanted)) != len(wanted):
        assert found is None
    elif found is not None:
        assert sorted(covered(found.offset, found.axes, found.run)) == sorted(wanted)
        assert (found.offset, found.end) == (min(wanted), max(wanted) + 1)


@given(st.permutations([(5, 70), (3, 20), (4, 4)]))
def test_nested_axes_are_accepted_in_any_order(axes: list[Axis]) -> None:
    assert byte_set(0, axes, 4) == ByteSet(0, ((5, 70), (3, 20)), 16)


@given(st.lists(st.tuples(AXES, st.integers(0, 60), st.integers(1, 4)), min_size=2, max_size=5))
def test_overlap_is_found_exactly(tensors: list[tuple[list[Axis], int, int]]) -> None:
    sets = [found for axes, offset, size in tensors if (found := byte_set(offset, axes, size)) is not None]
    numbers = [set(covered(one.offset, one.axes, one.run)) for one in sets]
    wanted = any(a & b for a, b in itertools.combinations(numbers, 2))
    pair = first_overlap(sets)
    assert (pair is not None) == wanted
    if pair is not None:
        assert numbers[pair[0]] & numbers[pair[1]]


def test_large_interleaved_tensors_are_told_apart_without_walking_them() -> None:
    page, blocks, layers = 1 << 20, 1 << 24, 64
    sets = [ByteSet(layer * 1024, ((blocks, page), (16, 64 * 1024)), 1024) for layer in range(layers)]
    assert first_overlap(sets) is None
    touching = ByteSet(63 * 1024 - 1, ((blocks, page), (16, 64 * 1024)), 2)
    assert first_overlap([*sets, touching]) is not None


def test_what_cannot_be_shown_apart_counts_as_overlap() -> None:
    a = ByteSet(0, ((10**7, 1000),), 1)
    b = ByteSet(1, ((10**7, 1010),), 1)
    assert first_overlap([a, b]) == (0, 1)


def test_many_irregular_tensors_end_within_the_budget() -> None:
    sets = [ByteSet(3 * index, ((1000, 20_000 + index),), 1) for index in range(4000)]
    assert first_overlap(sets) is not None


def dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return np.empty(shape, f"u{itemsize}").strides


def part(
    offset: int, chunk_offset: int, *, storage: int = 0, shape: tuple[int, ...] = (4, 6), **more: object
) -> Part:
    found: dict[str, object] = {
        "storage": storage,
        "offset": offset,
        "block_stride": 4096,
        "shape": shape,
        "strides": dense(shape, 2),
        "chunk_offset": chunk_offset,
        "chunk_strides": dense(shape, 2),
        "itemsize": 2,
    }
    return Part(**(found | more))  # type: ignore[arg-type]  # the fields above


def test_equally_spaced_layers_become_one_wide_copy() -> None:
    (found,) = fuse([part(layer * 512, layer * 48) for layer in range(5)], num_blocks=3)
    assert (found.shape, found.strides, found.chunk_strides) == ((5, 6), (512, 8), (48, 8))
    assert (found.itemsize, found.nbytes) == (8, 5 * 48)


def test_k_and_v_that_alternate_in_the_chunk_fuse_by_storage() -> None:
    parts = [part(layer * 512, (2 * layer + kv) * 48, storage=kv) for layer in range(5) for kv in range(2)]
    k, v = fuse(parts, num_blocks=3)
    assert (k.storage, v.storage) == (0, 1)
    assert k.shape == v.shape == (5, 6)
    assert (k.chunk_offset, v.chunk_offset, k.chunk_strides) == (0, 48, (96, 8))


def test_k_and_v_halves_of_one_storage_fuse_twice() -> None:
    parts = [part(kv * 65536 + layer * 512, (2 * layer + kv) * 48) for layer in range(5) for kv in range(2)]
    (found,) = fuse(parts, num_blocks=3)
    assert (found.shape, found.strides) == ((5, 2, 6), (512, 65536, 8))


def test_whole_blocks_that_are_contiguous_collapse_to_one_run() -> None:
    (found,) = fuse([part(layer * 48, layer * 48) for layer in range(4)], num_blocks=3)
    assert (found.shape, found.strides, found.itemsize) == ((24,), (8,), 8)


def test_layers_in_descending_order_are_not_fused() -> None:
    assert len(fuse([part((3 - layer) * 1024, layer * 48) for layer in range(3)], num_blocks=3)) == 3


def test_a_fusion_that_would_not_be_nested_is_left_alone() -> None:
    parts = [part(0, 0), part(4096 + 64, 48)]
    assert len(fuse(parts, num_blocks=3)) == 2
    assert first_overlap([part_set(one, 3) for one in parts]) is None


def test_elements_widen_only_as_far_as_everything_allows() -> None:
    odd: dict[str, Any] = {"shape": (6,), "strides": (2,), "chunk_strides": (2,)}
    assert fuse([part(4, 0, **odd, block_stride=4096)], num_blocks=2)[0].itemsize == 4
    assert fuse([part(2, 0, **odd)], num_blocks=2)[0].itemsize == 2
    assert fuse([part(0, 2, **odd)], num_blocks=2)[0].itemsize == 2
    assert fuse([part(0, 0, **odd, block_stride=4100)], num_blocks=2)[0].itemsize == 4
    scalar = fuse([part(0, 0, shape=(1, 4), strides=(99, 2), chunk_strides=(8, 2))], num_blocks=2)[0]
    assert (scalar.shape, scalar.itemsize) == ((), 8)


LAYERS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.sampled_from([(4,), (2, 3), (1, 8)])), max_size=8
)


@given(LAYERS, st.sampled_from([1, 2, 4]))
def test_fused_copies_move_the_same_bytes(
    layers: list[tuple[int, int, tuple[int, ...]]], itemsize: int
) -> None:
    blocks, parts, at = 2, [], 0
    for storage, slot, shape in layers:
        strides = dense(shape, itemsize)
        size = int(np.prod(shape)) * itemsize
        parts.append(
            part(
                slot * 64,
                at,
                storage=storage,
                shape=shape,
                strides=strides,
                chunk_strides=strides,
                itemsize=itemsize,
            )
        )
        at += size
    storages = [np.arange(2 * 4096, dtype=np.uint32).view(np.uint8) for _ in range(2)]

    def gathered(copies: Sequence[Part]) -> bytes:
        payload = bytearray(at)
        for copy in copies:
            source = storages[copy.storage]
            for index in np.ndindex(copy.shape):
                inside = 4096 * (blocks - 1) + copy.offset + sum(map(int.__mul__, index, copy.strides))
                target = copy.chunk_offset + sum(map(int.__mul__, index, copy.chunk_strides))
                payload[target : target + copy.itemsize] = source[inside : inside + copy.itemsize].tobytes()
        return bytes(payload)

    assert gathered(fuse(parts, blocks)) == gathered(parts)
