"""Tombstones, settings, the verifier, threads, background work and burials, each alone."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool_agent.invariants import Invariant
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.burial import Burials
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import HashChain, Integrity
from kvpool_agent.transfer.verify import Verifier
from kvpool_agent.transfer.workers import Workers
from kvpool_wire.keys import key_digest
from kvpool_wire.trailer import TrailerFault
from support.manual_loop import advance, manual_time, turns

LAYOUT = b"l" * 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tombstone_lapses_and_can_be_renewed() -> None:
    clock = Clock()
    stones = Tombstones(ttl=10, capacity=5, clock=clock)
    stones.add([b"a", b"b"])
    clock.now = 6
    stones.add([b"a"])
    clock.now = 10
    assert (b"a" in stones, b"b" in stones, len(stones)) == (True, False, 1)
    clock.now = 16
    assert (b"a" in stones, len(stones)) == (False, 0)


def test_bounded_the_oldest_tombstone_makes_room() -> None:
    stones = Tombstones(ttl=10, capacity=2, clock=Clock())
    stones.add([b"a", b"b"])
    stones.add([b"a", b"c"])
    assert [key in stones for key in (b"a", b"b", b"c")] == [True, False, True]
    assert len(stones) == 2
    assert "a" not in stones


@pytest.mark.parametrize(("ttl", "capacity"), [(0, 1), (-1, 1), (1, 0)])
def test_tombstones_that_hold_nothing_are_refused(ttl: float, capacity: int) -> None:
    with pytest.raises(ValueError, match="tombstones need"):
        Tombstones(ttl=ttl, capacity=capacity, clock=Clock())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_chunks", 0),
        ("batch_bytes", 0),
        ("max_transfers", 0),
        ("mover_threads", 0),
        ("failed_requests", 0),
        ("quarantine_share", 0.0),
        ("quarantine_share", 1.1),
        ("sample_share", -0.5),
    ],
)
def test_settings_under_which_nothing_moves_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        TransferSettings(**{field: value})


def sealed(key: bytes) -> bytearray:
    chunk = bytearray(b"payload " * 16 + bytes(64))
    Verifier().seal(memoryview(chunk), layout=LAYOUT, key=key)
    return chunk


def test_a_sealed_chunk_verifies_under_its_own_key_and_layout_only() -> None:
    chunk, verifier = memoryview(sealed(b"k")), Verifier()
    assert verifier.check(chunk, layout=LAYOUT, key=b"k") is None
    assert verifier.check(chunk, layout=LAYOUT, key=b"other") is TrailerFault.KEY
    assert verifier.check(chunk, layout=b"m" * 16, key=b"k") is TrailerFault.LAYOUT


def test_integrity_says_whose_checksum_is_looked_at_and_keys_always_are() -> None:
    keys = [f"key {number}".encode() for number in range(64)]
    damaged = {}
    for key in keys:
        damaged[key] = sealed(key)
        damaged[key][5] ^= 1

    def found(verifier: Verifier) -> set[bytes]:
        return {key for key in keys if verifier.check(memoryview(damaged[key]), layout=LAYOUT, key=key)}

    assert found(Verifier(Integrity.ALWAYS)) == set(keys)
    assert found(Verifier(Integrity.OFF)) == set()
    sampled = found(Verifier(Integrity.SAMPLED, sample_share=0.5))
    assert sampled == {key for key in keys if key_digest(key)[0] < 128}
    assert 10 < len(sampled) < 54
    assert (
        Verifier(Integrity.OFF).check(memoryview(sealed(b"k")), layout=LAYOUT, key=b"x") is TrailerFault.KEY
    )


def test_a_hash_chain_gives_its_units_and_refuses_others() -> None:
    chain = HashChain(b"aabbcc", 2)
    assert (len(chain), chain.unit(2), chain.head(2), chain.head(9)) == (
        3,
        b"cc",
        HashChain(b"aabb", 2),
        chain,
    )
    for index in (-1, 3):
        with pytest.raises(IndexError, match="chain of 3"):
            chain.unit(index)


@manual_time
async def test_fenced_threads_are_waited_for_even_if_the_caller_is_cancelled() -> None:
    workers, gate, ended = Workers(2, name="t"), threading.Event(), []

    def work(part: range) -> list[int]:
        assert gate.wait(30)
        ended.append(part)
        return list(part)

    task = asyncio.ensure_future(workers.split(5, work))
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(ended) == 2
    assert await workers.split(5, work) == [0, 1, 2, 3, 4]
    assert await workers.split(0, work) == []
    workers.close()


@manual_time
async def test_an_error_in_one_thread_is_raised_when_all_have_ended() -> None:
    workers, other_ended = Workers(2, name="t"), threading.Event()

    def work(part: range) -> list[int]:
        if 0 in part:
            raise ValueError("first half")
        other_ended.set()
        raise ValueError("second half")

    with pytest.raises(ValueError, match="first half"):
        await workers.split(4, work)
    assert other_ended.is_set()
    workers.close()


@manual_time
async def test_background_work_is_kept_waited_for_and_its_errors_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    background, gate = Background(), asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise ValueError("boom")

    background.start(fails(), name="what fails")
    waiting = asyncio.ensure_future(background.wait())
    await turns()
    assert (len(background), waiting.done()) == (1, False)
    gate.set()
    with caplog.at_level(logging.ERROR):
        await waiting
        await turns()
    assert "what fails ended with an error" in caplog.text
    assert "boom" in caplog.text


@manual_time
async def test_corrupt_keys_are_removed_after_their_lease_and_given_up_after_three_tries() -> None:
    asked: list[list[bytes]] = []

    async def remove(keys: Sequence[bytes], deadline: float) -> list[ChunkStatus]:
        asked.append(list(keys))
        assert deadline > asyncio.get_running_loop().time()
        return [ChunkStatus.LEASED if key == b"leased" else ChunkStatus.OK for key in keys]

    burials = Burials(remove, lease_seconds=10)
    burials.add([b"leased", b"free"])
    burials.add([])
    for _ in range(5):
        await turns()
        advance(10)
    await turns()
    assert asked == [[b"leased", b"free"], [b"leased"], [b"leased"]]
    burials.add([b"waits"])
    await turns()
    await burials.close()
    advance(100)
    await turns()
    assert len(asked) == 3


@manual_time
async def test_bounded_no_more_than_so_many_keys_wait_for_their_removal() -> None:
    removed: list[bytes] = []

    async def remove(keys: Sequence[bytes], deadline: float) -> list[ChunkStatus]:
        removed.extend(keys)
        return [ChunkStatus.OK] * len(keys)

    burials = Burials(remove, lease_seconds=1)
    burials.add([b"%d" % number for number in range(5000)])
    burials.add([b"one more"])
    await turns()
    advance(1.1)
    await turns()
    assert len(removed) == 4096
    burials.add([b"again"])
    await turns()
    advance(1.1)
    await turns()
    assert removed[-1] == b"again"


def test_every_invariant_has_its_sentence() -> None:
    assert {invariant.name for invariant in Invariant} == {
        "PRUNE_ONCE",
        "LOAD_SUBSET_OF_VERIFIED",
        "MASK_COVERS_HIT",
        "LOADED_OR_REPORTED",
        "FENCED",
        "WHOLE_OR_ABSENT",
        "NO_SAVE_AFTER_FAILURE",
        "SAME_IDENTITY",
        "BOUNDED",
        "CRASH_ONLY",
    }
    assert all(invariant.value.endswith(".") for invariant in Invariant)
