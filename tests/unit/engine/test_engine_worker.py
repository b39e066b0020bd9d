"""The worker's side: every load ends with each chunk loaded or reported, and no block is free before that is known."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from kvpool_agent.server.refusals import status_of
from kvpool_agent.transfer.errors import BlocksBusy, Draining, QueueFull, RingBroken, SessionClosed
from kvpool_engine.aio import WorkerClient
from kvpool_engine.errors import AgentUnavailableError, RequestRejectedError
from kvpool_engine.tensors import Declaration
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import ChunkFailure, FailReason, FenceState, Mode, TransferKind
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples
from unit.engine.conftest import MakeWorker
from unit.engine.fake_agent import Call, FakeAgent, Refusal

PLAN = samples.plan([[1, 1, 1], [0, 1, 1]], 12)
IDS = [[5, 6, 7], [9, 10, 11]]
ALL = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
HELD = (frozenset({5, 6, 7}), frozenset({10, 11}))
FREE: tuple[frozenset[int], ...] = (frozenset(), frozenset())


@pytest.fixture
def started(agent: FakeAgent) -> FakeAgent:
    """The agent begins what it is asked for: transfers 101, 102, ... in the order of the calls."""

    async def load(request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        return pb.LoadResponse(transfer=100 + len(agent.called("Load")), chunks=5)

    async def save(request: pb.SaveRequest, call: Call) -> pb.SaveResponse:
        return pb.SaveResponse(transfer=200 + len(agent.called("Save")), chunks=4)

    agent.answers |= {"Load": load, "Save": save}
    return agent


async def never(request: Any, call: Call) -> Any:
    await asyncio.Event().wait()


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until `holds`; for states that have no event of their own."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - what the client shows has no event
            await asyncio.sleep(0.005)


async def load(client: WorkerClient, request: str = "r", **options: Any) -> Transfer:
    return await client.load(request, PLAN, 0, IDS, **options)


def failed_chunks(transfer: Transfer) -> list[tuple[int, int]]:
    return [(item.group, item.chunk) for item in transfer.result().failed]


async def test_attach_declares_the_tensors_and_passes_one_descriptor_per_storage(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, engine = await worker()
    session = await agent.sessions.get()
    sent = session.request.worker
    assert (len(sent.storages), sent.mode, list(sent.num_blocks), list(sent.null_blocks)) == (
        1,
        pb.MAPPED,
        [16, 16],
        [0, 0],
    )
    assert [(t.group, t.layer, t.offset) for t in sent.tensors] == [(0, "full", 0), (1, "window", 16 * 64)]
    (fd,) = session.storages
    engine.window[3] = 1.5
    assert np.frombuffer(os.pread(fd, samples.PAYLOAD, (16 + 3) * 64), np.float16).tolist() == [1.5] * 32
    assert client.mode is Mode.MAPPED


async def test_copy_mode_sends_no_storages_and_auto_becomes_copy_for_private_memory(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    agent.mode = pb.COPY
    for mode, shared in ((Mode.COPY, True), (Mode.AUTO, False)):
        client, _ = await worker(mode, shared=shared)
        session = await agent.sessions.get()
        assert (session.request.worker.mode, len(session.request.worker.storages)) == (pb.COPY, 0)
        assert len(session.request.worker.tensors) == 2
        assert client.mode is Mode.COPY


async def test_a_load_ends_with_the_agents_report(started: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await load(client)
    (request,) = started.called("Load")
    assert request.plan == PLAN.message
    assert [np.frombuffer(group.ids, "<i4").tolist() for group in request.blocks] == IDS
    assert request.ordering.synchronised
    assert not transfer.done()
    session.send(
        transfer_done=pb.TransferDone(
            transfer=101,
            kind=pb.LOAD,
            request_id="r",
            good=4,
            bytes=256,
            resume_length=8,
            failed=[pb.ChunkFailure(group=0, chunk=2, reason=pb.EVICTED)],
        )
    )
    result = await transfer
    assert (result.transfer, result.kind, result.good, result.bytes) == (101, TransferKind.LOAD, 4, 256)
    assert result.failed == (ChunkFailure(0, 2, FailReason.EVICTED),)
    assert (result.resume_length, result.ok, result.withheld) == (8, False, False)
    assert client.withheld_blocks == FREE


async def test_a_report_that_overtakes_the_answer_to_its_own_call_is_not_lost(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await agent.sessions.get()
    answer = asyncio.Event()

    async def slow(request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        session.send(transfer_done=pb.TransferDone(transfer=101, good=5))
        # A mark behind it in the same stream: once it has arrived, so has the report.
        session.send(draining=pb.Draining(deadline_ms=1))
        await answer.wait()
        return pb.LoadResponse(transfer=101, chunks=5)

    agent.answers["Load"] = slow
    loading = asyncio.ensure_future(load(client))
    await until(lambda: client.draining)
    answer.set()
    assert (await (await loading)).good == 5
    assert client.late_events == 0


async def test_a_late_report_is_dropped_and_counted(started: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    session.send(transfer_done=pb.TransferDone(transfer=7, good=5))
    await until(lambda: client.late_events == 1)


async def test_bounded_a_load_without_a_report_fails_whole_at_its_deadline_and_its_blocks_are_withheld(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    started.answers["Release"] = never
    transfer = await load(client, deadline=0.1)
    result = await transfer
    assert failed_chunks(transfer) == ALL
    assert {item.reason for item in result.failed} == {FailReason.TIMED_OUT}
    assert (result.withheld, result.resume_length) == (True, 0)
    assert client.withheld_blocks == HELD
    # The late report proves that the agent is done with the blocks; its verdict comes too late.
    session.send(transfer_done=pb.TransferDone(transfer=101, good=5))
    await until(lambda: client.withheld_blocks == FREE)
    assert (transfer.result() is result, client.late_events) == (True, 1)


async def test_fenced_withheld_blocks_are_free_once_the_agent_says_so(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    states = iter([pb.FENCE_UNCONFIRMED, pb.FENCE_UNCONFIRMED, pb.FENCED])

    async def release(request: pb.ReleaseRequest, call: Call) -> pb.ReleaseResponse:
        assert request.transfer == 101
        return pb.ReleaseResponse(state=next(states))

    started.answers["Release"] = release
    transfer = await load(client, deadline=0.05)
    await transfer
    assert client.withheld_blocks == HELD
    await until(lambda: client.withheld_blocks == FREE)
    assert len(started.called("Release")) == 3
    started.answers["Release"] = never


async def test_fenced_a_call_that_was_never_answered_withholds_its_blocks(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    agent.answers |= {"Load": never, "Release": never}
    transfer = await load(client, deadline=0.05)
    assert failed_chunks(transfer) == ALL
    assert client.withheld_blocks == HELD


async def test_fenced_a_cancelled_call_withholds_its_blocks(agent: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()
    agent.answers |= {"Load": never, "Release": never}
    loading = asyncio.ensure_future(load(client))
    await until(lambda: bool(agent.called("Load")))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert client.withheld_blocks == HELD


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION])
async def test_a_refused_load_raises_and_withholds_nothing(
    agent: FakeAgent, worker: MakeWorker, code: Any
) -> None:
    client, _ = await worker()

    async def answer(request: Any, call: Call) -> Any:
        raise Refusal(code, "block 5 of group 0 is busy")

    agent.answers["Load"] = answer
    with pytest.raises(RequestRejectedError, match="block 5 of group 0 is busy"):
        await load(client)
    assert client.withheld_blocks == FREE


async def test_loaded_or_reported_a_number_given_twice_loses_neither_transfer(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    async def answer(request: Any, call: Call) -> pb.LoadResponse:
        return pb.LoadResponse(transfer=101, chunks=5)

    agent.answers["Load"] = answer
    client, _ = await worker()
    session = await agent.sessions.get()
    first, second = await load(client, deadline=60), await load(client, deadline=60)
    assert "two transfers" in second.result().error
    assert failed_chunks(second) == ALL
    session.send(transfer_done=pb.TransferDone(transfer=101, good=5))
    assert (await first).good == 5


@pytest.mark.parametrize(
    "refused",
    [QueueFull("x"), BlocksBusy("x"), Draining("x"), SessionClosed("x"), RingBroken("x")],
    ids=lambda error: type(error).__name__,
)
async def test_what_an_agent_refuses_for_a_while_fails_the_load_without_an_exception_and_withholds_nothing(
    agent: FakeAgent, worker: MakeWorker, refused: Exception
) -> None:
    """The agent says these before it touches anything, and a race is enough to get one: the engine recomputes."""
    client, _ = await worker()

    async def answer(request: Any, call: Call) -> Any:
        raise Refusal(status_of(refused)[0], "not now")

    agent.answers["Load"] = answer
    transfer = await load(client)
    assert failed_chunks(transfer) == ALL
    assert "not now" in transfer.result().error
    assert (transfer.result().withheld, client.withheld_blocks) == (False, FREE)


WRONG_REPORTS = [
    ({"good": 4}, "4 chunks good and 0 failed, 5 were to be loaded"),
    ({"good": 6}, "6 chunks good and 0 failed"),
    ({"good": 4, "failed": [(0, 1), (0, 1)]}, "4 chunks good and 2 failed"),
    ({"good": 3, "failed": [(0, 1), (0, 1)]}, "3 chunks good and 2 failed"),
    ({"good": 4, "failed": [(1, 0)]}, "chunk 0 of group 1, which was not to be loaded"),
    ({"good": 4, "failed": [(7, 0)]}, "chunk 0 of group 7, which was not to be loaded"),
]


@pytest.mark.parametrize(("report", "message"), WRONG_REPORTS, ids=[message for _, message in WRONG_REPORTS])
async def test_loaded_or_reported_a_report_that_leaves_a_chunk_out_fails_every_chunk(
    started: FakeAgent, worker: MakeWorker, report: dict[str, Any], message: str
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await load(client, deadline=60)
    failed = [pb.ChunkFailure(group=g, chunk=c, reason=pb.EVICTED) for g, c in report.get("failed", ())]
    session.send(
        transfer_done=pb.TransferDone(transfer=101, good=report["good"], failed=failed, resume_length=12)
    )
    result = await transfer
    assert message in result.error
    assert (failed_chunks(transfer), result.good, result.resume_length) == (ALL, 0, 0)
    assert client.withheld_blocks == FREE


async def test_fenced_on_a_device_blocks_are_withheld_until_it_is_synchronised_although_the_process_is_gone(
    started: FakeAgent, worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a dead process had queued on the device may still run; only the device itself knows when it is over."""
    reached, over = threading.Event(), threading.Event()

    def synchronise(self: Declaration) -> None:
        reached.set()
        assert over.wait(10)

    monkeypatch.setattr(Declaration, "on_device", True)
    monkeypatch.setattr(Declaration, "synchronise", synchronise)
    client, _ = await worker()
    transfer = await load(client, deadline=60)
    started.greet_nobody()
    await started.kill_writer()
    result = await transfer
    assert (result.withheld, client.withheld_blocks) == (True, HELD)
    assert await asyncio.to_thread(reached.wait, 5)
    assert client.withheld_blocks == HELD
    over.set()
    await until(lambda: client.withheld_blocks == FREE)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([[5, 6, 7]], "block ids of 1 groups"), ([[5, 6], [9, 10, 11]], "group 0: 2 block ids")],
)
async def test_block_ids_that_do_not_fit_the_plan_are_refused_before_they_travel(
    started: FakeAgent, worker: MakeWorker, ids: list[list[int]], message: str
) -> None:
    client, _ = await worker()
    with pytest.raises(ValueError, match=message):
        await client.load("r", PLAN, 0, ids)
    assert not started.called("Load")


