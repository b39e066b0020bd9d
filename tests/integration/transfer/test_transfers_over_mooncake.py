"""Transfers over a real master, real segments and real loader processes; every byte of the engines is compared."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

import pytest
import xxhash

from kvpool_agent.store.loader import MooncakeLoader
from kvpool_agent.store.mooncake_store import MooncakeStore
from kvpool_agent.store.protocol import ChunkStatus, PutItem
from kvpool_agent.transfer.types import FenceState, TransferResult
from kvpool_wire.keys import key_digest
from kvpool_wire.trailer import seal
from support.mooncake import Master
from support.processes import gone
from support.store_nodes import now, until
from support.transfers import FULL, WINDOW, Rig, content, failed_chunks

NewStore = Callable[..., Awaitable[MooncakeStore]]

TOKENS = 96
LEASE = 1.5
"""Seconds, more than the master's."""


async def save_all(rig: Rig) -> TransferResult:
    rig.compute(TOKENS)
    result = await rig.save(rig.save_job(TOKENS))
    assert result.failed == ()
    return result


def segment_pid(store: MooncakeStore) -> int:
    return store.health().pids["segment"]


async def loader_up(rig: Rig) -> int:
    """Wait for the session's loader; its pid."""
    assert isinstance(rig.loader, MooncakeLoader)
    assert await rig.loader.supervisor.wait_up(now() + 15)
    assert rig.loader.pid is not None
    return rig.loader.pid


def check_loaded(rig: Rig, result: TransferResult) -> dict[tuple[int, int], str]:
    """What is not reported holds its own bytes, and no other byte moved; what is reported."""
    failed = failed_chunks(result)
    good = [chunk for chunk in rig.loaded(rig.plan(TOKENS)) if chunk not in failed]
    assert result.good == len(good)
    rig.expect(good)
    rig.check_memory()
    return failed


@pytest.mark.parametrize("mode", ["mapped", "copy"])
async def test_what_one_node_saves_another_loads_byte_for_byte(mode: str, new_store: NewStore) -> None:
    one, other = await new_store(), await new_store()
    async with await Rig.make(on=one, mode=mode) as saver, await Rig.make(on=other, mode=mode) as loader:
        result = await save_all(saver)
        assert result.good == TOKENS // 16 + TOKENS // 8
        again = await saver.save(saver.save_job(TOKENS))
        assert (again.good, again.already_stored) == (0, result.good)
        loaded = await loader.load(loader.load_job(TOKENS))
        assert (check_loaded(loader, loaded), loaded.resume_length) == ({}, TOKENS)
        saver.check_memory()


async def test_a_chunk_evicted_between_lookup_and_load_is_reported_evicted(
    new_store: NewStore, pool_master: Master
) -> None:
    one = await new_store()
    async with await Rig.make(on=one) as rig:
        await save_all(rig)
        key = rig.key(WINDOW, 11)
        async with asyncio.timeout(10):
            while await rig.loader.remove([key], deadline=now() + 2) == [ChunkStatus.LEASED]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # a lease has no event
        assert {key.decode()} & pool_master.keys() == set()
        result = await rig.load(rig.load_job(TOKENS))
        assert check_loaded(rig, result) == {(WINDOW, 11): "EVICTED"}


async def test_two_intact_chunks_swapped_under_each_others_keys_are_both_corrupt_and_removed(
    new_store: NewStore, pool_master: Master
) -> None:
    one = await new_store()
    async with await Rig.make(on=one, lease_seconds=LEASE) as rig:
        swapped = {(FULL, 1): (FULL, 4), (FULL, 4): (FULL, 1)}
        offsets = await rig.ring.take(2, deadline=now() + 5)
        puts = []
        for offset, (under, bytes_of) in zip(offsets, swapped.items(), strict=True):
            whole = rig.sealed(*bytes_of)
            rig.ring.view(offset, len(whole))[:] = whole
            puts.append(PutItem(rig.key(*under), offset, len(whole)))
        assert await rig.loader.put(puts, deadline=now() + 5) == [ChunkStatus.OK] * 2
        rig.ring.free(offsets)
        rig.compute(TOKENS)
        assert (await rig.save(rig.save_job(TOKENS))).already_stored == 2
        result = await rig.load(rig.load_job(TOKENS, request="reader"))
        assert failed_chunks(result) == {(FULL, 1): "CORRUPT", (FULL, 4): "CORRUPT"}
        rig.check_memory()
        # Once their lease has lapsed both are gone from the store, and only they.
        keys = {rig.key(FULL, 1).decode(), rig.key(FULL, 4).decode()}
        await until(lambda: not keys & pool_master.keys(), 10, "corrupt keys removed")
        assert {rig.key(FULL, 2).decode()} <= pool_master.keys()


