"""Small parts of the server: refusals, modes, outbox, sessions, drain, preflight, status."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import grpc
import pytest

from kvpool_agent.config import AgentConfig, EngineMode, Integrity
from kvpool_agent.coordinator import PlanError
from kvpool_agent.errors import CallRefused, Refusal, SessionRefused, StartFault
from kvpool_agent.server.drain import drain
from kvpool_agent.server.preflight import CPU_BUILD, CUDA_BUILDS, check_mooncake, installed, raise_file_limit
from kvpool_agent.server.refusals import status_of
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import Outbox, Session, WorkerSession
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.server.worker import COPY, MAPPED, choose_mode
from kvpool_agent.store.errors import StoreDeadline, StoreUnavailable
from kvpool_agent.store.protocol import StoreHealth
from kvpool_agent.telemetry import names
from kvpool_agent.transfer import errors as transfer
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import IdentityError

CONFIG = AgentConfig.model_validate(
    {
        "pool": {"namespace": "default", "name": "pool"},
        "node": {"name": "n", "ip": "127.0.0.1"},
        "socket": {"directory": "/x"},
        "store": {"masterAddress": "m:1"},
    }
)


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CallRefused(Refusal.INVALID, "x"), grpc.StatusCode.INVALID_ARGUMENT),
        (CallRefused(Refusal.UNKNOWN_TOKEN, "x"), grpc.StatusCode.UNAUTHENTICATED),
        (CallRefused(Refusal.WRONG_ROLE, "x"), grpc.StatusCode.PERMISSION_DENIED),
        (CallRefused(Refusal.FOREIGN, "x"), grpc.StatusCode.FAILED_PRECONDITION),
        (CallRefused(Refusal.BUSY, "x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (CallRefused(Refusal.DRAINING, "x"), grpc.StatusCode.ABORTED),
        (transfer.BadBlocks("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (transfer.BadPlan("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (transfer.BlocksBusy("x"), grpc.StatusCode.ABORTED),
        (transfer.QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (transfer.Draining("x"), grpc.StatusCode.ABORTED),
        (transfer.SessionClosed("x"), grpc.StatusCode.ABORTED),
        (transfer.RingBroken("x"), grpc.StatusCode.ABORTED),
        (PlanError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (IdentityError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (StoreDeadline("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (StoreUnavailable("x"), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_every_error_has_its_status_and_keeps_its_words(error: Exception, code: grpc.StatusCode) -> None:
    assert status_of(error) == (code, "x")


def test_every_refusal_and_every_transfer_error_is_mapped() -> None:
    for kind in Refusal:
        status_of(CallRefused(kind, "x"))
    for name in dir(transfer):
        error = getattr(transfer, name)
        if isinstance(error, type) and issubclass(error, transfer.TransferError):
            assert status_of(error("x"))[0] != grpc.StatusCode.INTERNAL, name


def test_an_unforeseen_error_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        code, text = status_of(KeyError("/secret/path"))
    assert code == grpc.StatusCode.INTERNAL
    assert "secret" not in text
    assert text.rpartition(" ")[2] in caplog.text


# ---------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("asked", "allowed", "storages", "mode", "falls_back", "why"),
    [
        (pb.MODE_UNSPECIFIED, EngineMode.AUTO, 1, MAPPED, True, ""),
        (pb.MODE_UNSPECIFIED, EngineMode.AUTO, 0, COPY, False, "no storages"),
        (pb.MODE_UNSPECIFIED, EngineMode.MAPPED, 1, MAPPED, False, ""),
        (pb.MODE_UNSPECIFIED, EngineMode.COPY, 1, COPY, False, ""),
        (pb.MAPPED, EngineMode.AUTO, 1, MAPPED, False, ""),
        (pb.MAPPED, EngineMode.COPY, 1, COPY, False, "engines.mode is Copy"),
        (pb.COPY, EngineMode.AUTO, 1, COPY, False, ""),
        (pb.COPY, EngineMode.COPY, 0, COPY, False, ""),
    ],
)
def test_an_engine_gets_the_mode_that_it_names_or_is_told_why_not(
    asked: pb.Mode.ValueType, allowed: EngineMode, storages: int, mode: str, falls_back: bool, why: str
) -> None:
    choice = choose_mode(asked, allowed, storages=storages)
    assert (choice.mode, choice.may_fall_back) == (mode, falls_back)
    assert bool(choice.reason) == bool(why)
    assert why in choice.reason


@pytest.mark.parametrize(
    ("asked", "allowed", "storages", "reason"),
    [
        (pb.COPY, EngineMode.MAPPED, 1, "ModeNotAllowed"),
        (pb.MAPPED, EngineMode.AUTO, 0, "StoragesMissing"),
        (pb.MODE_UNSPECIFIED, EngineMode.MAPPED, 0, "StoragesMissing"),
    ],
)
def test_a_mode_that_cannot_be_is_refused(
    asked: pb.Mode.ValueType, allowed: EngineMode, storages: int, reason: str
) -> None:
    with pytest.raises(SessionRefused) as caught:
        choose_mode(asked, allowed, storages=storages)
    assert caught.value.reason == reason


# ------------------------------------------------------------------------------------------------------- sessions


class FakeChannel:
    def __init__(self, token: bytes) -> None:
        self.token = token
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeManager:
    """A manager whose transfers end when the test says so."""

    def __init__(self) -> None:
        self.in_flight = 1
        self.idle = asyncio.Event()
        self.closed = asyncio.Event()
        self.fails = False

    async def drain(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(self.idle.wait(), max(0.0, deadline - loop.time()))
            self.in_flight = 0
        except TimeoutError:
            pass

    async def close(self) -> None:
        self.closed.set()
        self.in_flight = 0
        if self.fails:
            raise RuntimeError("manager cannot close")


class FakeParts:
    """What a worker session holds, counting its ends in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.manager = FakeManager()
        self.mode = "mapped"
        self.copying = None
        self.rank = 0
        self.loader = self
        self.memory = _Memory(self.order)

    async def close(self) -> None:
        self.order.append("loader")


