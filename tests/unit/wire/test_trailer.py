"""The chunk trailer: golden bytes, every fault, and that no single damaged byte passes."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvpool_wire.trailer import TRAILER_BYTES, Buffer, TrailerFault, check_trailer, seal

LAYOUT, KEY = bytes(range(16)), bytes(range(100, 116))


def checksum(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data)


def sealed(payload: bytes = b"0123456789abcdef") -> bytearray:
    chunk = bytearray(payload + b"\xaa" * TRAILER_BYTES)
    seal(memoryview(chunk), layout=LAYOUT, key=KEY, checksum=checksum)
    return chunk


def check(chunk: bytes | bytearray) -> TrailerFault | None:
    return check_trailer(memoryview(chunk), layout=LAYOUT, key=KEY, checksum=checksum)


def test_golden_chunk_does_not_drift() -> None:
    assert sealed().hex() == (
        "303132333435363738396162636465664b56505401000000000102030405060708090a0b0c0d0e0f6465666768696a6b6c6d6e6f7071727310000000000000000000000000000000e6be4b084ca63582"
    )


def test_the_format_is_spelled_out_here_a_second_time() -> None:
    chunk = sealed()
    head = b"KVPT" + struct.pack("<HH", 1, 0) + LAYOUT + KEY + struct.pack("<QQ", 16, 0)
    assert chunk[16:72] == head
    assert chunk[72:] == struct.pack("<Q", checksum(bytes(chunk[:16]) + head))


@pytest.mark.parametrize("payload", [b"", b"x", bytes(5000)])
def test_what_was_sealed_passes_and_keeps_its_payload(payload: bytes) -> None:
    chunk = sealed(payload)
    assert check(chunk) is None
    assert chunk[: len(payload)] == payload


def _changed(offset: int, value: bytes, *, reseal: bool) -> bytearray:
    chunk = sealed()
    chunk[16 + offset : 16 + offset + len(value)] = value
    if reseal:
        chunk[72:] = struct.pack("<Q", checksum(chunk[:72]))
    return chunk


@pytest.mark.parametrize("reseal", [False, True])
@pytest.mark.parametrize(
    ("offset", "value", "fault"),
    [
        (0, b"KVPX", TrailerFault.MAGIC),
        (4, b"\x02\x00", TrailerFault.VERSION),
        (8, b"\xff", TrailerFault.LAYOUT),
        (23, b"\xff", TrailerFault.LAYOUT),
        (24, b"\xff", TrailerFault.KEY),
        (39, b"\xff", TrailerFault.KEY),
        (40, b"\x0f", TrailerFault.LENGTH),
        (47, b"\x01", TrailerFault.LENGTH),
    ],
)
def test_each_field_that_is_another_has_its_fault(
    offset: int, value: bytes, fault: TrailerFault, reseal: bool
) -> None:
    assert check(_changed(offset, value, reseal=reseal)) is fault


def test_no_single_damaged_byte_passes() -> None:
    chunk = sealed()
    for position in range(len(chunk)):
        chunk[position] ^= 0x40
        assert check(chunk) is not None, position
        chunk[position] ^= 0x40
    assert check(chunk) is None


def test_a_damaged_payload_is_a_checksum_fault_unless_sums_are_off() -> None:
    chunk = sealed()
    chunk[3] ^= 1
    assert check(chunk) is TrailerFault.CHECKSUM
    assert check_trailer(memoryview(chunk), layout=LAYOUT, key=KEY, checksum=None) is None


def test_without_sums_another_key_is_still_found() -> None:
    chunk = sealed()
    assert check_trailer(memoryview(chunk), layout=LAYOUT, key=LAYOUT, checksum=None) is TrailerFault.KEY


def test_whole_chunks_of_another_length_are_found() -> None:
    long, short = sealed(bytes(32)), sealed(bytes(8))
    assert check(long[:16] + long[32:]) is TrailerFault.LENGTH
    assert check(bytes(8) + short) is TrailerFault.LENGTH


@pytest.mark.parametrize("size", [0, 1, 63])
def test_what_is_shorter_than_a_trailer_is_no_chunk(size: int) -> None:
    assert check(bytes(size)) is TrailerFault.LENGTH


def test_zeros_and_rubbish_are_no_chunk() -> None:
    assert check(bytes(80)) is TrailerFault.MAGIC
    assert check(b"\xff" * 80) is TrailerFault.MAGIC


def test_sealing_writes_nothing_but_the_trailer() -> None:
    around = bytearray(b"\xdd" * 200)
    seal(memoryview(around)[50:150], layout=LAYOUT, key=KEY, checksum=checksum)
    assert around[:86] == b"\xdd" * 86
    assert around[150:] == b"\xdd" * 50