async def test_a_chunk_of_another_layout_or_length_is_corrupt_tombstoned_and_removed(
    new_store: NewStore, pool_master: Master
) -> None:
    one = await new_store()
    async with await Rig.make(on=one, lease_seconds=LEASE) as rig:
        key = rig.key(FULL, 0)
        foreign = bytearray(content(FULL, 0) + bytes(64))
        seal(
            memoryview(foreign),
            layout=b"another layout..",
            key=key_digest(key),
            checksum=xxhash.xxh3_64_intdigest,
        )
        objects = {
            key: bytes(foreign),
            rig.key(FULL, 3): rig.sealed(FULL, 3)[:200],
            rig.key(WINDOW, 11): rig.sealed(WINDOW, 11) + b"x",
        }
        offsets = await rig.ring.take(len(objects), deadline=now() + 5)
        puts = []
        for offset, (name, whole) in zip(offsets, objects.items(), strict=True):
            rig.ring.view(offset, len(whole))[:] = whole
            puts.append(PutItem(name, offset, len(whole)))
        assert await rig.loader.put(puts, deadline=now() + 5) == [ChunkStatus.OK] * len(objects)
        rig.ring.free(offsets)
        rig.compute(TOKENS)
        await rig.save(rig.save_job(TOKENS))
        result = await rig.load(rig.load_job(TOKENS))
        assert failed_chunks(result) == dict.fromkeys([(FULL, 0), (FULL, 3), (WINDOW, 11)], "CORRUPT")
        rig.check_memory()
        assert all(name in rig.tombstones for name in objects)
        names = {name.decode() for name in objects}
        await until(lambda: not names & pool_master.keys(), 10, "corrupt keys removed")


@pytest.mark.parametrize("mode", ["mapped", "copy"])
async def test_the_owner_dies_between_lookup_and_load(mode: str, new_store: NewStore) -> None:
    one, other = await new_store(), await new_store(segment=0)
    async with await Rig.make(on=one) as saver, await Rig.make(on=other, mode=mode) as loader:
        await save_all(saver)
        os.kill(segment_pid(one), signal.SIGKILL)
        begun = now()
        result = await loader.load(loader.load_job(TOKENS, seconds=5))
        assert now() - begun < 6
        failed = check_loaded(loader, result)
        assert set(failed) == set(loader.loaded(loader.plan(TOKENS)))
        assert set(failed.values()) <= {"PEER_UNREACHABLE", "EVICTED", "TIMED_OUT", "INTERNAL"}
        assert result.resume_length == 0


async def test_bounded_a_frozen_owner_costs_the_deadline_and_writes_nothing_when_it_wakes(
    new_store: NewStore,
) -> None:
    one, other = await new_store(), await new_store(segment=0)
    async with await Rig.make(on=one) as saver, await Rig.make(on=other) as loader:
        await save_all(saver)
        owner = segment_pid(one)
        os.kill(owner, signal.SIGSTOP)
        try:
            begun = now()
            result = await loader.load(loader.load_job(TOKENS, seconds=2))
            assert 1.9 < now() - begun < 2.5
            failed = check_loaded(loader, result)
            assert set(failed) == set(loader.loaded(loader.plan(TOKENS)))
            release = await loader.manager.release(transfer=result.transfer, deadline=now())
            assert release.state is FenceState.FENCED
        finally:
            os.kill(owner, signal.SIGCONT)
        # The blocks are the engine's again, and stay so while the owner wakes.
        loader.compute(TOKENS, prompt="other")
        other_result = await loader.load(loader.load_job(TOKENS, first_block=15))
        assert failed_chunks(other_result) == {}
        loader.expect(loader.loaded(loader.plan(TOKENS)), first_block=15)
        loader.check_memory()
        assert loader.ring.free_slots + loader.ring.quarantined_slots == loader.ring.slots


