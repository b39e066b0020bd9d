"""Small array helpers: presence of hash units, runs and holes, and the masks of a hit.

Promises that nothing here loops over blocks in Python, that every array handed out is read-only, and that a
unit past the end of a presence array is absent. It decides nothing about hits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]

_NO_HOLES: IntArray = np.zeros(0, dtype=np.int64)


def first_hole(present: BoolArray) -> int:
    """Return the index of the first False, or the length if there is none."""
    index = int(present.argmin()) if present.size else 0
    return index if present.size and not present[index] else int(present.size)


def holes(present: BoolArray) -> IntArray:
    """Return the indices of all False entries, ascending."""
    return np.flatnonzero(~present)


def last_present(present: BoolArray) -> int:
    """Return the index of the last True, or -1."""
    if not present.size:
        return -1
    index = int(present.size) - 1 - int(present[::-1].argmax())
    return index if present[index] else -1


def read_only(array: NDArray[np.generic]) -> None:
    """Make `array`, and with it every view taken later, read-only."""
    array.setflags(write=False)


class Seen:
    """Presence of one key per hash unit, as the store answered."""

    __slots__ = ("_units",)

    def __init__(self, units: BoolArray) -> None:
        """Take presence by hash unit; the array is not copied."""
        self._units = units

    def first_hole(self, stride: int) -> int:
        """Return how many chunks of `stride` units are present from the start without a gap."""
        return first_hole(self._units[stride - 1 :: stride])

    def holes(self, stride: int) -> IntArray:
        """Return the absent chunks of `stride` units, ascending."""
        return holes(self._units[stride - 1 :: stride])

    def last_present(self, low: int, high: int, stride: int) -> int:
        """Return the last present unit in [low, high) that ends on a multiple of `stride` units, or -1."""
        first = low + (-(low + 1)) % stride
        index = last_present(self._units[first:high:stride]) if first < high else -1
        return first + index * stride if index >= 0 else -1


class Everything:
    """The presence of a pool in which every key exists: what a load mask is computed on, in constant time."""

    __slots__ = ("_num_units",)

    def __init__(self, num_units: int) -> None:
        """Take the number of hash units in the chain."""
        self._num_units = num_units

    def first_hole(self, stride: int) -> int:
        """Return the number of chunks of `stride` units."""
        return self._num_units // stride

    def holes(self, stride: int) -> IntArray:
        """Return no chunk at all, whatever the `stride`."""
        del stride
        return _NO_HOLES

    def last_present(self, low: int, high: int, stride: int) -> int:
        """Return the last unit in [low, high) that ends on a multiple of `stride` units, or -1."""
        last = high - high % stride - 1
        return last if last >= low else -1


UnitPresence: TypeAlias = Seen | Everything


@dataclass(frozen=True, slots=True)
class MaskShape:
    """A group's mask without its array: False before chunk `first`, True from there to `length`.

    Every kind of attention loads a tail of the chunks that a hit covers, so two numbers say it all.
    """

    length: int
    first: int


class MaskCache:
    """Read-only masks of any shape, cut from one template without copying."""

    __slots__ = ("_template",)

    def __init__(self) -> None:
        """Start with room for 4,096 chunks."""
        self._template = self._build(4096)

    @staticmethod
    def _build(half: int) -> BoolArray:
        template = np.zeros(2 * half, dtype=np.bool_)
        template[half:] = True
        read_only(template)
        return template

    def mask(self, shape: MaskShape) -> BoolArray:
        """Return the mask of `shape`: one entry per chunk, True where it is loaded."""
        template = self._template
        half = template.size // 2
        if shape.length > half:
            half = 1 << (shape.length - 1).bit_length()
            # Two threads may both build; either template is right.
            self._template = template = self._build(half)
        start = half - shape.first
        return template[start : start + shape.length]


class KeyUnitCache:
    """Read-only arrays of the hash units that close chunks, cut from one template per chunk size."""

    __slots__ = ("_templates",)

    def __init__(self) -> None:
        """Start empty."""
        self._templates: dict[int, IntArray] = {}

    def closing(self, stride: int, length: int) -> IntArray:
        """Return for chunks 0 to `length` of `stride` units each the unit that closes it."""
        template = self._templates.get(stride)
        if template is None or template.size < length:
            room = max(4096, 1 << max(0, length - 1).bit_length())
            template = np.arange(stride - 1, room * stride, stride, dtype=np.int64)
            read_only(template)
            self._templates[stride] = template
        return template[:length]


def unit_presence(exists: Sequence[BoolArray], num_groups: int, num_units: int) -> list[BoolArray]:
    """Return one boolean array of exactly `num_units` per group; units past a given array's end are absent.

    Raises:
        ValueError: not one array per group, or an array that is not one-dimensional and boolean.
    """
    if len(exists) != num_groups:
        raise ValueError(
            f"presence has {len(exists)} arrays for {num_groups} groups; give one per group, in group order"
        )
    clipped: list[BoolArray] = []
    for group, given in enumerate(exists):
        units = np.asarray(given)
        if units.ndim != 1 or (units.dtype != np.bool_ and units.size):
            raise ValueError(
                f"presence of group {group} must be a one-dimensional boolean array, "
                f"got {units.dtype} with shape {units.shape}"
            )
        if units.size < num_units:
            padded = np.zeros(num_units, dtype=np.bool_)
            padded[: units.size] = units
            clipped.append(padded)
        else:
            clipped.append(units[:num_units])
    return clipped