class _Memory:
    def __init__(self, order: list[str]) -> None:
        self._order = order

    def close(self) -> None:
        self._order.append("ring")


def common(number: int, engine: str = "e") -> Any:
    return {
        "number": number,
        "engine_id": engine,
        "keyspace": None,
        "coordinator": None,
        "channel": FakeChannel(number.to_bytes(16, "big")),
        "outbox": Outbox(),
    }


def worker(number: int, engine: str = "e") -> WorkerSession:
    return WorkerSession(cast("Any", FakeParts()), **common(number, engine))


def parts_of(session: WorkerSession) -> FakeParts:
    return cast("FakeParts", session._parts)


def opened(sessions: Sessions, session: Session) -> Session:
    assert sessions.reserve() is not None
    sessions.add(session)
    return session


async def test_events_keep_their_order_and_an_unread_client_is_cut_off_bounded() -> None:
    outbox = Outbox(limit=2)
    for transfer_id in (1, 2, 3):
        outbox.put(pb.ServerEvent(transfer_done=pb.TransferDone(transfer=transfer_id)))
    assert outbox.overflowed.is_set()
    assert [(await outbox.get()).transfer_done.transfer for _ in range(2)] == [1, 2]
    getting = asyncio.ensure_future(outbox.get())
    await asyncio.sleep(0)
    assert not getting.done()
    outbox.put(pb.ServerEvent(draining=pb.Draining()))
    assert (await getting).HasField("draining")


async def test_a_session_ends_once_and_in_order_fenced() -> None:
    session = worker(1)
    session.end("first")
    session.end("second")
    await asyncio.gather(session.close(), session.close())
    assert session.end_reason == "first"
    assert parts_of(session).manager.closed.is_set()
    assert parts_of(session).order == ["loader", "ring"]
    assert cast("FakeChannel", session._channel).closed == 1


async def test_a_part_that_cannot_close_does_not_keep_the_others_open() -> None:
    session = worker(1)
    parts_of(session).manager.fails = True
    await session.close()
    assert parts_of(session).order == ["loader", "ring"]


async def test_transfers_that_cannot_be_ended_keep_the_descriptor_socket_open_fenced() -> None:
    session = worker(1)
    parts_of(session).manager.fails = True
    await session.close()
    # Its end would tell the client that the blocks are touched no more.
    assert cast("FakeChannel", session._channel).closed == 0


