"""Copy mode: every byte where it belongs, none anywhere else, and none after a fence."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool_engine.aio import WorkerClient
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import FenceState, Mode
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples
from unit.engine.conftest import MakeWorker
from unit.engine.fake_agent import RING_BYTES, Call, FakeAgent, FakeSession

PLAN = samples.plan([[1, 1, 1], [0, 1, 1]], 12)
IDS = [[5, 6, 7], [9, 10, 11]]
SLOT = 128
"""One chunk with its trailer, aligned to 64."""


@pytest.fixture
async def started(agent: FakeAgent) -> FakeAgent:
    async def load(request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        return pb.LoadResponse(transfer=100 + len(agent.called("Load")), chunks=5)

    async def save(request: pb.SaveRequest, call: Call) -> pb.SaveResponse:
        return pb.SaveResponse(transfer=201, chunks=4)

    agent.mode = pb.COPY
    agent.answers |= {"Load": load, "Save": save}
    return agent


class Gate:
    """An event of the device that a test lets happen; the copying thread waits for it before its first byte."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def ipc_handle(self) -> bytes:
        raise AssertionError("copy mode waits itself; nothing is handed to the agent")

    def synchronize(self) -> None:
        self.reached.set()
        assert self.open.wait(10)


async def begin(
    agent: FakeAgent, worker: MakeWorker, **options: Any
) -> tuple[WorkerClient, samples.Engine, FakeSession, Transfer]:
    client, engine = await worker(Mode.COPY)
    for group in (0, 1):
        engine.blocks(group)[:] = np.arange(samples.BLOCKS, dtype=np.uint8)[:, None] + 100 * group
    session = await agent.sessions.get()
    transfer = await client.load("r", PLAN, 0, IDS, deadline=60, **options)
    return client, engine, session, transfer


def fill(session: FakeSession, seed: int) -> NDArray[np.uint8]:
    """Random bytes in the whole ring; returns them."""
    session.ring_bytes()[:] = np.random.default_rng(seed).integers(0, 256, RING_BYTES, np.uint8)
    return session.ring_bytes().copy()


def ask(
    session: FakeSession, items: list[tuple[int, int, int]], *, kind: Any = pb.LOAD, transfer: int = 101
) -> None:
    wanted = [pb.CopyItem(group=group, block=block, offset=offset) for group, block, offset in items]
    session.send(copy_wanted=pb.CopyWanted(transfer=transfer, batch=3, kind=kind, items=wanted))


async def answer(session: FakeSession) -> pb.CopyDone:
    async with asyncio.timeout(5):
        return (await session.incoming.get()).copy_done


async def test_a_load_scatters_exactly_the_named_blocks(started: FakeAgent, worker: MakeWorker) -> None:
    _, engine, session, _ = await begin(started, worker)
    before = [engine.blocks(group).copy() for group in (0, 1)]
    ring = fill(session, 1)
    ask(session, [(0, 5, 0), (1, 11, 2 * SLOT), (0, 7, RING_BYTES - SLOT)])
    done = await answer(session)
    assert (done.transfer, done.batch, list(done.failed)) == (101, 3, [])
    before[0][5] = ring[: samples.PAYLOAD]
    before[0][7] = ring[RING_BYTES - SLOT :][: samples.PAYLOAD]
    before[1][11] = ring[2 * SLOT :][: samples.PAYLOAD]
    for group in (0, 1):
        np.testing.assert_array_equal(engine.blocks(group), before[group])
    np.testing.assert_array_equal(session.ring_bytes(), ring)


