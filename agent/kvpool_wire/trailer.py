"""The trailer that ends every stored chunk, format 1: 64 bytes, little-endian.

    offset  bytes
         0      4   magic "KVPT"
         4      2   format version, 1
         6      2   reserved, 0
         8     16   layout digest  (identity.layout_digest)
        24     16   key digest     (keys.key_digest)
        40      8   payload length in bytes
        48      8   reserved, 0
        56      8   checksum over the payload and the 56 bytes above

The saver writes it, the loader believes no byte before `check_trailer` has passed: whole bytes of another key, of
another layout, of another length are as wrong as damaged ones. A checksum catches accidents, not attackers.

The checksum function is handed in (xxh3_64 in the agent): this package depends on protobuf only.
"""

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Final

Buffer = bytes | bytearray | memoryview
Checksum = Callable[[Buffer], int]
"""64-bit checksum over one contiguous buffer."""

TRAILER_BYTES: Final = 64
TRAILER_VERSION: Final = 1
_MAGIC: Final = b"KVPT"
_HEAD: Final = struct.Struct("<4sHH16s16sQQ")
_SUM: Final = struct.Struct("<Q")
_SUMMED: Final = _HEAD.size


class TrailerFault(StrEnum):
    """What `check_trailer` found wrong, first fault first."""

    MAGIC = "no trailer where one should be"
    VERSION = "trailer of another format version"
    LENGTH = "payload of another length"
    LAYOUT = "chunk of another layout"
    KEY = "chunk of another key"
    CHECKSUM = "checksum does not match"


def seal(chunk: memoryview, *, layout: bytes, key: bytes, checksum: Checksum) -> None:
    """Write the trailer into the last 64 bytes of `chunk`, whose payload lies before it.

    Args:
        chunk: writable, contiguous bytes; payload plus 64.
        layout: 16 bytes of `identity.layout_digest`.
        key: 16 bytes of `keys.key_digest`.
        checksum: over one contiguous buffer.
    """
    length = len(chunk) - TRAILER_BYTES
    _HEAD.pack_into(chunk, length, _MAGIC, TRAILER_VERSION, 0, layout, key, length, 0)
    _SUM.pack_into(chunk, length + _SUMMED, checksum(chunk[: length + _SUMMED]))


def check_trailer(
    chunk: memoryview, *, layout: bytes, key: bytes, checksum: Checksum | None
) -> TrailerFault | None:
    """Compare `chunk` with what its reader asked for; None when every byte is the saver's.

    Args:
        chunk: contiguous bytes; payload plus 64.
        layout: the reader's own layout digest.
        key: digest of the key that was read.
        checksum: None leaves out the checksum alone (`integrity: Off`, or a chunk that sampling passes over).
    """
    length = len(chunk) - TRAILER_BYTES
    if length < 0:
        return TrailerFault.LENGTH
    magic, version, _, found_layout, found_key, found_length, _ = _HEAD.unpack_from(chunk, length)
    if magic != _MAGIC:
        return TrailerFault.MAGIC
    if version != TRAILER_VERSION:
        return TrailerFault.VERSION
    if found_length != length:
        return TrailerFault.LENGTH
    if found_layout != layout:
        return TrailerFault.LAYOUT
    if found_key != key:
        return TrailerFault.KEY
    if checksum is not None and _SUM.unpack_from(chunk, length + _SUMMED)[0] != checksum(
        chunk[: length + _SUMMED]
    ):
        return TrailerFault.CHECKSUM
    return None
