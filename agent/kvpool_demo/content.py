"""Prompts and KV whose every byte can be told from its key and its position.

A block's content is made from (hash of the unit that closes it, layer, tensor, rank), so that a reader knows what must
be there without having seen the writer. Nothing here is random between runs.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

HASH_BYTES: Final = 32
POISON: Final = 0xEE
"""What an engine's blocks hold before anything is computed or loaded; a byte of it inside a loaded block is a fault."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the cache sees it: parts in order, each a name and a number of tokens.

    Two prompts share the KV of the parts that they have in common from the start.
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(count for _, count in self.parts)

    def hashes(self, hash_block_size: int) -> list[bytes]:
        """The hash chain: unit u covers the first (u + 1) * hash_block_size tokens; only whole units are hashed."""
        stream = [f"{name}#{position}".encode() for name, count in self.parts for position in range(count)]
        chain: list[bytes] = []
        last = b"kvpool demo"
        for start in range(0, len(stream) - hash_block_size + 1, hash_block_size):
            last = hashlib.sha256(last + b"|".join(stream[start : start + hash_block_size])).digest()
            chain.append(last)
        return chain


def block_bytes(unit_hash: bytes, *, layer: str, part: int, rank: int, size: int) -> NDArray[np.uint8]:
    """What one block of one tensor must hold, shape `(size,)`, in the order of the tensor's axes."""
    seed = hashlib.blake2b(unit_hash + f"{layer}/{part}/{rank}".encode(), digest_size=8).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(seed, "little")))
    return np.frombuffer(generator.bytes(size), dtype=np.uint8)