async def test_a_save_gathers_into_the_ring_and_leaves_the_blocks_and_the_rest_of_the_ring_alone(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, engine, session, _ = await begin(started, worker)
    await client.save("s", samples.hashes(2), 0, 8, [[3, 4], [0, 2]], deadline=60)
    before = [engine.blocks(group).copy() for group in (0, 1)]
    ring = fill(session, 2)
    ask(session, [(0, 4, SLOT), (1, 2, 5 * SLOT)], kind=pb.SAVE, transfer=201)
    assert list((await answer(session)).failed) == []
    ring[SLOT:][: samples.PAYLOAD] = before[0][4]
    ring[5 * SLOT :][: samples.PAYLOAD] = before[1][2]
    np.testing.assert_array_equal(session.ring_bytes(), ring)
    for group in (0, 1):
        np.testing.assert_array_equal(engine.blocks(group), before[group])


@pytest.mark.parametrize(
    "item",
    [(0, 4, 0), (1, 9, 0), (2, 5, 0), (0, -1, 0), (0, 16, 0), (0, 5, RING_BYTES - 64), (0, 5, 2**63)],
    ids=[
        "other block",
        "masked block",
        "no such group",
        "negative",
        "past the pool",
        "past the ring",
        "far away",
    ],
)
async def test_an_item_outside_the_transfer_or_the_ring_is_answered_failed_and_touches_nothing(
    started: FakeAgent, worker: MakeWorker, item: tuple[int, int, int]
) -> None:
    _, engine, session, _ = await begin(started, worker)
    before = [engine.blocks(group).copy() for group in (0, 1)]
    ring = fill(session, 3)
    ask(session, [item, (0, 6, 0)])
    assert list((await answer(session)).failed) == [0]
    before[0][6] = ring[: samples.PAYLOAD]
    for group in (0, 1):
        np.testing.assert_array_equal(engine.blocks(group), before[group])


async def test_fenced_after_a_release_nothing_is_copied_any_more(
    started: FakeAgent, worker: MakeWorker
) -> None:
    gate = Gate()
    client, engine, session, transfer = await begin(started, worker, after=gate)
    fill(session, 4)
    ask(session, [(0, 5, 0), (0, 6, SLOT)])
    ask(session, [(0, 7, 2 * SLOT)])
    await asyncio.to_thread(gate.reached.wait, 5)
    # The thread stands before its first byte, and cannot be stopped there: the fence must not be claimed.
    assert await client.release(transfer=transfer, deadline=0.1) is FenceState.FENCE_UNCONFIRMED
    assert client.withheld_blocks == (frozenset({5, 6, 7}), frozenset({10, 11}))
    assert transfer.result().withheld
    before = [engine.blocks(group).copy() for group in (0, 1)]
    gate.open.set()
    assert await client.release(transfer=transfer, deadline=5) is FenceState.FENCED
    assert client.withheld_blocks == (frozenset(), frozenset())
    assert sorted([list((await answer(session)).failed) for _ in range(2)]) == [[0], [0, 1]]
    ask(session, [(0, 5, 0)])
    assert list((await answer(session)).failed) == [0]
    for group in (0, 1):
        np.testing.assert_array_equal(engine.blocks(group), before[group])


async def test_fenced_when_the_agent_dies_only_a_running_copy_withholds_blocks(
    started: FakeAgent, worker: MakeWorker
) -> None:
    gate = Gate()
    client, _, session, transfer = await begin(started, worker, after=gate)
    ask(session, [(0, 5, 0)])
    await asyncio.to_thread(gate.reached.wait, 5)
    idle = await client.load("idle", PLAN, 0, [[1, 2, 3], [1, 2, 3]], deadline=60)
    await started.stop()
    assert ((await transfer).withheld, (await idle).withheld) == (True, False)
    assert client.withheld_blocks == (frozenset({5, 6, 7}), frozenset({10, 11}))
    gate.open.set()
    assert await client.release(deadline=5) is FenceState.FENCED
    assert client.withheld_blocks == (frozenset(), frozenset())


async def test_a_copy_for_a_transfer_that_is_over_is_answered_failed_and_counted(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, engine, session, transfer = await begin(started, worker)
    session.send(transfer_done=pb.TransferDone(transfer=101, good=5))
    await transfer
    before = engine.blocks(0).copy()
    fill(session, 5)
    ask(session, [(0, 5, 0)])
    assert list((await answer(session)).failed) == [0]
    assert client.late_events == 1
    np.testing.assert_array_equal(engine.blocks(0), before)


async def test_a_copy_that_raises_is_answered_failed(started: FakeAgent, worker: MakeWorker) -> None:
    class Broken(Gate):
        def synchronize(self) -> None:
            raise RuntimeError("the device fell off")

    _, engine, session, _ = await begin(started, worker, after=Broken())
    before = engine.blocks(0).copy()
    ask(session, [(0, 5, 0), (0, 6, 0)])
    assert list((await answer(session)).failed) == [0, 1]
    np.testing.assert_array_equal(engine.blocks(0), before)
