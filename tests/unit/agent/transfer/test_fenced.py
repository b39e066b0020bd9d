"""FENCED: a release answers only when nobody touches the blocks any more, and says so when it cannot know."""

import asyncio
import threading

import pytest

from kvpool_agent.pools.pool import MappedPool, PoolError
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.transfer.errors import BlocksBusy, SessionClosed
from kvpool_agent.transfer.types import FenceState
from support.manual_loop import advance, manual_time, turns, until
from support.transfers import FULL, WINDOW, PoolWrapper, Rig, content, failed_chunks

TOKENS = 96


class GatedPool(PoolWrapper):
    """Stands still in the middle of its copies until it is let on."""

    def __init__(self, inside: MappedPool) -> None:
        super().__init__(inside)
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.gate = threading.Event()
        self.touched: list[tuple[int, int]] = []

    def _stand(self, group: int, block: int) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.gate.wait(30)
        self.touched.append((group, block))

    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        self._stand(group, block)
        super().scatter(group, block, payload)

    def gather(self, group: int, block: int, payload: memoryview) -> None:
        self._stand(group, block)
        super().gather(group, block, payload)


def gated(rig: Rig) -> GatedPool:
    pool = rig.mover._pool  # type: ignore[attr-defined]
    assert isinstance(pool, GatedPool)
    return pool


def now() -> float:
    return asyncio.get_running_loop().time()


@manual_time
async def test_fenced_release_in_mid_land_waits_for_the_copy_and_then_the_blocks_are_the_engines() -> None:
    async with await Rig.make(pool=GatedPool) as rig:
        rig.stock(TOKENS)
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
        await gated(rig).entered.wait()

        release = asyncio.ensure_future(rig.manager.release(request_id="r", deadline=now() + 5))
        await turns()
        assert not release.done()
        with pytest.raises(BlocksBusy):
            rig.manager.start_load(rig.load_job(TOKENS))
        gated(rig).gate.set()
        assert await release == (answer := await release)
        assert (answer.state, answer.unconfirmed) == (FenceState.FENCED, ())

        # The engine uses its blocks again at once: not one byte of them changes from now on.
        rig.compute(TOKENS, prompt="other")
        result = await rig.result(transfer)
        assert failed_chunks(result) == dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "CANCELLED")
        assert result.good == 0, "what landed before the release is not promised any more"
        await turns(50)
        rig.check_memory()
        assert len(gated(rig).touched) <= 2, "a stopped ticket is looked at between two items"


@manual_time
async def test_fenced_a_release_that_cannot_be_known_says_so_and_withholds_the_blocks() -> None:
    async with await Rig.make(pool=GatedPool) as rig:
        rig.stock(TOKENS)
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS, seconds=100))
        await gated(rig).entered.wait()

        release = asyncio.ensure_future(rig.manager.release(transfer=transfer, deadline=now() + 1))
        await turns()
        advance(1.1)
        answer = await release
        assert (answer.state, answer.unconfirmed) == (FenceState.FENCE_UNCONFIRMED, (transfer,))
        assert rig.manager.withheld(FULL) == frozenset(range(1, 7))
        with pytest.raises(BlocksBusy, match=f"load {transfer} of request 'r'"):
            rig.manager.start_load(rig.load_job(TOKENS))

        again = asyncio.ensure_future(rig.manager.release(transfer=transfer, deadline=now() + 1))
        await turns()
        gated(rig).gate.set()
        assert (await again).state is FenceState.FENCED
        assert rig.manager.withheld(FULL) == frozenset()


@manual_time
async def test_fenced_a_get_in_flight_does_not_hold_up_a_release() -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        let_on = asyncio.Event()
        fault = rig.store.inject(Fault(FaultKind.HANG, times=1, event=let_on))
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
        await fault.struck.wait()

        answer = await rig.manager.release(transfer=transfer, deadline=now())
        assert answer.state is FenceState.FENCED
        assert set(failed_chunks(await rig.result(transfer)).values()) == {"CANCELLED"}

        # Its blocks go to another load while the old get is still under way; that one ends into the ring alone.
        second, _ = rig.manager.start_load(rig.load_job(TOKENS, prompt="q"))
        rig.stock(TOKENS, prompt="q")
        await turns()
        let_on.set()
        result = await rig.result(second)
        assert result.failed == ()
        rig.expect(rig.loaded(rig.plan(TOKENS)), prompt="q")
        rig.check_memory()
        assert rig.ring.free_slots == rig.ring.slots
        assert rig.metrics.late == 1


