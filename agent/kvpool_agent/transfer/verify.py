"""Which bytes are believed: the checksum, and how much of what is loaded has it verified.

Promises: a chunk passes only if its trailer names this very key and layout and, with `Integrity.ALWAYS`, every byte is
the saver's. Called in worker threads; the checksum releases the interpreter's lock.
"""

from typing import Final

import xxhash

from kvpool_agent.transfer.types import Integrity
from kvpool_wire.keys import key_digest
from kvpool_wire.trailer import Buffer, Checksum, TrailerFault, check_trailer
from kvpool_wire.trailer import seal as seal_trailer


def checksum(buffer: Buffer) -> int:
    """xxh3_64 over one contiguous buffer."""
    digest: int = xxhash.xxh3_64_intdigest(buffer)
    return digest


class Verifier:
    """Seals what is saved and checks what is loaded."""

    def __init__(self, integrity: Integrity = Integrity.ALWAYS, *, sample_share: float = 1.0) -> None:
        self._integrity: Final = integrity
        self._sampled_below: Final = int(sample_share * 256)

    def check(self, chunk: memoryview, *, layout: bytes, key: bytes) -> TrailerFault | None:
        """What is wrong with `chunk` (payload and trailer) as the object of `key`; None if nothing is."""
        digest = key_digest(key)
        return check_trailer(chunk, layout=layout, key=digest, checksum=self._checksum_for(digest))

    def seal(self, chunk: memoryview, *, layout: bytes, key: bytes) -> None:
        """Write the trailer of `chunk`."""
        seal_trailer(chunk, layout=layout, key=key_digest(key), checksum=checksum)

    def _checksum_for(self, digest: bytes) -> Checksum | None:
        if self._integrity is Integrity.OFF:
            return None
        if self._integrity is Integrity.SAMPLED and digest[0] >= self._sampled_below:
            return None
        return checksum
