"""NO_SAVE_AFTER_FAILURE, for saves before, during and after the load that fails."""

import asyncio
import logging

import pytest

from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.protocol import ChunkStatus
from support.manual_loop import manual_time, turns, until
from support.transfers import FULL, WINDOW, Rig, failed_chunks

TOKENS = 96


async def failed_load(rig: Rig, chunk: tuple[int, int] = (FULL, 3), *, request: str = "r") -> int:
    """A load of the request of which one chunk is evicted; its id."""
    rig.stock(TOKENS, prompt="q")
    del rig.store.cluster.objects[rig.key(*chunk, prompt="q")]
    result = await rig.load(rig.load_job(TOKENS, prompt="q", request=request))
    assert failed_chunks(result) == {chunk: "EVICTED"}
    for group, size in ((FULL, 16), (WINDOW, 8)):
        for index in range(TOKENS // size):
            rig.store.cluster.objects.pop(rig.key(group, index, prompt="q"), None)
    return result.transfer


def stored(rig: Rig, *, prompt: str = "q") -> set[tuple[int, int]]:
    return {
        (group, chunk)
        for group, size in ((FULL, 16), (WINDOW, 8))
        for chunk in range(TOKENS // size)
        if rig.key(group, chunk, prompt=prompt) in rig.store.cluster.objects
    }


@manual_time
async def test_no_save_after_failure_nothing_at_or_past_the_failed_chunk_is_saved() -> None:
    async with await Rig.make() as rig:
        transfer = await failed_load(rig)
        start = rig.manager.start_save(rig.save_job(TOKENS, prompt="q"))
        assert f"load {transfer} failed at token 48" in start.skipped
        await rig.result(start.transfer)
        below = {(FULL, chunk) for chunk in range(3)} | {(WINDOW, chunk) for chunk in range(6)}
        assert stored(rig) == below
        assert start.chunks == len(below)


@manual_time
async def test_no_save_after_failure_it_is_lifted_by_the_word_that_it_was_recomputed() -> None:
    async with await Rig.make() as rig:
        transfer = await failed_load(rig)
        refused = rig.manager.start_save(
            rig.save_job(TOKENS, start=48, prompt="q", recomputed_after=transfer - 1)
        )
        assert (refused.transfer, refused.chunks) == (0, 0)
        allowed = rig.manager.start_save(
            rig.save_job(TOKENS, start=48, prompt="q", recomputed_after=transfer)
        )
        assert (await rig.result(allowed.transfer)).good == 3 + 6


@manual_time
async def test_no_save_after_failure_other_requests_are_not_concerned() -> None:
    async with await Rig.make() as rig:
        await failed_load(rig)
        start = rig.manager.start_save(rig.save_job(TOKENS, prompt="q", request="another"))
        assert (start.skipped, (await rig.result(start.transfer)).failed) == ("", ())


@manual_time
async def test_no_save_after_failure_a_cancelled_or_late_load_forbids_as_well() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        fault = rig.store.inject(Fault(FaultKind.HANG, times=1))
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
        await fault.struck.wait()
        await rig.manager.release(transfer=transfer, deadline=asyncio.get_running_loop().time())
        await rig.result(transfer)
        start = rig.manager.start_save(rig.save_job(TOKENS))
        assert start.transfer == 0
        assert f"load {transfer} failed at token 0" in start.skipped


async def save_in_mid_put(rig: Rig, let_on: asyncio.Event, *, batches_before: int) -> int:
    """A save of request r with a put in flight, `batches_before` earlier ones stored; its id."""
    rig.compute(TOKENS, first_block=13)
    start = rig.manager.start_save(rig.save_job(TOKENS, first_block=13))
    for _ in range(batches_before):
        await until(lambda: any(call.operation is Operation.PUT for call in rig.store.calls))
    fault = rig.store.inject(Fault(FaultKind.HANG, Operation.PUT, times=1, event=let_on))
    await fault.struck.wait()
    return start.transfer


@pytest.mark.parametrize("batches_before", [0, 1])
@manual_time
async def test_no_save_after_failure_an_open_put_is_taken_back(batches_before: int) -> None:
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        save = await save_in_mid_put(rig, let_on, batches_before=batches_before)
        await failed_load(rig, (FULL, 1))
        result = await rig.result(save)
        assert {reason for chunk, reason in failed_chunks(result).items() if chunk[1] >= 2} == {"CANCELLED"}
        let_on.set()
        await turns(50)
        assert stored(rig, prompt="p") == {(FULL, 0)}, "whole, below the failure, and nothing else"
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_no_save_after_failure_a_put_that_outlives_its_save_is_taken_back_too() -> None:
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        save = await save_in_mid_put(rig, let_on, batches_before=0)
        await rig.manager.release(transfer=save, deadline=asyncio.get_running_loop().time())
        await rig.result(save)
        await failed_load(rig, (FULL, 0))
        let_on.set()
        await turns(50)
        assert stored(rig, prompt="p") == set()


@manual_time
async def test_no_save_after_failure_a_save_below_the_failure_goes_on() -> None:
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        rig.compute(32, first_block=13)
        fault = rig.store.inject(Fault(FaultKind.HANG, Operation.PUT, times=1, event=let_on))
        start = rig.manager.start_save(rig.save_job(32, first_block=13))
        await fault.struck.wait()
        await failed_load(rig, (FULL, 2))
        let_on.set()
        assert (await rig.result(start.transfer)).failed == ()


@manual_time
async def test_no_save_after_failure_what_cannot_be_taken_back_is_a_miss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        await save_in_mid_put(rig, let_on, batches_before=0)
        key = rig.key(FULL, 2)
        rig.store.inject(
            Fault(FaultKind.STATUS, Operation.REMOVE, keys=frozenset({key}), status=ChunkStatus.LEASED)
        )
        await failed_load(rig, (FULL, 1))
        with caplog.at_level(logging.ERROR):
            let_on.set()
            await turns(50)
        assert key in rig.tombstones
        assert rig.key(FULL, 1) not in rig.tombstones
        assert "NO_SAVE_AFTER_FAILURE: 1 chunks of save 1" in caplog.text
