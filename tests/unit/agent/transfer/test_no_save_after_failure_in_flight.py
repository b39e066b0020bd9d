"""NO_SAVE_AFTER_FAILURE, for saves before, during and after the load that fails."""

import asyncio

import pytest

from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.transfer.guard import TransferIds
from support.manual_loop import advance, manual_time, turns, until
from support.transfers import FULL, WINDOW, Rig, failed_chunks

TOKENS = 96


async def failed_load(
    rig: Rig, chunk: tuple[int, int] = (FULL, 3), *, request: str = "r", attempt: int = 0
) -> int:
    """A load of the request of which one chunk is evicted; its id."""
    rig.stock(TOKENS, prompt="q")
    del rig.store.cluster.objects[rig.key(*chunk, prompt="q")]
    result = await rig.load(rig.load_job(TOKENS, prompt="q", request=request, attempt=attempt))
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
        await failed_load(rig)
        start = rig.manager.start_save(rig.save_job(TOKENS, prompt="q"))
        assert "attempt 0 failed at token 48" in start.skipped
        await rig.result(start.transfer)
        below = {(FULL, chunk) for chunk in range(3)} | {(WINDOW, chunk) for chunk in range(6)}
        assert stored(rig) == below
        assert start.chunks == len(below)


@manual_time
async def test_no_save_after_failure_a_higher_attempt_is_computed_again() -> None:
    async with await Rig.make() as rig:
        await failed_load(rig, attempt=3)
        for attempt in (0, 3):
            refused = rig.manager.start_save(rig.save_job(TOKENS, start=48, prompt="q", attempt=attempt))
            assert (refused.transfer, refused.chunks) == (0, 0)
        allowed = rig.manager.start_save(rig.save_job(TOKENS, start=48, prompt="q", attempt=4))
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
        assert "attempt 0 failed at token 0" in start.skipped
        # C1: the next attempt saves, whatever became of the one before.
        rig.store.cluster.objects.clear()
        again = rig.manager.start_save(rig.save_job(TOKENS, attempt=1))
        assert (await rig.result(again.transfer)).failed == ()


@manual_time
async def test_no_save_after_failure_a_released_load_forbids_before_its_release_returns() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        fault = rig.store.inject(Fault(FaultKind.HANG, times=1))
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS, start=32))
        await fault.struck.wait()
        releasing = asyncio.ensure_future(
            rig.manager.release(request_id="r", deadline=asyncio.get_running_loop().time() + 1)
        )
        await asyncio.sleep(0)
        refused = rig.manager.start_save(rig.save_job(TOKENS, start=32, first_block=13))
        assert (refused.transfer, "failed at token 32" in refused.skipped) == (0, True)
        await releasing
        await rig.result(transfer)


async def leases_lapse() -> None:
    """Twice as long as a key stays leased."""
    for _ in range(2):
        await turns(50)
        advance(10)
    await turns(50)


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
        await leases_lapse()
        assert stored(rig, prompt="p") == {(FULL, 0)}, "whole, below the failure, and nothing else"
        assert rig.ring.free_slots == rig.ring.slots
        assert not any(rig.key(FULL, chunk) in rig.tombstones for chunk in range(6)), "it may be saved again"


@manual_time
async def test_no_save_after_failure_a_put_that_outlives_its_save_is_taken_back_too() -> None:
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        save = await save_in_mid_put(rig, let_on, batches_before=0)
        await rig.manager.release(transfer=save, deadline=asyncio.get_running_loop().time())
        await rig.result(save)
        await failed_load(rig, (FULL, 0))
        let_on.set()
        await leases_lapse()
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
async def test_no_save_after_failure_what_is_leased_is_a_miss_until_it_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A2: the save's own question, whether its chunks have arrived, keeps them from being removed."""
    async with await Rig.make() as rig:
        let_on = asyncio.Event()
        save = await save_in_mid_put(rig, let_on, batches_before=1)
        await failed_load(rig, (FULL, 0))
        let_on.set()
        await rig.result(save)
        await turns(50)
        left = stored(rig, prompt="p")
        assert left, "confirmed, so leased"
        assert all(rig.key(*chunk) in rig.tombstones for chunk in left)
        await leases_lapse()
        assert stored(rig, prompt="p") == set()
        assert rig.metrics.gone["revoked"] >= len(left)
    assert rig.metrics.given_up == {"revoked": 0}


@manual_time
async def test_no_save_after_failure_the_session_that_has_to_take_back_may_end_first() -> None:
    async with await Rig.make() as other, await Rig.make(beside=other) as rig:
        let_on = asyncio.Event()
        await save_in_mid_put(rig, let_on, batches_before=1)
        await failed_load(rig, (FULL, 0))
        let_on.set()
        await rig.manager.close()
        assert stored(rig, prompt="p")
        await leases_lapse()
        assert stored(rig, prompt="p") == set()


