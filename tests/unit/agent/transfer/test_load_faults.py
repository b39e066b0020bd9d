"""LOADED_OR_REPORTED: each way in which a load can go wrong, with every byte of the engine's memory compared."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvpool_agent.store.errors import FenceUnconfirmed, StoreRefused
from kvpool_agent.store.faults import Fault, FaultKind
from kvpool_agent.store.protocol import ChunkStatus, GetItem
from kvpool_agent.transfer.types import FailReason, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import GroupLayout
from support.manual_loop import advance, manual_time, turns, until
from support.transfers import FULL, WINDOW, Rig, failed_chunks

TOKENS = 96
VICTIM = (FULL, 2)


def check(rig: Rig, result: TransferResult, expected: dict[tuple[int, int], str]) -> None:
    """Exactly `expected` failed, all else landed, no other byte moved, no slot is lost."""
    assert failed_chunks(result) == expected
    plan = rig.plan(TOKENS)
    good = [chunk for chunk in rig.loaded(plan) if chunk not in expected]
    assert result.good == len(good)
    rig.expect(good)
    rig.check_memory()
    assert rig.ring.free_slots + rig.ring.quarantined_slots == rig.ring.slots
    assert result.resume_length == (TOKENS if not expected else expected_resume(rig, expected))


def expected_resume(rig: Rig, failed: dict[tuple[int, int], str]) -> int:
    plan = rig.plan(TOKENS)
    arrived = [group.mask.copy() for group in plan.groups]
    for group, chunk in failed:
        arrived[group][chunk] = False
    return rig.coordinator.resume_length(plan, arrived)


@pytest.mark.parametrize("mode", ["mapped", "copy"])
@manual_time
async def test_a_load_fills_its_blocks_and_touches_nothing_else(mode: str) -> None:
    async with await Rig.make(mode=mode) as rig:
        rig.stock(TOKENS)
        job = rig.load_job(TOKENS)
        result = await rig.load(job)

        chunks = rig.loaded(job.plan)
        assert 0 < len(chunks) < TOKENS // 16 + TOKENS // 8, "the window masks chunks off"
        check(rig, result, {})
        assert rig.ring.free_slots == rig.ring.slots
        assert rig.manager.in_flight == 0
        assert [(one["ok"], one["failed"]) for one in rig.metrics.loads] == [(len(chunks), 0)]
        assert result.bytes == rig.metrics.loads[0]["bytes"] == 6 * 384 + 2 * 128


@manual_time
async def test_chunks_that_end_at_or_before_the_start_are_not_loaded() -> None:
    async with await Rig.make(window=40) as rig:
        rig.stock(TOKENS)
        job = rig.load_job(TOKENS, start=64)
        result = await rig.load(job)

        chunks = [(FULL, 4), (FULL, 5), (WINDOW, 8), (WINDOW, 9), (WINDOW, 10), (WINDOW, 11)]
        assert (result.good, result.failed, result.resume_length) == (len(chunks), (), TOKENS)
        rig.expect(chunks, start=64)
        rig.check_memory()


@manual_time
async def test_a_load_with_nothing_to_do_is_reported_once_after_the_call() -> None:
    async with await Rig.make() as rig:
        transfer, chunks = rig.manager.start_load(rig.load_job(TOKENS, start=TOKENS))
        assert (chunks, rig.reported) == (0, [])
        result = await rig.result(transfer)
        assert (result.good, result.failed, result.resume_length) == (0, (), TOKENS)
        assert rig.store.calls == []
        rig.check_memory()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ChunkStatus.ABSENT, "EVICTED"),
        (ChunkStatus.NOT_READY, "EVICTED"),
        (ChunkStatus.LEASE_EXPIRED, "EVICTED"),
        (ChunkStatus.CORRUPT, "CORRUPT"),
        (ChunkStatus.BAD_SIZE, "CORRUPT"),
        (ChunkStatus.PEER_FAILED, "PEER_UNREACHABLE"),
        (ChunkStatus.INVALID, "INTERNAL"),
        (ChunkStatus.INTERNAL, "INTERNAL"),
        (ChunkStatus.NOT_ATTEMPTED, "INTERNAL"),
        (ChunkStatus.WORKER_DIED, "INTERNAL"),
        (ChunkStatus.DEADLINE, "TIMED_OUT"),
    ],
)
@manual_time
async def test_each_status_of_a_chunk_has_its_reason(status: ChunkStatus, reason: str) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        rig.store.inject(Fault(FaultKind.STATUS, keys=frozenset({rig.key(*VICTIM)}), status=status))
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, {VICTIM: reason})
        assert (rig.key(*VICTIM) in rig.tombstones) == (reason == "CORRUPT")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultKind.CORRUPT, "CORRUPT"),
        (FaultKind.WRONG_SIZE, "CORRUPT"),
        (FaultKind.FOREIGN, "CORRUPT"),
        (FaultKind.TORN, "PEER_UNREACHABLE"),
    ],
)
@pytest.mark.parametrize("mode", ["mapped", "copy"])
@manual_time
async def test_wrong_bytes_never_reach_a_block(kind: FaultKind, reason: str, mode: str) -> None:
    async with await Rig.make(mode=mode) as rig:
        rig.stock(TOKENS)
        keys = frozenset({rig.key(*VICTIM)})
        rig.store.inject(Fault(kind, keys=keys, other_key=rig.key(FULL, 4)))
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, {VICTIM: reason})


@manual_time
async def test_two_intact_chunks_swapped_under_each_others_keys_are_both_corrupt() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        objects, one, other = rig.store.cluster.objects, rig.key(FULL, 1), rig.key(FULL, 4)
        objects[one], objects[other] = objects[other], objects[one]
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, {(FULL, 1): "CORRUPT", (FULL, 4): "CORRUPT"})
        assert one in rig.tombstones
        assert other in rig.tombstones
        assert rig.metrics.loads[0]["corrupt"] == 2


@pytest.mark.parametrize("size", [1, 63, 64, 383, 447])
@manual_time
async def test_a_shortened_object_is_corrupt(size: int) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        key = rig.key(*VICTIM)
        rig.store.cluster.objects[key] = rig.store.cluster.objects[key][:size]
        check(rig, await rig.load(rig.load_job(TOKENS)), {VICTIM: "CORRUPT"})


@manual_time
async def test_a_longer_object_is_corrupt_and_a_miss_from_then_on() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        key = rig.key(*VICTIM)
        rig.store.cluster.objects[key] += b"x"
        check(rig, await rig.load(rig.load_job(TOKENS)), {VICTIM: "CORRUPT"})
        assert key in rig.tombstones
        advance(10.0)
        await turns()
        assert key not in rig.store.cluster.objects, "so that it can be saved again"


@pytest.mark.parametrize("at", [0, 383, 384, 388, 390, 392, 408, 424, 432, 440, 447])
@manual_time
async def test_one_flipped_bit_anywhere_is_corrupt(at: int) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        whole = bytearray(rig.store.cluster.objects[rig.key(*VICTIM)])
        whole[at] ^= 1
        rig.store.cluster.objects[rig.key(*VICTIM)] = bytes(whole)
        check(rig, await rig.load(rig.load_job(TOKENS)), {VICTIM: "CORRUPT"})


@manual_time
async def test_a_corrupt_key_is_logged_once_and_removed_when_its_lease_has_lapsed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        key = rig.key(*VICTIM)
        rig.store.cluster.objects[key] = bytes(len(rig.store.cluster.objects[key]))
        with caplog.at_level(logging.ERROR):
            await rig.load(rig.load_job(TOKENS))
            await rig.load(rig.load_job(TOKENS, first_block=8))
        assert [record.message for record in caplog.records if key.decode() in record.message] == [
            f"corrupt: {key.decode()}: no trailer where one should be; it is a miss from now on"
        ]
        assert key in rig.store.cluster.objects
        advance(10.0)
        await turns()
        assert key not in rig.store.cluster.objects
        assert key in rig.tombstones, "until the tombstone lapses as well"


@manual_time
async def test_an_eviction_in_one_group_fails_that_group_and_all_resume_at_one_length() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        del rig.store.cluster.objects[rig.key(WINDOW, 11)]
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, {(WINDOW, 11): "EVICTED"})
        assert rig.metrics.loads == [
            {"mode": "mapped", "bytes": 6 * 384 + 128, "ok": 7, "failed": 0, "corrupt": 0, "evicted": 1}
        ]


@manual_time
async def test_what_is_local_counts_for_the_resume() -> None:
    async with await Rig.make(window=16) as rig:
        rig.stock(TOKENS)
        del rig.store.cluster.objects[rig.key(FULL, 5)]
        # The engine has 80 tokens; of the window only chunks 10 and 11 are missing.
        result = await rig.load(rig.load_job(TOKENS, start=80))
        assert failed_chunks(result) == {(FULL, 5): "EVICTED"}
        assert result.resume_length == 80


@manual_time
async def test_without_a_master_the_rest_of_a_load_is_not_tried() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        rig.store.inject(Fault(FaultKind.UNAVAILABLE))
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "MASTER_UNREACHABLE"))
        assert len(rig.store.calls) == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), StoreRefused("no", code=-1)])
@manual_time
async def test_a_whole_call_that_raises_leaves_no_chunk_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        right = rig.loader.get
        calls = 0

        async def get(items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise error
            return await right(items, deadline=deadline)

        monkeypatch.setattr(rig.loader, "get", get)
        result = await rig.load(rig.load_job(TOKENS))
        rows = rig.loaded(rig.plan(TOKENS))
        lost = rows[3:6] if isinstance(error, StoreRefused) else rows[3:]
        check(rig, result, dict.fromkeys(lost, "INTERNAL"))
        # It is not known whether that call still writes: its slots are kept back.
        assert rig.ring.quarantined_slots == 3


@manual_time
async def test_a_loader_that_answers_too_few_chunks_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)

        async def get(items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
            return [ChunkStatus.OK] * (len(items) - 1)

        monkeypatch.setattr(rig.loader, "get", get)
        result = await rig.load(rig.load_job(TOKENS))
        check(rig, result, dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "INTERNAL"))


@manual_time
async def test_a_ring_whose_writer_could_not_be_reaped_is_never_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)

        async def get(items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
            raise FenceUnconfirmed("pid 7 is stuck", pid=7)

        monkeypatch.setattr(rig.loader, "get", get)
        expected = dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "INTERNAL")
        assert failed_chunks(await rig.load(rig.load_job(TOKENS))) == expected
        monkeypatch.undo()
        assert failed_chunks(await rig.load(rig.load_job(TOKENS))) == expected
        assert [call.operation for call in rig.store.calls] == []
        rig.check_memory()


@manual_time
async def test_bounded_what_has_not_landed_by_the_deadline_is_timed_out_at_once() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        rows = rig.loaded(rig.plan(TOKENS))
        hang = rig.store.inject(
            Fault(FaultKind.HANG, keys=frozenset({rig.key(*rows[4])}), event=asyncio.Event())
        )
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS, seconds=5.0))
        await hang.struck.wait()
        await until(lambda: rig.ring.free_slots == rig.ring.slots - 3)  # the first batch has landed
        advance(4.9)
        await turns()
        assert rig.reported == []
        advance(0.2)
        check(rig, await rig.result(transfer), dict.fromkeys(rows[3:], "TIMED_OUT"))


@manual_time
async def test_a_late_write_into_the_ring_reaches_no_block_and_no_later_load() -> None:
    async with await Rig.make(ring_chunks=8) as rig:
        rig.stock(TOKENS)
        late = asyncio.Event()
        fault = rig.store.inject(Fault(FaultKind.LATE_WRITE, times=1, event=late))
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS, seconds=5.0))
        await fault.struck.wait()
        advance(5.1)
        check(rig, await rig.result(transfer), dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "TIMED_OUT"))
        late.set()
        await turns()
        rig.check_memory()
        check(rig, await rig.load(rig.load_job(TOKENS)), {})


@manual_time
async def test_a_loader_that_dies_fails_its_batch_alone() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        rows = rig.loaded(rig.plan(TOKENS))
        rig.store.inject(Fault(FaultKind.DIE, keys=frozenset({rig.key(*rows[4])}), times=1))
        check(rig, await rig.load(rig.load_job(TOKENS)), dict.fromkeys(rows[3:6], "INTERNAL"))
        assert rig.ring.free_slots == rig.ring.slots, "its process is gone, so the slots are quiet"


@manual_time
async def test_slots_of_failed_gets_stay_back_until_the_loader_is_replaced_between_two_batches() -> None:
    async with await Rig.make(ring_chunks=8) as rig:
        rig.stock(TOKENS)
        before = rig.loader.generation
        rows = rig.loaded(rig.plan(TOKENS))
        keys = frozenset(rig.key(*row) for row in rows[:3])
        rig.store.inject(Fault(FaultKind.STATUS, keys=keys, status=ChunkStatus.PEER_FAILED))
        check(rig, await rig.load(rig.load_job(TOKENS)), dict.fromkeys(rows[:3], "PEER_UNREACHABLE"))
        await turns()
        assert rig.loader.generation > before
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_a_proof_of_order_that_cannot_be_used_touches_nothing() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        job = replace(rig.load_job(TOKENS), ordering=pb.Ordering(cuda_event=b"x" * 64))
        result = await rig.load(job)
        check(rig, result, dict.fromkeys(rig.loaded(job.plan), "ENGINE_FAILED"))
        assert rig.store.calls == []


@manual_time
async def test_other_ranks_shards_are_neither_loaded_nor_reported() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        job = rig.load_job(TOKENS)
        # As a pipeline stage without a layer of the window group.
        absent = GroupLayout(None, 0, b"", 0, -1, ())
        object.__setattr__(rig.layout, "groups", (rig.layout.groups[FULL], absent))
        transfer, chunks = rig.manager.start_load(job)
        result = await rig.result(transfer)
        assert (chunks, result.good, result.resume_length) == (6, 6, TOKENS)
        rig.expect([chunk for chunk in rig.loaded(job.plan) if chunk[0] == FULL])
        rig.check_memory()


def test_the_reasons_are_those_of_the_wire() -> None:
    wire = {name: number for name, number in pb.FailureReason.items() if number}
    assert {reason.name: reason.value for reason in FailReason} == wire
    assert np.iinfo(np.int16).max > max(wire.values())
