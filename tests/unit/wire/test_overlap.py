"""Which groups share memory: against a model that lists every byte of every block."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_wire.overlap import MAX_PAIRS, IrregularOverlap, overlap_classes
from kvpool_wire.strides import Part

BLOCKS = 4


def part(offset: int, *, size: int = 2, stride: int = 16, storage: int = 0) -> Part:
    return Part(
        storage=storage,
        offset=offset,
        block_stride=stride,
        shape=(size,),
        strides=(1,),
        chunk_offset=0,
        chunk_strides=(1,),
        itemsize=1,
    )


def block_bytes(one: Part, block: int) -> set[tuple[int, int]]:
    first = one.offset + block * one.block_stride
    return {(one.storage, byte) for byte in range(first, first + one.shape[0])}


def model(groups: list[list[Part]]) -> tuple[int, ...] | None:
    """The classes; None where sharing is not block by block."""
    classes = list(range(len(groups)))
    for (low, below), (high, above) in combinations(enumerate(groups), 2):
        for one in below:
            for other in above:
                met = {
                    (i, j)
                    for i in range(BLOCKS)
                    for j in range(BLOCKS)
                    if block_bytes(one, i) & block_bytes(other, j)
                }
                if any(i != j for i, j in met) or (met and one.block_stride != other.block_stride):
                    return None
                if met:
                    old, new = sorted((classes[low], classes[high]), reverse=True)
                    classes = [new if each == old else each for each in classes]
    return tuple(classes)


parts = st.builds(
    part,
    st.integers(0, 20),
    size=st.integers(1, 6),
    stride=st.sampled_from([16, 16, 16, 8]),
    storage=st.integers(0, 1),
)


@given(st.lists(st.lists(parts, max_size=2), min_size=1, max_size=4))
def test_fenced_overlap_classes_are_those_of_the_bytes_themselves(groups: list[list[Part]]) -> None:
    expected = model(groups)
    if expected is None:
        with pytest.raises(IrregularOverlap, match="share bytes, but block 0 of one"):
            overlap_classes(groups, [BLOCKS] * len(groups))
    else:
        assert overlap_classes(groups, [BLOCKS] * len(groups)) == expected


def test_one_block_is_always_block_by_block() -> None:
    assert overlap_classes([[part(0)], [part(1)]], [1, 1]) == (0, 0)


def test_bounded_tensors_that_lie_between_each_other_a_thousandfold_are_refused() -> None:
    side = int(MAX_PAIRS**0.5) + 2
    groups = [[part(4 * at + 2 * group, stride=1 << 20) for at in range(side)] for group in (0, 1)]
    with pytest.raises(IrregularOverlap, match="pairs of tensors of different groups"):
        overlap_classes(groups, [BLOCKS, BLOCKS])
