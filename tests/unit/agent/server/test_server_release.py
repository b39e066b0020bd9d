"""FENCED towards the scheduler while a rank's session ends: a session is answered for until its blocks are let go."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import override

from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.service import AgentService
from kvpool_agent.server.session import Outbox, Session, SessionArguments, WorkerParts, WorkerSession
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc
from support.transfers import PoolWrapper, Rig


class Slow(PoolWrapper):
    """Stands inside a block until it is let go on."""

    entered: threading.Event
    leave: threading.Event
    inside_now = 0

    @override
    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        Slow.inside_now += 1
        Slow.entered.set()
        assert Slow.leave.wait(10)
        super().scatter(group, block, payload)
        Slow.inside_now -= 1


class Channel:
    """A descriptor socket."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Scene:
    """One engine of one rank and its scheduler, on one agent."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sessions = Sessions(2)
        self.outbox = Outbox()
        self.worker_channel, self.scheduler_channel = Channel(b"w" * 16), Channel(b"s" * 16)
        parts = WorkerParts(0, "mapped", rig.ring_memory, rig.loader, rig.manager, None)
        self.worker = WorkerSession(parts, **self._common(1, self.worker_channel))
        self.scheduler = Session(**self._common(2, self.scheduler_channel))
        for session in (self.worker, self.scheduler):
            assert self.sessions.reserve() is not None
            self.sessions.add(session)
        unused = cast("Any", None)
        self.service = AgentService(
            sessions=self.sessions,
            descriptors=unused,
            streams=unused,
            lookups=unused,
            guard=unused,
            status=unused,
            metrics=unused,
            cache=cast("Any", SimpleNamespace(load_timeout=10.0)),
            max_lookups=1,
        )

    async def release(self, milliseconds: int) -> pb.FenceState.ValueType:
        """The scheduler asks for its request."""
        metadata = ((rpc.TOKEN_METADATA, self.scheduler.token.hex()),)
        context = cast("Any", SimpleNamespace(invocation_metadata=lambda: metadata))
        request = pb.ReleaseRequest(request_id="r", deadline_ms=milliseconds)
        return (await self.service.release(request, context)).state

    def _common(self, number: int, channel: Channel) -> SessionArguments:
        return SessionArguments(
            number=number,
            engine_id="e",
            keyspace=self.rig.keyspace,
            coordinator=self.rig.coordinator,
            channel=cast("Any", channel),
            outbox=self.outbox,
        )


async def test_fenced_a_release_sees_the_copies_of_a_session_that_is_just_ending() -> None:
    Slow.entered, Slow.leave = threading.Event(), threading.Event()
    rig = await Rig.make(pool=Slow)
    rig.stock(96)
    scene = Scene(rig)
    rig.manager.start_load(rig.load_job(96))
    assert await asyncio.to_thread(Slow.entered.wait, 5)
    closing = asyncio.ensure_future(scene.sessions.close(scene.worker))  # its stream broke
    await asyncio.sleep(0)
    assert scene.sessions.find(scene.worker.token) is None, "it takes no calls any more"
    state = await scene.release(50)
    assert (pb.FenceState.Name(state), Slow.inside_now > 0) == ("FENCE_UNCONFIRMED", True)
    Slow.leave.set()
    assert (await scene.release(5_000), Slow.inside_now) == (pb.FENCED, 0)
    await closing
    assert scene.worker_channel.closed
    assert await scene.release(50) == pb.FENCED
    assert scene.sessions.workers_of("e") == []
    rig.engine.close()


async def test_fenced_a_session_whose_end_cannot_be_known_is_answered_for_as_long_as_the_agent_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await Rig.make()
    scene = Scene(rig)
    close = rig.mover.close

    async def broken() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(rig.mover, "close", broken)
    await scene.sessions.close(scene.worker)
    assert any("cannot be known" in record.getMessage() for record in caplog.records)
    assert pb.FenceState.Name(await scene.release(50)) == "FENCE_UNCONFIRMED"
    assert not scene.worker_channel.closed
    # It holds memory and a mapping: it counts towards the limit (BOUNDED).
    assert (len(scene.sessions), scene.sessions.reserve()) == (2, None)
    await close()
    rig.engine.close()


async def test_an_end_that_nobody_waits_for_any_more_still_takes_the_session_off_the_list() -> None:
    rig = await Rig.make()
    scene = Scene(rig)
    waiting = asyncio.ensure_future(scene.sessions.close(scene.worker))
    await asyncio.sleep(0)
    waiting.cancel()
    await scene.worker.close()
    assert scene.sessions.workers_of("e") == []
    rig.engine.close()
