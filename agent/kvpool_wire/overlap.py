"""Which groups share memory, so that a fence that goes by block ids sees them as one pool of blocks.

Promises: groups whose tensors have a byte in common get one number, and then block b of one shares bytes with block b
of the other and with no other block of it. Pure, and bounded: pairs of copies are compared where their extents meet.
Refuses: sharing of any other kind. Block 3 of one group on block 4 of the other could be fenced by no block id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool_wire.strides import ByteSet, Part, first_overlap, part_set

MAX_PAIRS: Final = 20_000
"""Pairs of copies that are compared, about a second. A hybrid engine with ten groups of sixty layers has 2,700."""


class IrregularOverlap(ValueError):
    """Groups that share memory in a way that no fence could follow; the message names them and says what would do."""


@dataclass(frozen=True, slots=True)
class _Placed:
    group: int
    part: Part
    blocks: int
    bytes: ByteSet


def overlap_classes(parts: Sequence[Sequence[Part]], num_blocks: Sequence[int]) -> tuple[int, ...]:
    """The lowest group that each group shares memory with, directly or through others; itself if with none.

    Args:
        parts: per group, its copies, checked; none where nothing is known of where they lie.
        num_blocks: per group.

    Raises:
        IrregularOverlap: two groups share bytes, but not block by block, or too many pairs would have to be compared.
    """
    by_storage: dict[int, list[_Placed]] = defaultdict(list)
    for group, own in enumerate(parts):
        for part in own:
            by_storage[part.storage].append(
                _Placed(group, part, num_blocks[group], part_set(part, num_blocks[group]))
            )
    classes = list(range(len(parts)))
    pairs = 0
    for placed in by_storage.values():
        alive: list[_Placed] = []
        for one in sorted(placed, key=lambda each: each.bytes.offset):
            alive = [other for other in alive if other.bytes.end > one.bytes.offset]
            for other in alive:
                if other.group == one.group:
                    continue
                pairs += 1
                if pairs > MAX_PAIRS:
                    raise IrregularOverlap(
                        f"more than {MAX_PAIRS} pairs of tensors of different groups lie between each other; lay the"
                        " tensors of each group side by side"
                    )
                if first_overlap([one.bytes, other.bytes]) is not None:
                    _check_regular(one, other)
                    low, high = sorted((classes[one.group], classes[other.group]))
                    classes = [low if each == high else each for each in classes]
            alive.append(one)
    return tuple(classes)


def _check_regular(one: _Placed, other: _Placed) -> None:
    """Raise unless every block shares bytes with the block of the same number alone.

    With equal distances between blocks only the difference of two numbers counts: block 0 against all later blocks of
    the other, both ways round.
    """
    regular = one.part.block_stride == other.part.block_stride
    for a, b in ((one, other), (other, one)):
        if regular and b.blocks > 1:
            later = replace(b.part, offset=b.part.offset + b.part.block_stride)
            regular = first_overlap([part_set(a.part, 1), part_set(later, b.blocks - 1)]) is None
    if not regular:
        low, high = sorted((one.group, other.group))
        raise IrregularOverlap(
            f"groups {low} and {high} share bytes, but block 0 of one is more than block 0 of the other: lay blocks of"
            " one id on the same bytes in both groups, or the groups apart"
        )
