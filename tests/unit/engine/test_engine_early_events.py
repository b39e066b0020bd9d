"""FENCED, copy mode: CopyWanted and TransferDone both overtake the answer to their Load; no byte moves unseen."""

import asyncio
from typing import Any

import numpy as np

from kvpool_engine.types import FailReason, FenceState, Mode
from kvpool_engine.worker_session import WorkerSession
from kvpool_wire import agent_pb2 as pb
from unit.engine.conftest import MakeWorker
from unit.engine.fake_agent import Call, FakeAgent
from unit.engine.test_engine_copy_mode import IDS, PLAN, Gate, answer, ask, fill


async def test_fenced_a_copy_that_begins_with_the_report_of_its_load_withholds_the_blocks(
    agent: FakeAgent, worker: MakeWorker, monkeypatch: Any
) -> None:
    let_answer, early = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        await let_answer.wait()
        return pb.LoadResponse(transfer=101, chunks=5)

    real = WorkerSession.handle

    def seen(self: WorkerSession, event: pb.ServerEvent) -> None:
        real(self, event)
        early.release()

    monkeypatch.setattr(WorkerSession, "handle", seen)
    agent.mode = pb.COPY
    agent.answers["Load"] = slow
    client, engine = await worker(Mode.COPY)
    session = await agent.sessions.get()
    gate = Gate()
    loading = asyncio.ensure_future(client.load("r", PLAN, 0, IDS, deadline=60, after=gate))
    fill(session, 9)
    ask(session, [(0, 5, 0)])
    failed = [pb.ChunkFailure(group=0, chunk=chunk, reason=pb.CANCELLED) for chunk in range(3)]
    failed += [pb.ChunkFailure(group=1, chunk=chunk, reason=pb.CANCELLED) for chunk in (1, 2)]
    session.send(transfer_done=pb.TransferDone(transfer=101, kind=pb.LOAD, request_id="r", failed=failed))
    # Both are here before the call is answered, as on a loop that was busy for a moment.
    async with asyncio.timeout(5):
        await early.acquire()
        await early.acquire()
    before = engine.blocks(0).copy()
    let_answer.set()
    result = await (await loading)

    assert {item.reason for item in result.failed} == {FailReason.CANCELLED}
    free = 5 not in client.withheld_blocks[0]
    gate.open.set()
    assert await client.release(deadline=5) is FenceState.FENCED
    if free:
        np.testing.assert_array_equal(engine.blocks(0), before)
    assert result.withheld != free
    assert client.withheld_blocks == (frozenset(), frozenset())
    assert list((await answer(session)).failed) == [0], "what had not begun does not begin after the report"
    np.testing.assert_array_equal(engine.blocks(0), before)
