"""Copy mode: a client that answers late, never, wrongly, or that it could not."""

import asyncio

import pytest

from kvpool_agent.store.faults import Operation
from kvpool_agent.transfer.errors import BlocksBusy, CopyProtocolError
from kvpool_agent.transfer.types import FenceState
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import advance, manual_time, turns
from support.transfers import FULL, WINDOW, CopyClient, Rig, failed_chunks

TOKENS = 96


def now() -> float:
    return asyncio.get_running_loop().time()


def client_of(rig: Rig, *, automatic: bool) -> CopyClient:
    assert rig.client is not None
    rig.client.automatic = automatic
    return rig.client


@manual_time
async def test_a_client_that_cannot_copy_fails_those_chunks_alone() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(TOKENS)
        client_of(rig, automatic=True).refuse = {(FULL, 3), (WINDOW, 12)}
        result = await rig.load(rig.load_job(TOKENS))
        assert failed_chunks(result) == {(FULL, 2): "ENGINE_FAILED", (WINDOW, 11): "ENGINE_FAILED"}
        rig.expect([one for one in rig.loaded(rig.plan(TOKENS)) if one not in failed_chunks(result)])
        rig.check_memory()


@manual_time
async def test_unverified_bytes_are_not_even_offered_to_the_client() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(TOKENS)
        rig.store.cluster.objects[rig.key(FULL, 1)] = rig.sealed(FULL, 2)
        client = client_of(rig, automatic=True)
        await rig.load(rig.load_job(TOKENS))
        offered = {(item.group, item.block) for wanted in client.wanted for item in wanted.items}
        assert offered == {(group, chunk + 1) for group, chunk in rig.loaded(rig.plan(TOKENS))} - {(FULL, 2)}


@manual_time
async def test_fenced_a_client_that_never_answers_is_timed_out_and_its_blocks_stay_withheld() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(TOKENS)
        client = client_of(rig, automatic=False)
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS, seconds=5))
        await client.asked.wait()
        advance(5.1)
        result = await rig.result(transfer)
        assert failed_chunks(result) == dict.fromkeys(rig.loaded(rig.plan(TOKENS)), "TIMED_OUT")

        assert rig.manager.withheld(FULL) == frozenset(range(1, 7))
        with pytest.raises(BlocksBusy):
            rig.manager.start_load(rig.load_job(TOKENS))
        answer = asyncio.ensure_future(rig.manager.release(transfer=transfer, deadline=now() + 1))
        await turns()
        advance(1.1)
        assert (await answer).state is FenceState.FENCE_UNCONFIRMED
        slots = rig.ring.free_slots
        assert slots < rig.ring.slots, "the client may still read the ring"

        again = asyncio.ensure_future(rig.manager.release(request_id="r", deadline=now() + 1))
        await turns()
        client.answer(client.wanted[0])
        assert (await again).state is FenceState.FENCED
        assert rig.manager.withheld(FULL) == frozenset()
        assert rig.metrics.late >= 1
        await turns()
        assert rig.ring.free_slots == rig.ring.slots
        rig.check_memory()


@manual_time
async def test_fenced_a_release_waits_for_the_clients_answer() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(TOKENS)
        client = client_of(rig, automatic=False)
        transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
        await client.asked.wait()
        release = asyncio.ensure_future(rig.manager.release(transfer=transfer, deadline=now() + 5))
        await turns()
        assert not release.done()
        assert set(failed_chunks(await rig.result(transfer)).values()) == {"CANCELLED"}
        client.copy(client.wanted[0])
        assert (await release).state is FenceState.FENCED
        await turns()
        assert len(client.wanted) == 1, "a stopped transfer asks for no further copy"
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_whole_or_absent_a_late_copy_of_a_save_is_never_put() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.compute(TOKENS)
        client = client_of(rig, automatic=False)
        start = rig.manager.start_save(rig.save_job(TOKENS, seconds=5))
        await client.asked.wait()
        advance(5.1)
        assert set(failed_chunks(await rig.result(start.transfer)).values()) == {"TIMED_OUT"}
        assert rig.ring.free_slots == rig.ring.slots - 3, "the client may still write the ring"
        client.copy(client.wanted[0])
        await turns()
        assert rig.store.cluster.objects == {}
        assert rig.ring.free_slots == rig.ring.slots
        assert [call for call in rig.store.calls if call.operation is Operation.PUT] == []


@manual_time
async def test_a_save_that_the_client_could_not_gather_is_not_put() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.compute(TOKENS)
        client_of(rig, automatic=True).refuse = {(FULL, 2)}
        result = await rig.save(rig.save_job(TOKENS))
        assert failed_chunks(result) == {(FULL, 1): "ENGINE_FAILED"}
        assert rig.key(FULL, 1) not in rig.store.cluster.objects
        assert rig.key(FULL, 2) in rig.store.cluster.objects


@manual_time
async def test_an_answer_about_items_that_were_not_asked_for_is_refused_and_fails_the_batch() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(32)
        client = client_of(rig, automatic=False)
        transfer, _ = rig.manager.start_load(rig.load_job(32))
        await client.asked.wait()
        client.automatic = True
        with pytest.raises(CopyProtocolError, match="item 99"):
            client.answer(client.wanted[0], failed=[99])
        result = await rig.result(transfer)
        assert failed_chunks(result) == {
            (FULL, 0): "ENGINE_FAILED",
            (FULL, 1): "ENGINE_FAILED",
            (WINDOW, 2): "ENGINE_FAILED",
        }


@pytest.mark.parametrize(("transfer", "batch"), [(1, 99), (99, 1), (0, 0)])
@manual_time
async def test_an_answer_that_nobody_waits_for_is_counted_and_changes_nothing(
    transfer: int, batch: int
) -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(32)
        client = client_of(rig, automatic=False)
        rig.manager.start_load(rig.load_job(32))
        await client.asked.wait()
        assert client.mover is not None
        client.mover.on_copy_done(pb.CopyDone(transfer=transfer, batch=batch))
        assert rig.metrics.late == 1
        assert rig.manager.withheld(FULL) == frozenset({1, 2})
        client.copy(client.wanted[0])
        with_second_answer = client.wanted[0]
        client.answer(with_second_answer)
        assert rig.metrics.late == 2


@manual_time
async def test_a_stream_that_breaks_while_asking_fails_the_load_and_frees_its_blocks() -> None:
    async with await Rig.make(mode="copy") as rig:
        rig.stock(TOKENS)
        assert rig.client is not None
        assert rig.client.mover is not None

        def broken(wanted: pb.CopyWanted) -> None:
            raise ConnectionError("the stream is gone")

        rig.client.mover._send = broken
        result = await rig.load(rig.load_job(TOKENS))
        assert set(failed_chunks(result).values()) == {"INTERNAL"}
        await turns()
        assert rig.manager.withheld(FULL) == frozenset()
        assert rig.ring.free_slots == rig.ring.slots
        rig.check_memory()


@manual_time
async def test_closing_does_not_wait_for_a_client_that_is_gone() -> None:
    rig = await Rig.make(mode="copy")
    rig.stock(TOKENS)
    client = client_of(rig, automatic=False)
    transfer, _ = rig.manager.start_load(rig.load_job(TOKENS))
    await client.asked.wait()
    await rig.manager.close()
    assert set(failed_chunks(rig.results[transfer]).values()) == {"CANCELLED"}
    assert rig.manager.withheld(FULL) == frozenset()
    client.answer(client.wanted[0])
    assert rig.metrics.late >= 1
    rig.ring_memory.close()
    rig.engine.close()