async def test_a_start_inside_the_hit_fails_only_what_was_to_be_loaded(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    await agent.stop()
    await until(lambda: not client.attached)
    transfer = await client.load("r", PLAN, 8, [[7], [11]])
    assert failed_chunks(transfer) == [(0, 2), (1, 2)]
    assert transfer.result().resume_length == 8
    inside = await client.load("r", PLAN, 6, [[6, 7], [10, 11]])
    assert failed_chunks(inside) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert inside.result().resume_length == 0
    nothing = await client.load("r", samples.plan([[0], [0]], 4), 0, [[1], [1]])
    assert (nothing.result().ok, nothing.result().resume_length) == (True, 4)


async def broken(agent: FakeAgent, client: WorkerClient) -> None:
    """The agent's sockets are gone, its writing process is not."""
    await agent.vanish()
    await until(lambda: not client.attached)


async def test_fenced_when_the_agent_dies_blocks_are_withheld_until_its_process_is_gone(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    transfer = await load(client, deadline=60)
    saving = await client.save("s", samples.hashes(2), 0, 8, [[1, 2], [0, 3]], deadline=60)
    await broken(started, client)
    result = await transfer
    assert failed_chunks(transfer) == ALL
    assert (result.withheld, result.ok, (await saving).ok) == (True, False, False)
    # A save's blocks as well: read after they were reused, they would be stored under the wrong key.
    held = (HELD[0] | {1, 2}, HELD[1] | {3})
    assert client.withheld_blocks == held
    assert await client.release(request_id="r", deadline=0.05) is FenceState.FENCE_UNCONFIRMED
    assert client.withheld_blocks == held
    await started.kill_writer()
    assert await client.release(request_id="r", deadline=5) is FenceState.FENCED
    await until(lambda: client.withheld_blocks == FREE)


async def test_fenced_when_the_agent_lives_on_its_closed_descriptor_socket_frees_the_blocks(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await load(client, deadline=60)
    session.end()
    await transfer
    await started.sessions.get()
    await client.connect(5)
    assert client.withheld_blocks == HELD, "a new session proves nothing about the old one"
    session.let_go()
    await until(lambda: client.withheld_blocks == FREE)


async def test_events_of_an_old_session_do_not_reach_the_new_one(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    old = await started.sessions.get()
    lost = await load(client, deadline=60)
    await started.restart()
    await lost
    new = await started.sessions.get()
    await client.connect(5)
    started.calls.clear()  # so that the new agent gives the same number again
    again = await load(client, "again", deadline=60)
    old.send(transfer_done=pb.TransferDone(transfer=101, good=5, bytes=1))
    new.send(transfer_done=pb.TransferDone(transfer=101, good=5, bytes=2))
    assert (await again).bytes == 2
    assert not lost.result().good


async def test_without_an_agent_saves_are_skipped_and_loads_fail_at_once(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    await agent.stop()
    await until(lambda: not client.attached)
    async with asyncio.timeout(1):
        saving = await client.save("s", samples.hashes(2), 0, 8, [[1, 2], [2, 3]], deadline=60)
        loading = await load(client, deadline=60)
    assert saving.result().skipped == "no session with the agent"
    assert failed_chunks(loading) == ALL
    assert client.withheld_blocks == FREE


async def test_a_save_sends_what_it_needs_and_reports_what_was_stored(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await client.save(
        "r", samples.hashes(9), 4, 14, [[2, 3], [4, 5]], num_prompt_tokens=30, attempt=7
    )
    (request,) = started.called("Save")
    assert (request.start, request.end, request.num_prompt_tokens, request.attempt) == (4, 14, 30, 7)
    assert request.hashes == b"".join(samples.hashes(4))
    session.send(
        transfer_done=pb.TransferDone(
            transfer=201,
            good=1,
            already_stored=1,
            bytes=64,
            failed=[pb.ChunkFailure(group=1, chunk=2, reason=pb.DISPLACED)],
        )
    )
    result = await transfer
    assert (result.good, result.already_stored, result.failed) == (
        1,
        1,
        (ChunkFailure(1, 2, FailReason.DISPLACED),),
    )


async def test_a_save_with_nothing_to_do_is_done_at_once(agent: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()

    async def answer(request: pb.SaveRequest, call: Call) -> pb.SaveResponse:
        return pb.SaveResponse(skipped="draining")

    agent.answers["Save"] = answer
    transfer = await client.save("r", samples.hashes(2), 0, 8, [[1, 2], [2, 3]])
    assert (transfer.result().transfer, transfer.result().skipped) == (0, "draining")


async def test_no_save_after_failure_holds_across_agents(started: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    failed = await load(client)
    session.send(
        transfer_done=pb.TransferDone(
            transfer=101,
            good=4,
            resume_length=4,
            failed=[pb.ChunkFailure(group=0, chunk=1, reason=pb.CORRUPT)],
        )
    )
    await failed
    await started.restart()
    await until(lambda: not client.attached)
    await client.connect(5)
    ids = [[1, 2, 3], [4, 5, 6]]
    await client.save("r", samples.hashes(3), 0, 12, ids)
    (cut,) = started.called("Save")
    assert cut.end == 4
    assert [np.frombuffer(group.ids, "<i4").tolist() for group in cut.blocks] == [[1], [4]]
    past = await client.save("r", samples.hashes(3), 4, 12, [ids[0][1:], ids[1][1:]])
    assert "failed before here" in past.result().skipped
    await client.save("other", samples.hashes(3), 0, 12, ids)
    await client.save("r", samples.hashes(3), 0, 12, ids, attempt=1)
    await client.save("r", samples.hashes(3), 0, 12, ids)
    ends = [(request.request_id, request.end, request.attempt) for request in started.called("Save")]
    assert ends == [("r", 4, 0), ("other", 12, 0), ("r", 12, 1), ("r", 4, 0)]


async def test_no_save_after_failure_a_released_load_forbids_its_own_attempt_alone(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    released = await load(client)
    assert await client.release(request_id="r") is FenceState.FENCED
    cancelled = [pb.ChunkFailure(group=0, chunk=2, reason=pb.CANCELLED)]
    session.send(transfer_done=pb.TransferDone(transfer=101, good=4, failed=cancelled))
    await released
    refused = await client.save("r", samples.hashes(3), 0, 12, IDS)
    assert "failed before here" in refused.result().skipped
    await client.release(request_id="r")
    await client.save("r", samples.hashes(3), 0, 12, IDS, attempt=1)
    (request,) = started.called("Save")
    assert (request.end, request.attempt) == (12, 1)


async def test_no_save_after_failure_an_agent_is_told_what_it_cannot_have_seen(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    told: list[tuple[str, int, int]] = []

    async def answer(request: pb.NoteFailureRequest, call: Call) -> pb.NoteFailureResponse:
        told.append((request.request_id, request.attempt, request.token))
        return pb.NoteFailureResponse()

    started.answers["NoteFailure"] = answer
    await started.stop()
    await until(lambda: not client.attached)
    failed = await load(client)
    assert failed.result().error == "no session with the agent"
    assert await client.note_failure("s", 3, 8) is False
    await started.start()
    await client.connect(5)
    await until(lambda: told == [("r", 0, 0)])
    assert await client.note_failure("s", 3, 8) is True
    assert told[1:] == [("s", 3, 8)]


async def test_release_returns_what_the_agent_knows(started: FakeAgent, worker: MakeWorker) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await load(client, deadline=60)

    async def release(request: pb.ReleaseRequest, call: Call) -> pb.ReleaseResponse:
        session.send(
            transfer_done=pb.TransferDone(
                transfer=101, good=4, failed=[pb.ChunkFailure(group=0, chunk=0, reason=pb.CANCELLED)]
            )
        )
        return pb.ReleaseResponse(state=pb.FENCED)

    started.answers["Release"] = release
    assert await client.release(request_id="r") is FenceState.FENCED
    assert (await transfer).failed == (ChunkFailure(0, 0, FailReason.CANCELLED),)
    assert client.withheld_blocks == FREE
    assert await client.release(transfer=transfer) is FenceState.FENCED
    assert [request.WhichOneof("what") for request in started.called("Release")] == ["request_id"]


async def test_fenced_a_release_does_not_overtake_the_load_that_it_is_meant_for(
    agent: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    answer = asyncio.Event()

    async def slow(request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        await answer.wait()
        return pb.LoadResponse(transfer=101, chunks=5)

    agent.answers["Load"] = slow
    loading = asyncio.ensure_future(load(client, deadline=60))
    await until(lambda: bool(agent.called("Load")))
    # An agent that gets the release first answers FENCED truly, and begins the load after it.
    assert await client.release(request_id="r", deadline=0.1) is FenceState.FENCE_UNCONFIRMED
    assert client.withheld_blocks == HELD
    answer.set()
    transfer = await loading
    assert {item.reason for item in transfer.result().failed} == {FailReason.CANCELLED}
    await until(lambda: client.withheld_blocks == FREE)
    assert agent.called("Release")[-1].transfer == 101
    assert await client.release(request_id="r") is FenceState.FENCED


async def test_fenced_an_unconfirmed_release_reports_the_load_and_withholds_its_blocks(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    started.answers["Release"] = never
    transfer = await load(client, deadline=60)
    assert await client.release(transfer=transfer, deadline=0.1) is FenceState.FENCE_UNCONFIRMED
    assert failed_chunks(transfer) == ALL
    assert {item.reason for item in transfer.result().failed} == {FailReason.CANCELLED}
    assert client.withheld_blocks == HELD


async def test_close_detaches_and_says_whether_the_blocks_are_free(
    started: FakeAgent, worker: MakeWorker
) -> None:
    client, _ = await worker()
    session = await started.sessions.get()
    transfer = await load(client, deadline=60)
    started.answers["Release"] = never
    assert await client.close(deadline=0.2) is FenceState.FENCE_UNCONFIRMED
    assert transfer.done()
    assert client.withheld_blocks == HELD
    session.let_go()
    assert await client.close(deadline=5) is FenceState.FENCED


async def test_an_unsealed_ring_is_not_mapped(agent: FakeAgent, worker: MakeWorker) -> None:
    agent.unsealed_ring = True
    agent.mode = pb.COPY
    with pytest.raises(AgentUnavailableError, match="the ring cannot be used: .* not sealed"):
        await worker(Mode.COPY, connect=0.5)
