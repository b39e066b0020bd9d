"""The synchronous client: the same answers, on the caller's own thread, within the caller's own deadline."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_engine.client import SchedulerClient, WorkerClient
from kvpool_engine.loop import shared_loop
from kvpool_engine.types import ChunkFailure, FailReason, FenceState, MissReason, Mode
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples
from unit.engine.conftest import FAST
from unit.engine.fake_agent import Call, FakeAgent

PLAN = samples.plan([[1, 1, 1], [0, 1, 1]], 12)
IDS = [[5, 6, 7], [9, 10, 11]]


@pytest.fixture
def fake(socket_dir: Path) -> Iterator[FakeAgent]:
    """The agent runs on the clients' own loop: gRPC's asyncio layer wants one loop a process."""
    loop = shared_loop()
    agent = loop.run(make(socket_dir), deadline=10)
    yield agent
    loop.run(agent.stop(), deadline=10)


async def make(folder: Path) -> FakeAgent:
    agent = FakeAgent(folder)

    async def lookup(request: Any, call: Call) -> pb.LookupResponse:
        return pb.LookupResponse(plan=PLAN.message)

    async def load(request: Any, call: Call) -> pb.LoadResponse:
        session = await agent.sessions.get()
        session.send(transfer_done=pb.TransferDone(transfer=101, good=5, bytes=320, resume_length=12))
        return pb.LoadResponse(transfer=101, chunks=5)

    async def save(request: Any, call: Call) -> pb.SaveResponse:
        return pb.SaveResponse(skipped="nothing new")

    async def resume(request: Any, call: Call) -> pb.ResumeResponse:
        return pb.ResumeResponse(resume_length=8)

    async def status(request: Any, call: Call) -> pb.StatusResponse:
        return pb.StatusResponse(pool="ns.pool")

    agent.answers |= {"Lookup": lookup, "Load": load, "Save": save, "Resume": resume, "Status": status}
    await agent.start()
    return agent


def test_a_scheduler_and_a_worker_do_their_work_synchronously(fake: FakeAgent) -> None:
    with SchedulerClient(fake.folder, samples.identity(), "e", backoff=FAST) as scheduler:
        scheduler.connect(5)
        shared_loop().run(fake.sessions.get(), deadline=5)
        plan = scheduler.lookup("r", samples.hashes(3), 12)
        assert plan == PLAN
        assert scheduler.resume("r", plan, 0, [ChunkFailure(0, 2, FailReason.EVICTED)]) == 8
        assert scheduler.status().pool == "ns.pool"
        assert scheduler.release("r") is FenceState.FENCED
        engine = samples.engine()
        with WorkerClient(
            fake.folder, samples.identity(), "e", engine.declaration, mode=Mode.MAPPED, backoff=FAST
        ) as worker:
            worker.connect(5)
            assert worker.mode is Mode.MAPPED
            result = worker.load("r", plan, 0, IDS).wait(5)
            assert (result.good, result.bytes, result.resume_length, result.ok) == (5, 320, 12, True)
            assert worker.save("r", samples.hashes(3), 0, 12, IDS).wait(5).skipped == "nothing new"
            assert worker.release() is FenceState.FENCED
            assert worker.withheld_blocks == (frozenset(), frozenset())
    assert not scheduler.attached


def test_a_dead_agent_answers_no_cache(fake: FakeAgent) -> None:
    scheduler = SchedulerClient(fake.folder / "nowhere", samples.identity(), "e", backoff=FAST)
    assert scheduler.lookup("r", samples.hashes(3), 12).miss_reason is MissReason.AGENT_UNAVAILABLE
    assert scheduler.close() is FenceState.FENCED


def test_bounded_a_stuck_loop_does_not_hold_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_engine.loop.GRACE", 0.05)

    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        shared_loop().run(stuck(), deadline=0.05)


def test_the_synchronous_client_refuses_to_wait_for_itself() -> None:
    async def inside() -> str:
        with pytest.raises(RuntimeError, match=r"kvpool_engine\.aio"):
            shared_loop().run(asyncio.sleep(0), deadline=1)
        return threading.current_thread().name

    assert shared_loop().run(inside(), deadline=5) == "kvpool-client"
