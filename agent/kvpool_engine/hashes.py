"""The caller's hash chain: unit i covers tokens i * hash_block_size to (i + 1) * hash_block_size.

It is packed no further than somebody asks for, so that a miss costs the same at any length of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvpool_wire import limits


@dataclass(frozen=True, slots=True)
class PackedHashes:
    """A hash chain in one piece of memory: unit i is `packed[i * size : (i + 1) * size]`."""

    packed: bytes | memoryview
    size: int

    def __len__(self) -> int:
        return len(self.packed) // self.size

    def head(self, units: int) -> bytes:
        """The first `units` units, packed."""
        return bytes(self.packed[: units * self.size])


Hashes = Sequence[bytes] | PackedHashes


@dataclass(frozen=True, slots=True)
class HashSource:
    """A caller's chain, packed no further than it is needed: a miss costs the same at any prompt length."""

    chain: Hashes
    size: int
    total: int

    @classmethod
    def of(cls, hashes: Hashes) -> Self:
        """Check the chain's size and length.

        Raises:
            ValueError: hashes of a length that no pool takes, or too many of them.
        """
        total = len(hashes)
        if isinstance(hashes, PackedHashes):
            return cls._checked(hashes, hashes.size, total)
        return cls._checked(hashes, len(hashes[0]) if total else limits.MIN_HASH_SIZE, total)

    @classmethod
    def _checked(cls, hashes: Hashes, size: int, total: int) -> Self:
        if not limits.MIN_HASH_SIZE <= size <= limits.MAX_HASH_SIZE:
            raise ValueError(
                f"hashes of {size} bytes; {limits.MIN_HASH_SIZE} to {limits.MAX_HASH_SIZE} are served"
            )
        if total > limits.MAX_HASH_UNITS:
            raise ValueError(f"{total} hash units in one request; at most {limits.MAX_HASH_UNITS} are served")
        return cls(hashes, size, total)

    def head(self, units: int) -> bytes:
        """The first `units` units, packed.

        Raises:
            ValueError: if the units are not all equally long.
        """
        if isinstance(self.chain, PackedHashes):
            return self.chain.head(units)
        packed = b"".join(self.chain[:units])
        if len(packed) != min(units, self.total) * self.size:
            raise ValueError(f"hash units of different lengths; the first has {self.size} bytes")
        return packed
