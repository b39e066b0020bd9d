"""What travels between the agent and a worker process: length-prefixed frames, packed by hand.

Promises: both sides share this one description; keys and numbers travel packed (no Python object per key on the wire);
a frame over the limit, or one whose parts do not add up, is an error and never an allocation.
Refuses to carry bytes of chunks: those stay in the shared ring.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.store.errors import StoreError
from kvpool_agent.store.protocol import ReplicaLocation

HEADER: Final = struct.Struct("<IIQ")  # payload bytes, operation, request id
MAX_PAYLOAD: Final = 256 << 20
_COUNT: Final = struct.Struct("<I")


class FrameError(StoreError):
    """A frame does not follow this description; the other side is broken and has to be replaced."""


class Op(IntEnum):
    """Operations. Requests and their replies carry the same id; id 0 belongs to the start and the end."""

    CONFIG = 1
    READY = 2
    FAILED = 3
    REPLY = 4
    ERROR = 5
    EXISTS = 6
    EXISTS_KEYS = 7
    LOCATE = 8
    GET = 9
    PUT = 10
    REMOVE = 11
    STOP = 12
    PING = 13


class _Ranged(Protocol):
    @property
    def key(self) -> bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


def frame(op: Op, request: int, payload: bytes) -> bytes:
    """One frame, ready to be written."""
    if len(payload) > MAX_PAYLOAD:
        raise FrameError(
            f"{op.name} of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD}; ask for less at once"
        )
    return HEADER.pack(len(payload), op, request) + payload


def parse_header(header: bytes) -> tuple[int, Op, int]:
    """(payload length, operation, request id) of a header."""
    length, op, request = HEADER.unpack(header)
    if length > MAX_PAYLOAD:
        raise FrameError(f"a frame announces {length} bytes, the limit is {MAX_PAYLOAD}")
    try:
        return length, Op(op), request
    except ValueError as error:
        raise FrameError(f"unknown operation {op}") from error


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Count, lengths, then the keys end to end."""
    lengths = np.fromiter(map(len, keys), dtype="<u4", count=len(keys))
    return b"".join((_COUNT.pack(len(keys)), lengths.tobytes(), *keys))


def unpack_keys(payload: bytes, start: int = 0) -> tuple[list[str], int]:
    """(keys as text, position behind them). Text, since that is what Mooncake takes."""
    count, lengths, position = _array(payload, start, "<u4")
    ends = list(accumulate((int(length) for length in lengths), initial=position))
    if ends[-1] > len(payload):
        raise FrameError(f"{count} keys need {ends[-1]} bytes, the frame has {len(payload)}")
    text = payload[position : ends[-1]].decode("ascii")
    return [text[left - position : right - position] for left, right in pairwise(ends)], ends[-1]


def pack_items(items: Sequence[_Ranged]) -> bytes:
    """Keys, then offsets, then sizes."""
    offsets = np.fromiter((item.offset for item in items), dtype="<i8", count=len(items))
    sizes = np.fromiter((item.size for item in items), dtype="<i8", count=len(items))
    return pack_keys([item.key for item in items]) + offsets.tobytes() + sizes.tobytes()


def unpack_items(payload: bytes) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """(keys, offsets, sizes)."""
    keys, position = unpack_keys(payload)
    if len(payload) != position + 16 * len(keys):
        raise FrameError(
            f"{len(keys)} items need {16 * len(keys)} bytes behind the keys, not {len(payload) - position}"
        )
    numbers = np.frombuffer(payload, dtype="<i8", offset=position).astype(np.int64)
    return keys, numbers[: len(keys)], numbers[len(keys) :]


def pack_hashes(prefixes: Sequence[bytes], hashes: bytes, hash_size: int) -> bytes:
    """Prefixes, the size of a hash, then the packed hashes."""
    return pack_keys(prefixes) + _COUNT.pack(hash_size) + hashes


def unpack_hashes(payload: bytes) -> tuple[list[str], bytes, int]:
    """(prefixes, packed hashes, size of a hash)."""
    prefixes, position = unpack_keys(payload)
    (hash_size,) = _COUNT.unpack_from(payload, position)
    return prefixes, payload[position + _COUNT.size :], int(hash_size)


def pack_codes(codes: Sequence[int]) -> bytes:
    """Answers of a batch as packed int64."""
    return np.array(codes, dtype="<i8").tobytes()


def unpack_codes(payload: bytes, *, count: int) -> NDArray[np.int64]:
    """The answers of a batch of `count`; any other number of them is an error."""
    if len(payload) != 8 * count:
        raise FrameError(f"asked about {count} keys, the answer has {len(payload) // 8}")
    return np.frombuffer(payload, dtype="<i8").astype(np.int64)


def pack_locations(locations: Sequence[ReplicaLocation | None]) -> bytes:
    """Distinct endpoints as JSON, then per key (endpoint index or -1, address, size)."""
    index: dict[str, int] = {}
    rows = np.full((len(locations), 3), -1, dtype="<i8")
    for row, location in zip(rows, locations, strict=True):
        if location is not None:
            row[:] = (index.setdefault(location.endpoint, len(index)), location.address, location.size)
    names = json.dumps(list(index)).encode()
    return _COUNT.pack(len(names)) + names + rows.tobytes()


def unpack_locations(payload: bytes, *, count: int) -> list[ReplicaLocation | None]:
    """The inverse of `pack_locations`."""
    (length,) = _COUNT.unpack_from(payload)
    names: list[str] = json.loads(payload[_COUNT.size : _COUNT.size + length])
    rows = unpack_codes(payload[_COUNT.size + length :], count=3 * count).reshape(count, 3)
    return [
        None if name < 0 else ReplicaLocation(names[name], int(address), int(size))
        for name, address, size in rows
    ]


def pack_json(value: Mapping[str, object]) -> bytes:
    """Small things: configuration, readiness, errors."""
    return json.dumps(value).encode()


def unpack_json(payload: bytes) -> dict[str, object]:
    """The inverse of `pack_json`."""
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise FrameError(f"not JSON: {payload[:80]!r}") from error
    if not isinstance(value, dict):
        raise FrameError(f"not an object: {payload[:80]!r}")
    return value


def _array(payload: bytes, start: int, dtype: str) -> tuple[int, NDArray[np.uint32], int]:
    if start + _COUNT.size > len(payload):
        raise FrameError(f"a count is missing at byte {start}")
    (count,) = _COUNT.unpack_from(payload, start)
    begin = start + _COUNT.size
    end = begin + 4 * count
    if end > len(payload):
        raise FrameError(f"{count} entries announced at byte {start}, the frame has {len(payload)} bytes")
    return count, np.frombuffer(payload, dtype=dtype, count=count, offset=begin).astype(np.uint32), end
