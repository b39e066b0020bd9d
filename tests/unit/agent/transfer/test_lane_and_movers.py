"""The narrow places: a stop in the very turn in which something was granted, or between hashing and copying."""

import asyncio

import pytest
from opentelemetry.context import Context

from kvpool_agent.pools.pool import MoveItem
from kvpool_agent.store.protocol import ChunkStatus, PutItem
from kvpool_agent.transfer.background import Background
from kvpool_agent.transfer.fence import BlockTable, Hold, Stopped, unless_stopped, wait_gone
from kvpool_agent.transfer.lane import StoreLane
from kvpool_agent.transfer.types import FailReason, Landed, TransferKind
from kvpool_wire.trailer import TrailerFault
from support.manual_loop import manual_time, turns
from support.transfers import FULL, WINDOW, Rig


def hold_of(*, transfer: int = 1, kind: TransferKind = TransferKind.LOAD) -> Hold:
    return BlockTable(2).claim(transfer=transfer, request_id="r", kind=kind, blocks={FULL: [1, 2]})


def lane_of(rig: Rig, background: Background) -> StoreLane:
    return StoreLane(
        loader=rig.loader,
        prober=rig.store.prober,
        ring=rig.ring,
        metrics=rig.metrics,
        background=background,
        quarantine_share=0.25,
    )


def soon() -> float:
    return asyncio.get_running_loop().time() + 5


@manual_time
async def test_a_stopped_transfer_neither_gets_nor_puts_even_if_its_turn_has_just_come() -> None:
    async with await Rig.make() as rig:
        lane, hold = lane_of(rig, Background()), hold_of()
        hold.stop(FailReason.CANCELLED)
        fetched = await lane.fetch([b"k"], [64], hold=hold, deadline=soon(), context=Context())
        assert fetched.arrived() == []
        [offset] = await rig.ring.take(1, deadline=soon())
        statuses = await lane.store(
            [PutItem(b"k", offset, 64)], hold=hold, deadline=soon(), context=Context()
        )
        assert statuses == [ChunkStatus.NOT_ATTEMPTED]
        assert rig.store.calls == []
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_who_waits_for_its_turn_leaves_when_it_is_stopped() -> None:
    async with await Rig.make() as rig:
        lane, hold = lane_of(rig, Background()), hold_of()
        async with lane._gets:
            waiting = asyncio.ensure_future(
                lane.fetch([b"k"], [64], hold=hold, deadline=soon(), context=Context())
            )
            await turns()
            hold.stop(FailReason.CANCELLED)
            fetched = await waiting
        assert list(fetched.statuses) == [ChunkStatus.NOT_ATTEMPTED]
        assert not lane._gets.locked()
        assert rig.ring.free_slots == rig.ring.slots


@manual_time
async def test_waiting_unless_stopped_gives_the_result_the_error_or_stopped() -> None:
    hold = hold_of()

    async def fails() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await unless_stopped(fails(), hold)
    waiting = asyncio.ensure_future(unless_stopped(asyncio.Event().wait(), hold))
    await turns()
    hold.stop(FailReason.CANCELLED)
    with pytest.raises(Stopped):
        await waiting


@manual_time
async def test_fenced_a_stop_while_a_chunk_is_hashed_leaves_its_block_alone() -> None:
    async with await Rig.make() as rig:
        hold = hold_of()
        ticket = hold.ticket(soon())
        assert ticket is not None
        loop = asyncio.get_running_loop()

        def check(index: int) -> TrailerFault | None:
            stopped = asyncio.run_coroutine_threadsafe(stop(), loop)
            stopped.result(30)
            return None

        async def stop() -> None:
            hold.stop(FailReason.CANCELLED)

        outcomes = await rig.mover.land([MoveItem(FULL, 1, 0)], check, ticket=ticket)
        assert outcomes == [Landed.STOPPED]
        assert hold.gone.done()
        rig.check_memory()


@manual_time
async def test_fenced_no_ticket_after_a_stop_and_a_reason_that_a_release_outranks() -> None:
    hold = hold_of()
    ticket = hold.ticket(soon())
    assert ticket is not None
    hold.stop(FailReason.TIMED_OUT)
    hold.stop(FailReason.INTERNAL)
    assert (hold.reason, hold.ticket(soon()), hold.gone.done()) == (FailReason.TIMED_OUT, None, False)
    hold.stop(FailReason.CANCELLED)
    assert hold.reason is FailReason.CANCELLED
    assert await wait_gone([hold], deadline=asyncio.get_running_loop().time()) == (1,)
    quiet: list[str] = []
    ticket.when_quiet(lambda: quiet.append("before"))
    ticket.quiet()
    ticket.quiet()
    ticket.when_quiet(lambda: quiet.append("after"))
    assert quiet == ["before", "after"]
    assert await wait_gone([hold], deadline=None) == ()


@manual_time
async def test_blocks_shared_by_two_saves_stay_held_until_both_have_let_go() -> None:
    table = BlockTable(2)
    holds = [
        table.claim(transfer=number, request_id="r", kind=TransferKind.SAVE, blocks={WINDOW: [3, 4]})
        for number in (1, 2)
    ]
    holds[0].finish()
    assert table.busy(WINDOW) == frozenset({3, 4})
    holds[1].finish()
    holds[1].finish()
    assert table.busy(WINDOW) == frozenset()
    assert table.holds() == []
