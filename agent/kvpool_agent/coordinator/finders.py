"""The longest hit of one spec group: one class per kind of attention.

Promises the answers of vLLM 0.32's single-type managers, its quirks included, in time linear in the units for
building and about logarithmic for asking. Each answer carries its evidence: the present units that it rests
on. Given the same evidence, and given that what the finder took for absent is absent, the answer cannot
change; staged probing is built on that. It combines no groups and prunes only when told to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Protocol

import numpy as np

from kvpool_agent.coordinator.masks import BoolArray, IntArray, MaskShape, UnitPresence
from kvpool_agent.coordinator.specs import GroupKind, GroupSpec, Sizes


@dataclass(frozen=True, slots=True)
class Match:
    """What one spec group answers for one limit.

    Attributes:
        hit: tokens.
        shape: the mask of that hit.
        evidence: hash units that the answer rests on, as ranges.
    """

    hit: int
    shape: MaskShape
    evidence: tuple[range, ...] = ()


NO_HIT = Match(0, MaskShape(0, 0))


def closing_units(first: int, last: int, stride: int) -> range:
    """Return the units that close chunks `first` to `last` (exclusive), each `stride` units long."""
    return range((first + 1) * stride - 1, last * stride, stride)


class Finder(Protocol):
    """Searches one spec group."""

    def find(self, limit: int, *, drop: bool) -> Match:
        """Return the longest hit of at most `limit` tokens; with `drop`, pruned by the last matched block."""
        ...


class _Base:
    """Sizes that every kind needs: `block` and `align` in tokens, `stride` in hash units per chunk."""

    def __init__(self, spec: GroupSpec, sizes: Sizes, units: UnitPresence, num_units: int) -> None:
        self.block = spec.block_size
        self.align = sizes.alignment
        self.hash_block = sizes.hash_block
        self.stride = spec.block_size // sizes.hash_block
        self.units = units
        self.num_units = num_units
        self.num_chunks = num_units // self.stride
        # With partial hits a hit may end inside this group's blocks; the alignment is then one hash unit.
        self.fine = self.align < self.block


class FullAttentionFinder(_Base):
    """Longest run from the start, then (partial hits) the longest part of the block after it."""

    @cached_property
    def run(self) -> int:
        """Chunks present from the start without a gap."""
        return self.units.first_hole(self.stride)

    def find(self, limit: int, *, drop: bool) -> Match:
        """Return the longest hit of at most `limit` tokens; with `drop` one block (partial hits: one unit) shorter."""
        chunks = min(self.run, limit // self.block)
        hit = chunks * self.block
        evidence = [closing_units(0, chunks, self.stride)]
        if self.fine:
            low = chunks * self.stride
            high = min(low + self.stride - 1, limit // self.align, self.num_units)
            unit = self.units.last_present(low, high, 1)
            if unit >= 0:
                hit = (unit + 1) * self.align
                evidence.append(range(low, high))
        if drop and hit > 0:
            hit -= min(self.align, self.block)
        hit -= hit % self.align
        return Match(hit, MaskShape(-(-hit // self.block), 0), tuple(evidence))

    def extent(self, limit: int) -> Match:
        """Return the longest hit of at most `limit` tokens that the keys in its blocks serve, unpruned.

        Unlike `find` this also looks at keys past the limit but inside its last block: a key that closes the
        block later serves a hit that ends inside it.
        """
        top = min(-(-limit // self.block) * self.block, self.num_units * self.hash_block)
        reach = self.find(top, drop=False)
        hit = min(limit, reach.hit)
        return Match(hit, MaskShape(-(-hit // self.block), 0), reach.evidence)


class SlidingWindowFinder(_Base):
    """The rightmost window that is present and ends on an aligned edge."""

    def __init__(self, spec: GroupSpec, sizes: Sizes, units: UnitPresence, num_units: int) -> None:
        super().__init__(spec, sizes, units, num_units)
        self.window_chunks = window_chunks(spec)
        self.edge_step = self.align // gcd(self.align, self.block)

    @cached_property
    def _holes(self) -> IntArray:
        return self.units.holes(self.stride)

    @cached_property
    def _stretches_with_drop(self) -> IntArray:
        return self._full_stretches(drop=True)

    @cached_property
    def _stretches_without_drop(self) -> IntArray:
        return self._full_stretches(drop=False)

    def _need(self, *, drop: bool) -> int:
        return max(1, self.window_chunks + int(drop))

    def _full_stretches(self, *, drop: bool) -> IntArray:
        """Return which stretches between holes (stretch i ends at hole i) contain a whole window at a legal edge."""
        starts = np.concatenate((np.zeros(1, dtype=np.int64), self._holes[:-1] + 1))
        ends = self._holes - (self._holes - int(drop)) % self.edge_step
        return np.flatnonzero(ends - self._need(drop=drop) >= starts[: ends.size])

    def _rightmost_window_end(self, chunks: int, *, drop: bool) -> int:
        """Return the chunk after the rightmost whole window within the first `chunks`, or 0 if there is none."""
        absent = self._holes
        need = self._need(drop=drop)
        index = int(absent.searchsorted(chunks))
        start = int(absent[index - 1]) + 1 if index else 0
        end = chunks - (chunks - int(drop)) % self.edge_step
        if end - need >= start:
            return end
        stretches = self._stretches_with_drop if drop else self._stretches_without_drop
        earlier = int(stretches.searchsorted(index))
        if not earlier:
            return 0
        hole = int(absent[int(stretches[earlier - 1])])
        return hole - (hole - int(drop)) % self.edge_step

    def find(self, limit: int, *, drop: bool) -> Match:
        """Return the longest hit of at most `limit` tokens; `drop` takes a window one chunk longer, less its last."""
        chunks = min(limit // self.block, self.num_chunks)
        end = self._rightmost_window_end(chunks, drop=drop)
        if not end:
            return self._prefix(chunks, drop=drop)
        kept = end - int(drop)
        first = end - self._need(drop=drop)
        return Match(kept * self.block, MaskShape(kept, first), (closing_units(first, end, self.stride),))

    def _prefix(self, chunks: int, *, drop: bool) -> Match:
        """Return the hit of a run shorter than the window, which counts only at the very start.

        Aligned again after the drop, as vLLM does: that may cost a whole alignment segment and is never
        wrong.
        """
        run = min(int(self._holes[0]) if self._holes.size else self.num_chunks, chunks)
        end = max(0, run - (run - int(drop)) % self.edge_step)
        kept = end - end % self.edge_step
        if drop and kept:
            kept -= 1
            kept -= kept % self.edge_step
        return Match(kept * self.block, MaskShape(kept, 0), (closing_units(0, end, self.stride),))


class ChunkedLocalFinder(_Base):
    """Blocks before the attention chunk of the limit are free; from there the run of present blocks."""

    def __init__(self, spec: GroupSpec, sizes: Sizes, units: UnitPresence, num_units: int) -> None:
        super().__init__(spec, sizes, units, num_units)
        self.chunk_tokens = spec.chunk_size or spec.block_size

    @cached_property
    def _holes(self) -> IntArray:
        return self.units.holes(self.stride)

    def find(self, limit: int, *, drop: bool) -> Match:
        """Return the longest hit of at most `limit` tokens; `drop` is refused when the coordinator is built."""
        del drop
        total = min(limit // self.block, self.num_chunks)
        start = min(limit // self.chunk_tokens * self.chunk_tokens // self.block, total)
        index = int(self._holes.searchsorted(start))
        end = min(int(self._holes[index]), total) if index < self._holes.size else total
        return Match(end * self.block, MaskShape(end, start), (closing_units(start, end, self.stride),))


class RecurrentStateFinder(_Base):
    """The rightmost present state on an aligned boundary. Never pruned: a state cannot be cut shorter."""

    @property
    def boundary_stride(self) -> int:
        """Hash units between two boundaries at which a state can serve a hit."""
        if self.fine:
            return 1
        return self.block * self.align // gcd(self.block, self.align) // self.hash_block

    def find(self, limit: int, *, drop: bool) -> Match:
        """Return the longest hit of at most `limit` tokens; `drop` is ignored, a state cannot be cut."""
        del drop
        high = min(limit // self.hash_block, self.num_units)
        unit = self.units.last_present(0, high, self.boundary_stride)
        hit = (unit + 1) * self.hash_block
        length = -(-hit // self.block)
        evidence = (range(unit, unit + 1),) if unit >= 0 else ()
        return Match(hit, MaskShape(length, max(0, length - 1)), evidence)


def window_chunks(spec: GroupSpec) -> int:
    """Return how many chunks before a position a sliding window reaches into: ceil((window - 1) / block)."""
    return -(-((spec.sliding_window or 1) - 1) // spec.block_size)


_FINDERS: dict[GroupKind, Callable[[GroupSpec, Sizes, UnitPresence, int], Finder]] = {
    GroupKind.FULL_ATTENTION: FullAttentionFinder,
    GroupKind.SLIDING_WINDOW: SlidingWindowFinder,
    GroupKind.CHUNKED_LOCAL: ChunkedLocalFinder,
    GroupKind.MAMBA: RecurrentStateFinder,
}


def make_finder(spec: GroupSpec, sizes: Sizes, units: UnitPresence, num_units: int) -> Finder:
    """Return the finder for `spec` over a chain of `num_units` hash units."""
    return _FINDERS[spec.kind](spec, sizes, units, num_units)


def merge_members(presence: list[BoolArray], members: tuple[int, ...]) -> BoolArray:
    """Return the units that every member of a spec group has."""
    merged = presence[members[0]]
    for member in members[1:]:
        merged = merged & presence[member]
    return merged
