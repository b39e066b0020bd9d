"""The ring's slots: never twice, in order of asking, quarantined until the writer is gone."""

import asyncio
from collections.abc import Iterator

import pytest

from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.transfer.errors import RingBroken
from kvpool_agent.transfer.ring import Ring
from support.manual_loop import advance, manual_time, turns


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    made = SealedMemory.create("ring", 4 * 128 + 100)
    yield made
    made.close()


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@manual_time
async def test_slots_are_aligned_apart_and_inside(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=65)
    assert (ring.slot_bytes, ring.slots) == (128, 4)
    offsets = await ring.take(4, deadline=soon())
    assert sorted(offsets) == [0, 128, 256, 384]
    ring.view(offsets[0], 65)[:] = b"x" * 65
    assert bytes(memory.view[offsets[0] : offsets[0] + 65]) == b"x" * 65


@pytest.mark.parametrize("chunk_bytes", [613, 0, -1])
def test_a_ring_without_room_for_one_chunk_is_refused(memory: SealedMemory, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="ringSize"):
        Ring(memory, chunk_bytes=chunk_bytes)


@manual_time
async def test_who_asks_first_is_served_first_even_if_later_ones_need_less(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(3, deadline=soon())
    many = asyncio.ensure_future(ring.take(3, deadline=soon()))
    await turns()
    few = asyncio.ensure_future(ring.take(1, deadline=soon()))
    await turns()
    assert not few.done(), "it would starve the one that needs more"
    ring.free(held)
    assert len(await many) == 3
    assert len(await few) == 1
    assert not set(many.result()) & set(few.result())


@manual_time
async def test_bounded_what_cannot_be_given_by_the_deadline_is_not_given(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(4, deadline=soon())
    waiting = asyncio.ensure_future(ring.take(2, deadline=soon(3)))
    behind = asyncio.ensure_future(ring.take(1, deadline=soon(30)))
    await turns()
    advance(3.1)
    with pytest.raises(TimeoutError):
        await waiting
    ring.free(held[:1])
    assert await behind == held[:1]


@manual_time
async def test_a_waiter_that_gives_up_lets_the_next_one_in_and_loses_no_slot(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(3, deadline=soon())
    big = asyncio.ensure_future(ring.take(4, deadline=soon()))
    small = asyncio.ensure_future(ring.take(1, deadline=soon()))
    await turns()
    big.cancel()
    assert len(await small) == 1
    # Given up in the very turn in which it was served.
    late = asyncio.ensure_future(ring.take(3, deadline=soon()))
    await turns()
    ring.free(held)
    late.cancel()
    await turns()
    assert late.cancelled()
    assert ring.free_slots == 3


@manual_time
async def test_quarantined_slots_come_back_when_every_process_is_gone_and_not_before(
    memory: SealedMemory,
) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(4, deadline=soon())
    ring.quarantine(held[:3])
    ring.free(held[3:])
    assert (ring.free_slots, ring.quarantined_slots) == (1, 3)
    waiting = asyncio.ensure_future(ring.take(4, deadline=soon()))
    await turns()
    assert not waiting.done()
    ring.settle()
    assert sorted(await waiting) == sorted(held)


@manual_time
async def test_a_retired_ring_gives_nothing_to_those_who_wait_or_come(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(4, deadline=soon())
    waiting = asyncio.ensure_future(ring.take(1, deadline=soon()))
    await turns()
    ring.retire("pid 7 is stuck")
    with pytest.raises(RingBroken, match="pid 7"):
        await waiting
    ring.free(held)
    with pytest.raises(RingBroken, match="pid 7"):
        await ring.take(1, deadline=soon())


@pytest.mark.parametrize("count", [0, 5])
@manual_time
async def test_a_count_that_can_never_be_given_is_refused(memory: SealedMemory, count: int) -> None:
    with pytest.raises(ValueError, match="slots of a ring of 4"):
        await Ring(memory, chunk_bytes=128).take(count, deadline=soon())


@manual_time
async def test_a_slot_given_back_twice_is_an_error(memory: SealedMemory) -> None:
    ring = Ring(memory, chunk_bytes=128)
    held = await ring.take(1, deadline=soon())
    ring.free(held)
    with pytest.raises(KeyError):
        ring.free(held)
