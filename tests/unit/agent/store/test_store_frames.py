"""Frames say the same on both sides, and nonsense is an error, never an allocation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_agent.store import frames
from kvpool_agent.store.frames import HEADER, FrameError, Op
from kvpool_agent.store.protocol import GetItem, ReplicaLocation

_KEYS = st.lists(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(str.encode), max_size=20
)


@given(_KEYS)
def test_keys_come_back(keys: list[bytes]) -> None:
    payload = frames.pack_keys(keys)
    assert frames.unpack_keys(payload) == ([key.decode() for key in keys], len(payload))


@given(
    st.lists(st.builds(GetItem, st.just(b"key/1"), st.integers(0, 2**60), st.integers(1, 2**60)), max_size=20)
)
def test_items_come_back(items: list[GetItem]) -> None:
    keys, offsets, sizes = frames.unpack_items(frames.pack_items(items))
    assert keys == [item.key.decode() for item in items]
    assert offsets.tolist() == [item.offset for item in items]
    assert sizes.tolist() == [item.size for item in items]


@given(_KEYS, st.binary(max_size=64), st.integers(1, 64))
def test_hashes_come_back(prefixes: list[bytes], hashes: bytes, size: int) -> None:
    text = [prefix.decode() for prefix in prefixes]
    assert frames.unpack_hashes(frames.pack_hashes(prefixes, hashes, size)) == (text, hashes, size)


def test_locations_come_back() -> None:
    found = [
        ReplicaLocation("10.0.0.1:15000", 0x7FFF_0000_0000, 4096),
        None,
        ReplicaLocation("10.0.0.2:15001", 8, 1),
        ReplicaLocation("10.0.0.1:15000", 16, 2),
    ]
    assert frames.unpack_locations(frames.pack_locations(found), count=4) == found


def test_codes_come_back_and_a_missing_one_is_an_error() -> None:
    payload = frames.pack_codes([1, 0, -900, 1 << 40])
    np.testing.assert_array_equal(frames.unpack_codes(payload, count=4), [1, 0, -900, 1 << 40])
    with pytest.raises(FrameError, match="asked about 5 keys, the answer has 4"):
        frames.unpack_codes(payload, count=5)


def test_a_frame_has_a_limit_on_both_sides() -> None:
    with pytest.raises(FrameError, match="limit"):
        frames.parse_header(HEADER.pack(frames.MAX_PAYLOAD + 1, Op.GET, 1))
    with pytest.raises(FrameError, match="unknown operation 99"):
        frames.parse_header(HEADER.pack(0, 99, 1))
    assert frames.parse_header(frames.frame(Op.GET, 7, b"abc")[: HEADER.size]) == (3, Op.GET, 7)


@pytest.mark.parametrize("cut", [0, 3, 6, 10])
def test_a_cut_frame_is_an_error(cut: int) -> None:
    payload = frames.pack_keys([b"one", b"two"])[:cut]
    with pytest.raises(FrameError):
        frames.unpack_keys(payload)


def test_a_count_beyond_the_frame_is_an_error() -> None:
    with pytest.raises(FrameError, match="4294967295 entries"):
        frames.unpack_keys(b"\xff\xff\xff\xff" + b"x" * 16)
    with pytest.raises(FrameError, match="behind the keys"):
        frames.unpack_items(frames.pack_keys([b"a"]) + b"x" * 15)


@pytest.mark.parametrize("payload", [b"", b"[1]", b"{", b"3"])
def test_json_that_is_no_object_is_an_error(payload: bytes) -> None:
    with pytest.raises(FrameError):
        frames.unpack_json(payload)