@manual_time
async def test_no_save_after_failure_on_one_rank_forbids_it_on_all_of_the_engine() -> None:
    """A1."""
    async with (
        await Rig.make() as failing,
        await Rig.make(beside=failing) as rank,
        await Rig.make(beside=failing, engine="another") as foreign,
    ):
        await failed_load(failing)
        refused = rank.manager.start_save(rank.save_job(TOKENS, start=48, prompt="q"))
        assert (refused.transfer, "attempt 0 failed at token 48" in refused.skipped) == (0, True)
        assert foreign.manager.start_save(foreign.save_job(TOKENS, start=48, prompt="q")).chunks == 3 + 6
        assert rank.manager.start_save(rank.save_job(TOKENS, start=48, prompt="q", attempt=1)).chunks == 3 + 6


@manual_time
async def test_no_save_after_failure_on_one_rank_takes_back_what_another_is_putting() -> None:
    async with await Rig.make() as failing, await Rig.make(beside=failing) as rank:
        let_on = asyncio.Event()
        save = await save_in_mid_put(rank, let_on, batches_before=1)
        await failed_load(failing, (FULL, 1))
        assert "CANCELLED" in failed_chunks(await rank.result(save)).values()
        let_on.set()
        await leases_lapse()
        assert stored(rank, prompt="p") == {(FULL, 0)}


@pytest.mark.parametrize(("attempt", "left"), [(0, 2 + 4), (1, 6 + 12)])
@manual_time
async def test_no_save_after_failure_heard_of_late_takes_back_what_its_attempt_saved(
    attempt: int, left: int
) -> None:
    """Of a rank on another node, say; the engine tells this agent."""
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        assert (await rig.save(rig.save_job(TOKENS))).failed == ()
        rig.shared.guard.failed("engine", request_id="r", attempt=attempt, position=32)
        await leases_lapse()
        assert len(stored(rig, prompt="p")) == left
        if attempt == 0:
            again = await rig.save(rig.save_job(TOKENS, start=32, attempt=1))
            assert (again.failed, again.good) == ((), 4 + 8)
            # Told once more, as every rank's report is: what was computed again stays.
            rig.shared.guard.failed("engine", request_id="r", attempt=0, position=32)
            await leases_lapse()
            assert len(stored(rig, prompt="p")) == 6 + 12


@manual_time
async def test_no_save_after_failure_what_another_request_has_put_is_not_taken_back() -> None:
    """D5: the batch that waits for its turn has put nothing."""
    async with await Rig.make() as failing, await Rig.make(beside=failing) as rank:
        let_on = asyncio.Event()
        blocker = rank.store.inject(Fault(FaultKind.HANG, Operation.PUT, times=1, event=let_on))
        rank.compute(TOKENS, first_block=13)
        first = rank.manager.start_save(rank.save_job(TOKENS, first_block=13, request="first", prompt="z"))
        await blocker.struck.wait()
        waiting = rank.manager.start_save(rank.save_job(TOKENS, first_block=13))
        await turns(50)
        for group, chunk in ((FULL, 0), (FULL, 1), (FULL, 2)):
            rank.store.cluster.objects[rank.key(group, chunk)] = rank.sealed(group, chunk)
        failing.shared.guard.failed("engine", request_id="r", attempt=0, position=0)
        let_on.set()
        await rank.result(waiting.transfer)
        await rank.result(first.transfer)
        await leases_lapse()
        assert stored(rank, prompt="p") == {(FULL, 0), (FULL, 1), (FULL, 2)}


@manual_time
async def test_a_corrupt_key_is_removed_although_its_engine_has_detached() -> None:
    """C4."""
    async with await Rig.make() as other, await Rig.make(beside=other) as rig:
        rig.stock(TOKENS)
        key = rig.key(FULL, 1)
        rig.store.cluster.objects[key] = rig.sealed(FULL, 2)
        assert failed_chunks(await rig.load(rig.load_job(TOKENS))) == {(FULL, 1): "CORRUPT"}
        await rig.manager.close()
        assert key in rig.store.cluster.objects
        await leases_lapse()
        assert key not in rig.store.cluster.objects
        assert rig.key(FULL, 2) in rig.store.cluster.objects


def test_transfer_numbers_of_two_runs_of_an_agent_differ() -> None:
    """A3."""
    first, second = TransferIds(epoch=(5 << 40) | 1), TransferIds(epoch=2)
    numbers = [ids.next() for ids in (first, first, second, second)]
    assert len(set(numbers)) == 4
    assert all(0 < number < 1 << 63 for number in numbers)


@manual_time
async def test_transfer_numbers_are_not_used_again_by_the_next_session() -> None:
    async with await Rig.make() as one, await Rig.make(beside=one) as next_one:
        loads = [rig.manager.start_load(rig.load_job(TOKENS))[0] for rig in (one, next_one)]
        assert len(set(loads)) == 2
