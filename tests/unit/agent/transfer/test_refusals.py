"""Jobs that are refused: completely, before anything is touched, and with a message that says what to mend."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvpool_agent.coordinator import GroupPlan
from kvpool_agent.store.faults import Fault, FaultKind
from kvpool_agent.transfer.errors import (
    BadBlocks,
    BadPlan,
    BlocksBusy,
    Draining,
    QueueFull,
    SessionClosed,
    TransferRefused,
)
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.types import LoadJob
from support.manual_loop import advance, manual_time, turns
from support.transfers import BLOCKS, FULL, NULL, WINDOW, Rig, chain_of, failed_chunks, ids

TOKENS = 96


async def refused(rig: Rig, job: LoadJob, error: type[TransferRefused], match: str) -> None:
    """The job is refused and leaves no trace at all."""
    before = (
        rig.manager.withheld(FULL),
        rig.manager.withheld(WINDOW),
        rig.ring.free_slots,
        rig.manager.in_flight,
    )
    with pytest.raises(error, match=match):
        rig.manager.start_load(job)
    await turns()
    after = (
        rig.manager.withheld(FULL),
        rig.manager.withheld(WINDOW),
        rig.ring.free_slots,
        rig.manager.in_flight,
    )
    assert after == before
    assert (rig.store.calls, rig.reported) == ([], [])
    rig.check_memory()


@pytest.mark.parametrize(
    ("group", "at", "block", "match"),
    [
        (FULL, 0, BLOCKS, "group 0: block 32 is outside 0..31"),
        (FULL, 5, -1, "group 0: block -1 is outside 0..31"),
        (WINDOW, 11, 2**31 - 1, "group 1: block 2147483647 is outside"),
        (FULL, 3, NULL, "group 0: block 0 is the null block"),
        (FULL, 3, 5, "group 0: block 5 is named twice"),
        (WINDOW, 10, 12, "group 1: block 12 is named twice"),
    ],
)
@manual_time
async def test_foreign_null_and_doubled_blocks_are_refused(
    group: int, at: int, block: int, match: str
) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        blocks = ids(TOKENS)
        blocks[group][at] = block
        await refused(rig, rig.load_job(TOKENS, blocks=blocks), BadBlocks, match)


@manual_time
async def test_masked_off_blocks_may_be_null_or_anything() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        blocks = ids(TOKENS)
        blocks[WINDOW][:10] = NULL
        result = await rig.load(rig.load_job(TOKENS, blocks=blocks))
        assert result.failed == ()
        rig.expect(rig.loaded(rig.plan(TOKENS)))
        rig.check_memory()


@pytest.mark.parametrize(
    ("drop", "match"), [(0, "group 0: 5 block ids where 6 are due"), (1, "group 1: 11 block ids")]
)
@manual_time
async def test_too_few_block_ids_are_refused(drop: int, match: str) -> None:
    async with await Rig.make() as rig:
        blocks = [block[:-1] if group == drop else block for group, block in enumerate(ids(TOKENS))]
        await refused(rig, rig.load_job(TOKENS, blocks=blocks), BadBlocks, match)
        await refused(rig, rig.load_job(TOKENS, blocks=ids(TOKENS)[:1]), BadBlocks, "group 1 is missing")
        two_axes = [ids(TOKENS)[0].reshape(2, 3), ids(TOKENS)[1]]
        await refused(rig, rig.load_job(TOKENS, blocks=two_axes), BadBlocks, "group 0")


@manual_time
async def test_mask_covers_hit_a_plan_that_leaves_out_its_last_block_is_refused() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        job = rig.load_job(TOKENS)
        full, window = job.plan.groups
        short = GroupPlan(full.mask[:-1], full.key_units[:-1])
        flipped = GroupPlan(
            np.concatenate([full.mask[:-1], [False]]), np.concatenate([full.key_units[:-1], [-1]])
        )
        moved = GroupPlan(full.mask, np.concatenate([full.key_units[:-1], [3]]))
        for wrong in (short, flipped, moved):
            plan = replace(job.plan, groups=(wrong, window))
            await refused(rig, replace(job, plan=plan), BadPlan, "MASK_COVERS_HIT")
        await refused(rig, replace(job, plan=replace(job.plan, groups=(full,))), BadPlan, "MASK_COVERS_HIT")
        await refused(
            rig, replace(job, plan=replace(job.plan, hit_length=TOKENS - 16)), BadPlan, "start|MASK"
        )
        await refused(rig, replace(job, total_hashes=4), BadPlan, "MASK_COVERS_HIT")


@manual_time
async def test_a_plan_without_its_hashes_is_refused() -> None:
    async with await Rig.make() as rig:
        job = replace(rig.load_job(TOKENS), chain=chain_of(TOKENS // 8 - 1))
        await refused(rig, job, BadPlan, "hash unit 11, the chain that came with it has 11 units")


@pytest.mark.parametrize("start", [-1, TOKENS + 1])
@manual_time
async def test_a_start_outside_the_hit_is_refused(start: int) -> None:
    async with await Rig.make() as rig:
        await refused(rig, replace(rig.load_job(TOKENS), start=start), BadPlan, "outside the hit of 96")


@manual_time
async def test_a_block_of_a_load_under_way_is_refused_to_others_until_its_result() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        fault = rig.store.inject(Fault(FaultKind.HANG, times=1, event=(let_on := asyncio.Event())))
        one, _ = rig.manager.start_load(rig.load_job(32))
        await fault.struck.wait()
        with pytest.raises(BlocksBusy, match="group 0: block 2 is held by load 1 of request 'r'"):
            rig.manager.start_load(rig.load_job(TOKENS, first_block=2, request="other"))
        with pytest.raises(BlocksBusy, match="held by load 1"):
            rig.manager.start_save(rig.save_job(32))
        let_on.set()
        await rig.result(one)
        await rig.load(rig.load_job(TOKENS, first_block=2, request="other"))
        rig.expect(rig.loaded(rig.plan(32)))
        rig.expect(rig.loaded(rig.plan(TOKENS)), first_block=2)
        rig.check_memory()


@manual_time
async def test_bounded_more_transfers_than_the_limit_are_refused() -> None:
    settings = TransferSettings(max_transfers=2, batch_chunks=2)
    async with await Rig.make(settings=settings) as rig:
        rig.stock(16)
        let_on = asyncio.Event()
        rig.store.inject(Fault(FaultKind.HANG, event=let_on))
        rig.manager.start_load(rig.load_job(16, first_block=1))
        last, _ = rig.manager.start_load(rig.load_job(16, first_block=3))
        with pytest.raises(QueueFull, match="2 transfers are under way"):
            rig.manager.start_load(rig.load_job(16, first_block=5))
        with pytest.raises(QueueFull):
            rig.manager.start_save(rig.save_job(16, first_block=5))
        let_on.set()
        await rig.result(last)
        assert (await rig.load(rig.load_job(16, first_block=5))).failed == ()


@manual_time
async def test_a_draining_session_ends_what_it_has_and_takes_nothing_new() -> None:
    async with await Rig.make() as rig:
        rig.stock(32)
        let_on = asyncio.Event()
        fault = rig.store.inject(Fault(FaultKind.HANG, times=1, event=let_on))
        transfer, _ = rig.manager.start_load(rig.load_job(32))
        await fault.struck.wait()
        drain = asyncio.ensure_future(rig.manager.drain(asyncio.get_running_loop().time() + 3))
        await turns()
        with pytest.raises(Draining):
            rig.manager.start_load(rig.load_job(32, first_block=9))
        with pytest.raises(Draining):
            rig.manager.start_save(rig.save_job(32, first_block=9))
        let_on.set()
        await drain
        assert rig.results[transfer].failed == ()


@manual_time
async def test_bounded_a_drain_stops_what_has_not_ended_at_its_deadline() -> None:
    async with await Rig.make() as rig:
        rig.stock(32)
        fault = rig.store.inject(Fault(FaultKind.HANG))
        transfer, _ = rig.manager.start_load(rig.load_job(32, seconds=100))
        await fault.struck.wait()
        drain = asyncio.ensure_future(rig.manager.drain(asyncio.get_running_loop().time() + 3))
        await turns()
        advance(3.1)
        await drain
        assert set(failed_chunks(rig.results[transfer]).values()) == {"CANCELLED"}


@manual_time
async def test_a_closed_session_takes_nothing() -> None:
    rig = await Rig.make()
    await rig.manager.close()
    with pytest.raises(SessionClosed):
        rig.manager.start_load(rig.load_job(32))
    with pytest.raises(SessionClosed):
        rig.manager.start_save(rig.save_job(32))
    rig.ring_memory.close()
    rig.engine.close()


@pytest.mark.parametrize(
    ("start", "end", "units", "match"),
    [(50, 40, 12, "no range"), (-8, 40, 12, "no range"), (0, 96, 11, "hash unit 11")],
)
@manual_time
async def test_a_save_of_no_range_or_without_its_hashes_is_refused(
    start: int, end: int, units: int, match: str
) -> None:
    async with await Rig.make() as rig:
        job = replace(rig.save_job(TOKENS), start=start, end=end, chain=chain_of(units))
        with pytest.raises(BadPlan, match=match):
            rig.manager.start_save(job)
        assert rig.store.calls == []


@pytest.mark.parametrize(
    ("at", "block", "match"), [(0, BLOCKS, "outside"), (3, 2, "twice"), (2, -5, "outside")]
)
@manual_time
async def test_a_saves_blocks_are_checked_too(at: int, block: int, match: str) -> None:
    async with await Rig.make() as rig:
        blocks = ids(TOKENS)
        blocks[FULL][at] = block
        with pytest.raises(BadBlocks, match=match):
            rig.manager.start_save(rig.save_job(TOKENS, blocks=blocks))
        assert rig.manager.withheld(WINDOW) == frozenset()
