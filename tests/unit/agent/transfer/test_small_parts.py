"""Tombstones, settings, the verifier, threads, background work and removals, each alone."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool_agent.invariants import Invariant
from kvpool_agent.store.errors import StoreError, StoreUnavailable
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.removals import Removals, Why
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


class Remover:
    """Answers LEASED for keys that are named so."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, list[bytes]]] = []
        self.error: StoreError | None = None

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        now = asyncio.get_running_loop().time()
        assert deadline > now
        self.asked.append((now, list(keys)))
        if self.error is not None:
            raise self.error
        return [ChunkStatus.LEASED if key.startswith(b"leased") else ChunkStatus.OK for key in keys]


class Counts:
    """What removals count."""

    def __init__(self) -> None:
        self.gone: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()

    def removed(self, *, reason: str, gone: int, given_up: int) -> None:
        self.gone[reason] += gone
        self.given_up[reason] += given_up


def removals_of(remover: Remover, counts: Counts, **limits: float) -> tuple[Removals, Tombstones]:
    tombstones = Tombstones(ttl=60, capacity=10_000, clock=asyncio.get_running_loop().time)
    given: Any = limits
    return Removals(remover, tombstones=tombstones, metrics=counts, lease_seconds=10, **given), tombstones


async def pass_time(seconds: int) -> None:
    for _ in range(seconds):
        await turns()
        advance(1)
    await turns()


@manual_time
async def test_a_removal_is_tried_after_every_lease_until_it_is_given_up() -> None:
    remover, counts = Remover(), Counts()
    removals, tombstones = removals_of(remover, counts, give_up_seconds=25)
    removals.add([b"leased", b"free", b"free"], Why.CORRUPT)
    removals.add([b"leased too"], Why.REVOKED)
    removals.add([], Why.REVOKED)
    begun = asyncio.get_running_loop().time()
    await pass_time(40)
    tries = [(round(at - begun), key) for at, keys in remover.asked for key in keys]
    assert [at for at, key in tries if key == b"leased"] == [10, 20, 25]
    assert [at for at, key in tries if key == b"leased too"] == [0, 10, 20, 25]
    assert [at for at, key in tries if key == b"free"] == [10]
    assert (counts.gone, counts.given_up) == ({"corrupt": 1, "revoked": 0}, {"corrupt": 1, "revoked": 1})
    assert b"leased too" in tombstones
    assert len(removals) == 0


@manual_time
async def test_a_removal_outlives_a_store_that_does_not_answer() -> None:
    remover, counts = Remover(), Counts()
    removals, tombstones = removals_of(remover, counts)
    remover.error = StoreUnavailable("the master is away")
    removals.add([b"key"], Why.REVOKED)
    await pass_time(100)
    assert b"key" in tombstones, "renewed with every try, past its own time"
    remover.error = None
    await pass_time(11)
    assert (counts.gone["revoked"], b"key" in tombstones) == (1, False)
    removals.add([b"key"], Why.REVOKED)
    await pass_time(1)
    assert counts.gone["revoked"] == 2, "one that comes later begins again"


@manual_time
async def test_bounded_no_more_than_so_many_keys_wait_for_their_removal() -> None:
    remover, counts = Remover(), Counts()
    removals, tombstones = removals_of(remover, counts, most=5000)
    removals.add([b"%d" % number for number in range(5001)], Why.CORRUPT)
    assert (len(removals), counts.given_up["corrupt"]) == (5000, 1)
    assert b"5000" in tombstones
    await pass_time(11)
    assert (counts.gone["corrupt"], len(removals)) == (5000, 0)


@manual_time
async def test_an_agent_that_ends_waits_for_what_is_revoked_and_for_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remover, counts = Remover(), Counts()
    removals, _ = removals_of(remover, counts)
    removals.add([b"corrupt"], Why.CORRUPT)
    await removals.close(deadline=asyncio.get_running_loop().time() + 11)
    assert remover.asked == []
    assert counts.given_up["corrupt"] == 1
    removals, _ = removals_of(remover, counts)
    removals.add([b"leased"], Why.REVOKED)
    closing = asyncio.ensure_future(removals.close(deadline=asyncio.get_running_loop().time() + 11))
    await pass_time(10)
    assert not closing.done()
    await pass_time(2)
    await closing
    assert counts.given_up["revoked"] == 1
    assert "other nodes may load" in caplog.text


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