async def test_a_cancelled_caller_does_not_stop_the_end_of_a_session() -> None:
    session = worker(1)
    closing = asyncio.ensure_future(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await session.close()
    assert parts_of(session).order == ["loader", "ring"]


async def test_sessions_are_found_counted_and_bounded() -> None:
    sessions = Sessions(2)
    first = opened(sessions, Session(**common(1)))
    second = cast("WorkerSession", opened(sessions, worker(2)))
    assert sessions.reserve() is None
    assert sessions.find(first.token) is first
    assert sessions.find(b"other") is None
    assert sessions.workers_of("e") == [second]
    assert sessions.workers_of("f") == []
    assert sessions.counts() == {"scheduler": 1, "mapped": 1, "copy": 0}
    assert sessions.in_flight() == 1
    await sessions.close(first)
    assert sessions.find(first.token) is None
    assert sessions.reserve() == 3
    sessions.unreserve()
    await sessions.close_all("over")
    assert len(sessions) == 0
    assert second.end_reason == "over"


def health(**fields: Any) -> StoreHealth:
    known: dict[str, Any] = {
        "last_success_age": None, "master_reachable": False, "segment_mounted_bytes": 0, "pids": {}, "restarts": {}
    }  # fmt: skip
    return StoreHealth(**{**known, **fields})


async def test_a_drain_waits_for_transfers_and_then_ends_everything() -> None:
    sessions = Sessions(4)
    session = cast("WorkerSession", opened(sessions, worker(1)))
    status = AgentStatus(CONFIG, sessions, health)
    draining = asyncio.ensure_future(drain(status, sessions, seconds=30, hurry=asyncio.Event()))
    event = await session.outbox.get()
    assert event.draining.deadline_ms == 30_000
    assert status.draining
    assert status.not_ready() == "draining"
    await asyncio.sleep(0)
    assert not draining.done()
    parts_of(session).manager.idle.set()
    await asyncio.wait_for(draining, 5)
    assert parts_of(session).order == ["loader", "ring"]


@pytest.mark.parametrize("before", [True, False])
async def test_a_second_signal_ends_the_wait(before: bool) -> None:
    sessions = Sessions(4)
    session = cast("WorkerSession", opened(sessions, worker(1)))
    hurry = asyncio.Event()
    if before:
        hurry.set()
    draining = asyncio.ensure_future(
        drain(AgentStatus(CONFIG, sessions, health), sessions, seconds=600, hurry=hurry)
    )
    await session.outbox.get()
    hurry.set()
    await asyncio.wait_for(draining, 5)
    assert parts_of(session).order == ["loader", "ring"]


async def test_a_drain_ends_at_its_timeout_bounded() -> None:
    sessions = Sessions(4)
    session = cast("WorkerSession", opened(sessions, worker(1)))
    status = AgentStatus(CONFIG, sessions, health)
    await asyncio.wait_for(drain(status, sessions, seconds=0.05, hurry=asyncio.Event()), 5)
    assert parts_of(session).order == ["loader", "ring"]


# --------------------------------------------------------------------------------------------------------- status


def test_what_is_not_known_is_not_zero() -> None:
    status = AgentStatus(CONFIG, Sessions(1), health)
    assert not status.message().HasField("store_last_success_age_s")
    assert names.STORE_AGE not in status.gauges()
    assert status.not_ready() == "starting"
    status.serving = True
    assert status.not_ready() == ""
    known = AgentStatus(CONFIG, Sessions(1), lambda: health(last_success_age=1.5, master_reachable=True))
    assert known.gauges()[names.STORE_AGE] == {(): 1.5}
    assert known.message().store_reachable
    assert known.message().store_last_success_age_s == 1.5
    just_now = AgentStatus(CONFIG, Sessions(1), lambda: health(last_success_age=0.0)).message()
    assert just_now.HasField("store_last_success_age_s"), "0 s is known, and not the same as unknown"


@pytest.mark.parametrize("integrity", list(Integrity))
def test_the_status_says_how_loaded_chunks_are_trusted(integrity: Integrity) -> None:
    cache = CONFIG.cache.model_copy(update={"integrity": integrity})
    config = CONFIG.model_copy(update={"cache": cache})
    assert AgentStatus(config, Sessions(1), health).message().integrity == integrity.value


# ------------------------------------------------------------------------------------------------------ preflight


@pytest.mark.parametrize(
    ("builds", "libcuda", "text"),
    [
        (set(), True, "not installed"),
        ({CPU_BUILD, CUDA_BUILDS[0]}, True, "both installed"),
        ({CUDA_BUILDS[0]}, False, r"libcuda\.so\.1"),
        ({CUDA_BUILDS[1]}, False, r"kvpool\[agent-cpu\]"),
    ],
)
def test_a_mooncake_that_cannot_be_imported_is_told_in_words(
    builds: set[str], libcuda: bool, text: str
) -> None:
    with pytest.raises(StartFault, match=text):
        check_mooncake(lambda name: name in builds, lambda: libcuda)


def test_one_build_of_mooncake_is_enough() -> None:
    check_mooncake(lambda name: name == CPU_BUILD, lambda: False)
    check_mooncake(lambda name: name == CUDA_BUILDS[0], lambda: True)
    assert installed("pytest")
    assert not installed("kvpool-no-such-distribution")


def test_the_file_limit_is_raised_to_what_is_allowed() -> None:
    assert raise_file_limit() >= 1024
    assert raise_file_limit() == raise_file_limit()