@manual_time
async def test_fenced_release_names_a_request_a_transfer_or_everything() -> None:
    async with await Rig.make() as rig:
        rig.stock(32)
        hang = rig.store.inject(Fault(FaultKind.HANG))
        one, _ = rig.manager.start_load(rig.load_job(32, request="a"))
        two, _ = rig.manager.start_load(rig.load_job(32, request="b", first_block=5))
        three, _ = rig.manager.start_load(rig.load_job(32, request="c", first_block=9))
        four, _ = rig.manager.start_load(rig.load_job(32, request="c", first_block=13))
        await hang.struck.wait()

        await rig.manager.release(transfer=two, deadline=now())
        await rig.result(two)
        assert [result.transfer for result in rig.reported] == [two]
        await rig.manager.release(request_id="c", deadline=now())
        await rig.result(three)
        await rig.result(four)
        assert rig.manager.in_flight == 1
        await rig.manager.release(deadline=now())
        await rig.result(one)
        assert rig.manager.in_flight == 0
        assert rig.manager.withheld(FULL) | rig.manager.withheld(WINDOW) == frozenset()
        rig.check_memory()


@manual_time
async def test_releasing_what_has_ended_or_never_was_is_fenced() -> None:
    async with await Rig.make() as rig:
        rig.stock(32)
        result = await rig.load(rig.load_job(32))
        for transfer in (result.transfer, 4711):
            answer = await rig.manager.release(transfer=transfer, deadline=now())
            assert answer.state is FenceState.FENCED
        assert (await rig.manager.release(request_id="nobody", deadline=now())).state is FenceState.FENCED


@manual_time
async def test_a_release_between_the_last_byte_and_the_report_leaves_nothing_good() -> None:
    async with await Rig.make(pool=GatedPool) as rig:
        rig.stock(32)
        gated(rig).gate.set()
        transfer, _ = rig.manager.start_load(rig.load_job(32, seconds=5))
        fault = rig.store.inject(Fault(FaultKind.HANG, keys=frozenset({rig.key(WINDOW, 3)}), times=1))
        await fault.struck.wait()
        await turns()
        await until(lambda: rig.ring.free_slots == rig.ring.slots - 1)  # three chunks have landed
        advance(5.1)
        await until(lambda: not rig.manager.withheld(FULL))
        assert rig.reported == [], "the blocks are let go at the deadline, before the report is out"
        answer = await rig.manager.release(transfer=transfer, deadline=now())
        assert answer.state is FenceState.FENCED
        assert (await rig.result(transfer)).good == 0


@manual_time
async def test_fenced_nothing_touches_a_block_after_close() -> None:
    rig = await Rig.make(pool=GatedPool)
    rig.stock(TOKENS)
    transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
    await gated(rig).entered.wait()
    closing = asyncio.ensure_future(rig.manager.close())
    await turns()
    assert not closing.done()
    gated(rig).gate.set()
    await closing

    rig.compute(TOKENS, prompt="other")
    assert set(failed_chunks(await rig.result(transfer)).values()) == {"CANCELLED"}
    with pytest.raises(PoolError, match="closed"):
        gated(rig).inside.scatter(FULL, 1, memoryview(content(FULL, 0)))
    with pytest.raises(SessionClosed):
        rig.manager.start_load(rig.load_job(TOKENS))
    await turns(50)
    rig.check_memory()
    await rig.manager.close()
    rig.ring_memory.close()
    rig.engine.close()


@pytest.mark.parametrize("operation", [Operation.GET, Operation.PUT, Operation.EXISTS])
@manual_time
async def test_closing_ends_transfers_whose_store_does_not_answer(operation: Operation) -> None:
    rig = await Rig.make()
    rig.stock(32)
    rig.compute(32, prompt="q", first_block=10)
    fault = rig.store.inject(Fault(FaultKind.HANG, operation, seconds=0))
    transfers = [rig.manager.start_load(rig.load_job(32))[0]]
    transfers.append(rig.manager.start_save(rig.save_job(32, prompt="q", first_block=10)).transfer)
    await fault.struck.wait()
    before = rig.engine.image()
    closing = asyncio.ensure_future(rig.manager.close())
    await turns()
    advance(10.1)  # the fake's own deadline; a real loader's process is killed
    await closing
    assert sorted(rig.results) == transfers
    assert rig.engine.image() == before or operation is not Operation.GET
    rig.ring_memory.close()
    rig.engine.close()


@manual_time
async def test_a_release_of_a_save_waits_for_its_reading() -> None:
    async with await Rig.make(pool=GatedPool) as rig:
        rig.compute(TOKENS)
        start = rig.manager.start_save(rig.save_job(TOKENS))
        await gated(rig).entered.wait()
        release = asyncio.ensure_future(rig.manager.release(request_id="r", deadline=now() + 5))
        await turns()
        assert not release.done()
        gated(rig).gate.set()
        assert (await release).state is FenceState.FENCED
        reads = len(gated(rig).touched)
        assert reads <= 2, "a stopped ticket is looked at between two items"
        rig.compute(TOKENS, prompt="other")
        assert set(failed_chunks(await rig.result(start.transfer)).values()) == {"CANCELLED"}
        await turns(50)
        assert len(gated(rig).touched) == reads
        assert rig.store.cluster.objects == {}, "WHOLE_OR_ABSENT: nothing half collected was put"
        rig.check_memory()
        assert rig.ring.free_slots == rig.ring.slots