@pytest.mark.parametrize("after", [0.0, 0.001, 0.003, 0.01])
async def test_the_loader_is_killed_in_mid_load(after: float, new_store: NewStore) -> None:
    one, other = await new_store(), await new_store(segment=0)
    async with await Rig.make(on=one) as saver, await Rig.make(on=other) as loader:
        await save_all(saver)
        pid = await loader_up(loader)
        transfer, _ = loader.manager.start_load(loader.load_job(TOKENS))
        asyncio.get_running_loop().call_later(after, os.kill, pid, signal.SIGKILL)
        check_loaded(loader, await loader.result(transfer))
        await until(lambda: gone(pid), 5, "the loader reaped")
        await loader_up(loader)
        # Replacing it loses no key: everything loads afterwards.
        assert check_loaded(loader, await loader.load(loader.load_job(TOKENS))) == {}


async def test_fenced_a_session_ends_in_mid_transfer_whatever_its_peer_does(new_store: NewStore) -> None:
    one, other = await new_store(), await new_store(segment=0)
    async with await Rig.make(on=one) as saver:
        await save_all(saver)
        loader = await Rig.make(on=other)
        pid = await loader_up(loader)
        os.kill(segment_pid(one), signal.SIGSTOP)
        try:
            transfer, _ = loader.manager.start_load(loader.load_job(TOKENS, seconds=60))
            await until(lambda: loader.ring.free_slots < loader.ring.slots, 10, "a get under way")
            begun = now()
            await loader.manager.close()
            assert now() - begun < 1.0
        finally:
            os.kill(segment_pid(one), signal.SIGCONT)
        assert gone(pid)
        assert set(failed_chunks(loader.results[transfer]).values()) == {"CANCELLED"}
        loader.check_memory()
        loader.ring_memory.close()
        loader.engine.close()


async def test_without_a_master_loads_and_saves_are_reported_within_their_deadlines(
    new_store: NewStore, pool_master: Master
) -> None:
    one = await new_store()
    async with await Rig.make(on=one) as rig:
        await save_all(rig)
        pool_master.kill()
        begun = now()
        result = await rig.load(rig.load_job(TOKENS, seconds=4))
        assert now() - begun < 5
        assert set(failed_chunks(result)) == set(rig.loaded(rig.plan(TOKENS)))
        save = await rig.save(rig.save_job(TOKENS, first_block=15, seconds=4, request="s"))
        assert now() - begun < 10
        assert len(save.failed) == TOKENS // 16 + TOKENS // 8
        rig.check_memory()


async def test_no_save_after_failure_what_was_confirmed_is_taken_back_when_its_lease_has_lapsed(
    new_store: NewStore, pool_master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save's own question takes a lease, and Mooncake removes nothing that is leased."""
    one, other = await new_store(), await new_store(segment=0)
    async with await Rig.make(on=one, lease_seconds=LEASE) as rig:
        rig.compute(TOKENS, first_block=13)
        real_put, second, let_on, puts = rig.loader.put, asyncio.Event(), asyncio.Event(), 0

        async def put(items: Sequence[PutItem], *, deadline: float) -> list[ChunkStatus]:
            nonlocal puts
            puts += 1
            if puts == 2:
                second.set()
                await let_on.wait()
            return await real_put(items, deadline=deadline)

        monkeypatch.setattr(rig.loader, "put", put)
        start = rig.manager.start_save(rig.save_job(TOKENS, first_block=13))
        async with asyncio.timeout(10):
            await second.wait()
        mine = [
            rig.key(group, chunk)
            for group, size in ((FULL, 16), (WINDOW, 8))
            for chunk in range(TOKENS // size)
        ]
        names = {key.decode() for key in mine}
        assert names & pool_master.keys(), "the first batch is there, and leased"
        assert (await rig.load(rig.load_job(TOKENS, prompt="q"))).failed, (
            "nothing is stored under that prompt"
        )
        assert "CANCELLED" in failed_chunks(await rig.result(start.transfer)).values()
        let_on.set()
        await rig.manager.close()  # the engine goes away at once
        await until(lambda: not names & pool_master.keys(), 10, "poison taken back")
        found = await other.prober.exists_keys(mine, deadline=now() + 3)
        assert set(found) == {ChunkStatus.ABSENT}
