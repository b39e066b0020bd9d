"""Saves: what is stored is exactly what the engine computed, whole, under its own key, or is reported."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvpool_agent.store.errors import StoreRefused
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.memory import MemoryCluster
from kvpool_agent.store.protocol import ChunkStatus, PutItem
from kvpool_agent.transfer.errors import BlocksBusy
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import advance, manual_time, turns
from support.transfers import FULL, NULL, WINDOW, Rig, failed_chunks, ids

TOKENS = 96


def everything(rig: Rig, tokens: int = TOKENS, start: int = 0) -> list[tuple[int, int]]:
    """(group, chunk) that a save of these tokens stores, in the order in which it does."""
    masks = rig.coordinator.store_mask(tokens, start=start)
    found = []
    for group, size in ((FULL, 16), (WINDOW, 8)):
        mask, first = masks[group], -(-start // size)
        worth = range(tokens // size - first) if mask is None else np.flatnonzero(mask)
        found += [(group, first + int(chunk)) for chunk in worth]
    return found


def stored(rig: Rig, chunks: Sequence[tuple[int, int]], *, prompt: str = "p") -> dict[bytes, bytes]:
    return {rig.key(*chunk, prompt=prompt): rig.sealed(*chunk, prompt=prompt) for chunk in chunks}


@pytest.mark.parametrize("mode", ["mapped", "copy"])
@manual_time
async def test_a_save_stores_each_chunk_sealed_under_its_own_key_and_changes_no_block(mode: str) -> None:
    async with await Rig.make(mode=mode) as rig:
        rig.compute(TOKENS)
        result = await rig.save(rig.save_job(TOKENS))
        chunks = everything(rig)
        assert (result.good, result.already_stored, result.failed, result.resume_length) == (
            len(chunks),
            0,
            (),
            0,
        )
        assert result.bytes == sum(384 if group == FULL else 128 for group, _ in chunks)
        assert rig.store.cluster.objects == stored(rig, chunks)
        rig.check_memory()
        assert rig.ring.free_slots == rig.ring.slots
        assert rig.metrics.saves == [
            {"mode": mode, "saved": len(chunks), "already": 0, "failed": 0, "displaced": 0}
        ]


@manual_time
async def test_what_one_session_saved_another_loads_byte_for_byte() -> None:
    cluster = MemoryCluster()
    async with (
        await Rig.make(cluster=cluster) as saver,
        await Rig.make(cluster=cluster, mode="copy") as loader,
    ):
        saver.compute(TOKENS)
        await saver.save(saver.save_job(TOKENS))
        result = await loader.load(loader.load_job(TOKENS, first_block=9))
        assert (result.failed, result.resume_length) == ((), TOKENS)
        loader.expect(loader.loaded(loader.plan(TOKENS)), first_block=9)
        loader.check_memory()


@manual_time
async def test_the_window_saves_only_what_a_hit_can_use() -> None:
    async with await Rig.make(window=8) as rig:
        rig.compute(TOKENS)
        await rig.save(rig.save_job(TOKENS))
        window = [chunk for group, chunk in everything(rig) if group == WINDOW]
        assert window == [1, 3, 5, 7, 9, 11]
        assert rig.store.cluster.objects == stored(rig, everything(rig))


@manual_time
async def test_a_save_begins_at_the_first_whole_chunk_past_its_start() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        job = rig.save_job(
            88, start=40, blocks=[b + s for b, s in zip(ids(88, start=40), (2, 5), strict=True)]
        )
        result = await rig.save(job)
        chunks = [(FULL, 3), (FULL, 4), *((WINDOW, chunk) for chunk in range(5, 11))]
        assert everything(rig, 88, 40) == chunks
        assert result.good == len(chunks)
        assert rig.store.cluster.objects == stored(rig, chunks)


@manual_time
async def test_null_blocks_hold_nothing_and_are_skipped() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        blocks = ids(TOKENS)
        blocks[WINDOW][:6] = NULL
        result = await rig.save(rig.save_job(TOKENS, blocks=blocks))
        chunks = [chunk for chunk in everything(rig) if chunk not in [(WINDOW, at) for at in range(6)]]
        assert (result.good, result.failed) == (len(chunks), ())
        assert rig.store.cluster.objects == stored(rig, chunks)


@manual_time
async def test_what_is_stored_already_is_neither_read_nor_put_again() -> None:
    async with await Rig.make() as rig:
        rig.stock(48)
        rig.compute(TOKENS)
        result = await rig.save(rig.save_job(TOKENS))
        chunks = everything(rig)
        assert result.already_stored == 3 + 6
        assert result.good == len(chunks) - 9
        put = [key for call in rig.store.calls if call.operation is Operation.PUT for key in call.keys]
        assert sorted(put) == sorted(
            set(stored(rig, chunks)) - {rig.key(*c) for c in chunks[:3] + chunks[6:12]}
        )


@manual_time
async def test_two_saves_may_read_the_same_blocks_but_no_load_may_write_them() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        rig.store.inject(Fault(FaultKind.HANG, Operation.EXISTS, times=1, event=(let_on := asyncio.Event())))
        one = rig.manager.start_save(rig.save_job(TOKENS))
        two = rig.manager.start_save(rig.save_job(TOKENS))
        with pytest.raises(BlocksBusy, match="save 1 of request 'r'"):
            rig.manager.start_load(rig.load_job(TOKENS))
        let_on.set()
        results = [await rig.result(one.transfer), await rig.result(two.transfer)]
        assert sum(result.good for result in results) >= len(everything(rig))
        assert all(result.failed == () for result in results)
        rig.check_memory()
        await rig.load(rig.load_job(TOKENS))
        rig.check_memory()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ChunkStatus.PEER_FAILED, "PEER_UNREACHABLE"),
        (ChunkStatus.NOT_READY, "HELD_BACK"),
        (ChunkStatus.INVALID, "INTERNAL"),
        (ChunkStatus.DEADLINE, "TIMED_OUT"),
        (ChunkStatus.WORKER_DIED, "INTERNAL"),
    ],
)
@manual_time
async def test_each_status_of_a_put_has_its_reason(status: ChunkStatus, reason: str) -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        keys = frozenset({rig.key(FULL, 1)})
        rig.store.inject(Fault(FaultKind.STATUS, Operation.PUT, keys=keys, status=status))
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == {(FULL, 1): reason}
        assert rig.store.cluster.objects == stored(rig, [one for one in everything(rig) if one != (FULL, 1)])


@pytest.mark.parametrize(
    ("status", "reason"),
    [(ChunkStatus.FULL, "STORE_FULL"), (ChunkStatus.MASTER_FAILED, "MASTER_UNREACHABLE")],
)
@manual_time
async def test_a_store_that_cannot_take_it_is_not_pressed_further(status: ChunkStatus, reason: str) -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        chunks = everything(rig)
        keys = frozenset({rig.key(*chunks[4])})
        rig.store.inject(Fault(FaultKind.STATUS, Operation.PUT, keys=keys, status=status))
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == dict.fromkeys([chunks[4], *chunks[6:]], reason)
        assert rig.store.cluster.objects == stored(rig, [*chunks[:4], chunks[5]])
        assert rig.ring.free_slots + rig.ring.quarantined_slots == rig.ring.slots


@manual_time
async def test_what_is_gone_at_once_is_displaced() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        rig.store.inject(Fault(FaultKind.DISPLACED, Operation.PUT, keys=frozenset({rig.key(WINDOW, 2)})))
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == {(WINDOW, 2): "DISPLACED"}
        assert rig.metrics.saves[0]["displaced"] == 1


@manual_time
async def test_after_a_loaders_death_its_puts_are_held_back() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        chunks = everything(rig)
        rig.store.inject(Fault(FaultKind.DIE, Operation.PUT, times=1))
        first = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(first) == dict.fromkeys(chunks[:3], "INTERNAL")
        second = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(second) == dict.fromkeys(chunks[:3], "HELD_BACK")
        advance(31.0)
        third = await rig.save(rig.save_job(TOKENS))
        assert (third.good, third.failed) == (3, ())
        assert rig.store.cluster.objects == stored(rig, chunks)


@manual_time
async def test_a_tombstoned_key_is_not_saved_again() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        rig.tombstones.add([rig.key(FULL, 0)])
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == {(FULL, 0): "CORRUPT"}
        assert rig.key(FULL, 0) not in rig.store.cluster.objects


@pytest.mark.parametrize("kind", [FaultKind.UNAVAILABLE, FaultKind.HANG])
@manual_time
async def test_a_master_that_does_not_answer_ends_a_save_within_its_deadline(kind: FaultKind) -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        fault = rig.store.inject(Fault(kind, Operation.EXISTS))
        start = rig.manager.start_save(rig.save_job(TOKENS, seconds=5))
        await fault.struck.wait()
        if kind is FaultKind.HANG:
            advance(5.1)
        result = await rig.result(start.transfer)
        reason = "TIMED_OUT" if kind is FaultKind.HANG else "MASTER_UNREACHABLE"
        assert failed_chunks(result) == dict.fromkeys(everything(rig), reason)
        assert rig.store.cluster.objects == {}


@manual_time
async def test_whole_or_absent_a_put_that_overruns_the_deadline_is_reported_at_once() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        chunks = everything(rig)
        fault = rig.store.inject(
            Fault(FaultKind.HANG, Operation.PUT, keys=frozenset({rig.key(*chunks[3])}), event=asyncio.Event())
        )
        start = rig.manager.start_save(rig.save_job(TOKENS, seconds=5))
        await fault.struck.wait()
        advance(5.1)
        result = await rig.result(start.transfer)
        assert failed_chunks(result) == dict.fromkeys(chunks[3:], "TIMED_OUT")
        assert rig.store.cluster.objects == stored(rig, chunks[:3])
        await turns()
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_whole_or_absent_a_released_save_puts_no_further_batch() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        chunks = everything(rig)
        let_on = asyncio.Event()
        fault = rig.store.inject(Fault(FaultKind.HANG, Operation.PUT, times=1, event=let_on))
        start = rig.manager.start_save(rig.save_job(TOKENS))
        await fault.struck.wait()
        await rig.manager.release(request_id="r", deadline=asyncio.get_running_loop().time())
        assert set(failed_chunks(await rig.result(start.transfer)).values()) == {"CANCELLED"}
        let_on.set()
        await turns()
        # The put that was under way ends whole; nothing after it was begun.
        assert rig.store.cluster.objects == stored(rig, chunks[:3])
        assert rig.ring.free_slots == rig.ring.slots
        assert rig.metrics.late == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), StoreRefused("no", code=-1)])
@manual_time
async def test_a_put_that_raises_leaves_no_chunk_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)

        async def put(items: Sequence[PutItem], *, deadline: float) -> list[ChunkStatus]:
            raise error

        monkeypatch.setattr(rig.loader, "put", put)
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == dict.fromkeys(everything(rig), "INTERNAL")
        await turns()
        assert rig.ring.free_slots + rig.ring.quarantined_slots == rig.ring.slots
        assert rig.store.cluster.objects == {}


@manual_time
async def test_a_proof_of_order_that_cannot_be_used_stores_nothing() -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        job = replace(rig.save_job(TOKENS), ordering=pb.Ordering(cuda_event=b"x" * 64))
        assert failed_chunks(await rig.save(job)) == dict.fromkeys(everything(rig), "ENGINE_FAILED")
        assert rig.store.cluster.objects == {}


@manual_time
async def test_a_save_with_nothing_worth_saving_says_so_and_sends_no_result() -> None:
    async with await Rig.make() as rig:
        start = rig.manager.start_save(rig.save_job(7, blocks=ids(7)))
        assert (start.transfer, start.chunks, start.skipped) == (0, 0, "")
        start = rig.manager.start_save(rig.save_job(TOKENS, start=TOKENS))
        assert (start.transfer, start.chunks, start.skipped) == (0, 0, "")
        await turns()
        assert rig.manager.in_flight == 0
        assert rig.reported == []
