"""Arithmetic of strided bytes: what a tensor covers, whether two overlap, the fewest copies that move a block.

Promises: exact answers where extents are nested (every axis steps over all that lies inside it), which is how real
tensors lie; pure integers, no limit on their size.
Refuses: to answer "apart" where it could not show it within its budget of steps; such layouts count as overlapping.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

MAX_STEPS: Final = 20_000
"""Steps of one overlap search, about a tenth of a second. Regular layouts need one or two a pair of tensors."""

_WIDTHS: Final = (8, 4, 2)
"""Element sizes that a copy may be widened to, bytes: what NumPy moves in one instruction."""

Axis = tuple[int, int]
"""Extent, stride in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One strided copy between a block and a chunk's payload.

    With NumPy, and in the same way on both sides:

        in_block = np.ndarray(part.shape, f"u{part.itemsize}", storage,
                              part.offset + block * part.block_stride, part.strides)
        in_chunk = np.ndarray(part.shape, f"u{part.itemsize}", payload, part.chunk_offset, part.chunk_strides)
        in_block[...] = in_chunk      # scatter; the other way round is gather

    The payload's side has strides of its own: tensors of one kind may alternate with others in the chunk.

    Attributes:
        storage: index into the worker's storages.
        offset: byte of the storage where block 0 begins.
        block_stride: bytes from one block to the next.
        shape: extents of one block (there is no block axis); () is one element.
        strides: bytes, one per axis of `shape`, in the storage.
        chunk_offset: byte of the payload where this part begins.
        chunk_strides: bytes, one per axis of `shape`, in the payload.
        itemsize: bytes of one element: 1, 2, 4 or 8. It divides every offset and stride; types play no part.
    """

    storage: int
    offset: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    chunk_offset: int
    chunk_strides: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes that one copy moves."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class ByteSet:
    """Runs of bytes at regular distances. `axes` are nested, outermost first, none of extent 1."""

    offset: int
    axes: tuple[Axis, ...]
    run: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.span

    @property
    def span(self) -> int:
        """Bytes from the first to one past the last."""
        return span(self.axes, self.run)

    def inner(self, index: int) -> ByteSet:
        """What lies at `index` of the outermost axis."""
        return ByteSet(self.offset + index * self.axes[0][1], self.axes[1:], self.run)


def span(axes: Iterable[Axis], itemsize: int) -> int:
    """Bytes from the first to one past the last, for strides that are not negative."""
    return sum((extent - 1) * stride for extent, stride in axes) + itemsize


def byte_set(offset: int, axes: Iterable[Axis], itemsize: int) -> ByteSet | None:
    """The bytes of a strided tensor; None if its axes are not nested, so that elements may overlap each other."""
    run, reach = itemsize, itemsize
    nested: list[Axis] = []
    for extent, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride < reach:
            return None
        reach += (extent - 1) * stride
        if not nested and stride == run:
            run *= extent
        elif nested and stride == nested[-1][0] * nested[-1][1]:
            nested[-1] = (nested[-1][0] * extent, nested[-1][1])
        else:
            nested.append((extent, stride))
    return ByteSet(offset, tuple(reversed(nested)), run)


def first_overlap(sets: Sequence[ByteSet]) -> tuple[int, int] | None:
    """Indexes of two sets that share a byte, or that `MAX_STEPS` did not show apart; None if all are apart."""
    steps = MAX_STEPS
    alive: list[int] = []
    for index in sorted(range(len(sets)), key=lambda i: sets[i].offset):
        alive = [other for other in alive if sets[other].end > sets[index].offset]
        for other in alive:
            steps = _apart(sets[other], sets[index], steps)
            if steps <= 0:
                return min(index, other), max(index, other)
        alive.append(index)
    return None


def _apart(a: ByteSet, b: ByteSet, steps: int) -> int:
    """Steps left when the sets share no byte; 0 when they do, or when the steps ran out first."""
    pairs = [(a, b)]
    while pairs:
        steps -= 1
        if steps <= 0:
            return 0
        a, b = pairs.pop()
        if a.end <= b.offset or b.end <= a.offset:
            continue
        if not a.axes and not b.axes:
            return 0
        if a.axes and b.axes and a.axes[0][1] == b.axes[0][1]:
            pairs += _at_equal_stride(a, b)
            continue
        if not a.axes or (b.axes and b.axes[0][1] > a.axes[0][1]):
            a, b = b, a
        candidates = _indexes_near(a, b)
        if len(candidates) >= steps:
            return 0
        pairs += [(a.inner(index), b) for index in candidates]
    return steps


def _at_equal_stride(a: ByteSet, b: ByteSet) -> list[tuple[ByteSet, ByteSet]]:
    """Only the distance between both indexes matters, and nested axes leave at most two distances to look at."""
    (extent_a, stride), (extent_b, _) = a.axes[0], b.axes[0]
    inner_a, inner_b = a.inner(0), b.inner(0)
    low = max(1 - extent_b, (b.offset - a.offset - inner_a.span) // stride + 1)
    high = min(extent_a - 1, (b.offset + inner_b.span - a.offset - 1) // stride)
    return [(a.inner(distance), inner_b) for distance in range(low, high + 1)]


def _indexes_near(a: ByteSet, b: ByteSet) -> range:
    """Indexes of `a`'s outermost axis at which it could reach into the extent of `b`."""
    extent, stride = a.axes[0]
    low = max(0, (b.offset - a.offset - a.inner(0).span) // stride + 1)
    high = min(extent - 1, (b.end - a.offset - 1) // stride)
    return range(low, high + 1)


def fuse(parts: Sequence[Part], num_blocks: int) -> tuple[Part, ...]:
    """The fewest, widest copies that move the same bytes.

    Equal parts at equal distances (layers of one storage, K and V, or both) become one with a leading axis; axes that
    are contiguous on both sides collapse; elements widen as far as every offset and stride allows.
    """
    current = [_collapse(part) for part in parts]
    while True:
        fused = _fuse_once(current, num_blocks)
        if len(fused) == len(current):
            return tuple(
                _widen(_collapse(part)) for part in sorted(fused, key=lambda part: part.chunk_offset)
            )
        current = fused


def part_set(part: Part, num_blocks: int) -> ByteSet:
    """The bytes of the storage that a part covers over all blocks.

    Raises:
        ValueError: the part overlaps itself; neither a checked tensor nor a result of `fuse` does.
    """
    found = _part_set(part, num_blocks)
    if found is None:
        raise ValueError(f"{part} overlaps itself over {num_blocks} blocks")
    return found


def _part_set(part: Part, num_blocks: int) -> ByteSet | None:
    axes = [*zip(part.shape, part.strides, strict=True), (num_blocks, part.block_stride)]
    return byte_set(part.offset, axes, part.itemsize)


def _fuse_once(parts: Sequence[Part], num_blocks: int) -> list[Part]:
    """Fuse runs of parts that are equal but for their two offsets."""
    kinds: dict[Part, list[Part]] = defaultdict(list)
    for part in parts:
        kinds[replace(part, offset=0, chunk_offset=0)].append(part)
    fused: list[Part] = []
    for alike in kinds.values():
        start = 0
        while start < len(alike):
            count = _equally_spaced(alike, start)
            joined = _join(alike[start : start + count], num_blocks)
            fused += joined
            start += count
    return sorted(fused, key=lambda part: part.chunk_offset)


def _equally_spaced(parts: Sequence[Part], start: int) -> int:
    """How many parts from `start` on lie at one distance from each other, in the storage and in the chunk."""
    if start + 1 == len(parts):
        return 1
    step = _distance(parts[start], parts[start + 1])
    if step[0] <= 0:
        return 1
    count = 2
    while start + count < len(parts) and _distance(parts[start + count - 1], parts[start + count]) == step:
        count += 1
    return count


def _distance(a: Part, b: Part) -> tuple[int, int]:
    return b.offset - a.offset, b.chunk_offset - a.chunk_offset


def _join(parts: Sequence[Part], num_blocks: int) -> Sequence[Part]:
    if len(parts) == 1:
        return parts
    first = parts[0]
    step, chunk_step = _distance(first, parts[1])
    joined = replace(
        first,
        shape=(len(parts), *first.shape),
        strides=(step, *first.strides),
        chunk_strides=(chunk_step, *first.chunk_strides),
    )
    # Tensors may interleave in ways that are apart but not nested; those stay single, so that overlap stays decidable.
    return [_collapse(joined)] if _part_set(joined, num_blocks) is not None else parts


def _collapse(part: Part) -> Part:
    """Drop axes of extent 1 and merge neighbours that are contiguous on both sides."""
    axes: list[tuple[int, int, int]] = []
    for extent, stride, chunk_stride in zip(part.shape, part.strides, part.chunk_strides, strict=True):
        if extent == 1:
            continue
        if axes and axes[-1][1:] == (extent * stride, extent * chunk_stride):
            axes[-1] = (axes[-1][0] * extent, stride, chunk_stride)
        else:
            axes.append((extent, stride, chunk_stride))
    return _with_axes(part, axes, part.itemsize)


def _widen(part: Part) -> Part:
    """Use the widest element that fits a contiguous innermost run and divides everything else."""
    if not part.shape or part.strides[-1] != part.itemsize or part.chunk_strides[-1] != part.itemsize:
        return part
    run = part.shape[-1] * part.itemsize
    others = (part.offset, part.block_stride, part.chunk_offset, *part.strides[:-1], *part.chunk_strides[:-1])
    for width in _WIDTHS:
        if width > part.itemsize and not any(number % width for number in (run, *others)):
            axes = [*zip(part.shape, part.strides, part.chunk_strides, strict=True)][:-1]
            if run > width:
                axes.append((run // width, width, width))
            return _with_axes(part, axes, width)
    return part


def _with_axes(part: Part, axes: Sequence[tuple[int, int, int]], itemsize: int) -> Part:
    return replace(
        part,
        shape=tuple(axis[0] for axis in axes),
        strides=tuple(axis[1] for axis in axes),
        chunk_strides=tuple(axis[2] for axis in axes),
        itemsize=itemsize,
    )
