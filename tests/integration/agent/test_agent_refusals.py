"""Hostile and mistaken callers of a real agent: a clear status, no crash, and the next caller is served as before."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc
from support import hybrid_engine as model
from support.agents import AgentProcess
from support.engine_on_wire import engine_on_wire
from support.wire_client import Descriptors, Refused, client


@pytest.fixture(autouse=True)
def agent_survives(agent: AgentProcess) -> Iterator[None]:
    yield
    assert agent.get("/readyz") == (200, "ok\n")


async def status_of(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("token", ["", "zz", "00" * 16, "0" * 31, "00" * 17])
async def test_a_foreign_token_opens_nothing(agent: AgentProcess, token: str) -> None:
    metadata = ((rpc.TOKEN_METADATA, token),)
    async with client(agent.directory) as one:
        for name, request in (
            ("Lookup", pb.LookupRequest()),
            ("Load", pb.LoadRequest()),
            ("Save", pb.SaveRequest()),
            ("Release", pb.ReleaseRequest(everything=True)),
            ("Status", pb.StatusRequest()),
        ):
            code, text = await status_of(one.call(name, request, metadata=metadata))
            assert code == grpc.StatusCode.UNAUTHENTICATED, name
            assert "attach again" in text
        one.open_stream(metadata)
        assert (await status_of(one.stream.read()))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_opens_one_attach(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        await one.attach(model.attach_request("engine"))
        one.open_stream()
        assert (await status_of(one.stream.read()))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_opens_nothing_but_attach_and_status(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        assert (await one.call("Status", pb.StatusRequest())).pool == "default.pool"
        assert (await status_of(one.call("Lookup", pb.LookupRequest())))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_is_dead_after_its_session(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        await one.attach(model.attach_request("engine"))
        await one.stream.done_writing()
        assert not isinstance(await one.stream.read(), pb.ServerEvent)
        assert (await status_of(one.call("Status", pb.StatusRequest())))[0] == grpc.StatusCode.UNAUTHENTICATED


async def test_a_scheduler_cannot_load_or_save(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        await one.attach(model.attach_request("engine"))
        for name, request in (("Load", pb.LoadRequest()), ("Save", pb.SaveRequest())):
            assert (await status_of(one.call(name, request)))[0] == grpc.StatusCode.PERMISSION_DENIED


Change = Callable[[pb.AttachRequest], None]


def _without_tensor(request: pb.AttachRequest) -> None:
    del request.worker.tensors[1]


def _past_the_storage(request: pb.AttachRequest) -> None:
    request.worker.storages[0].size -= 1


def _one_group(request: pb.AttachRequest) -> None:
    del request.identity.groups[:]


def _mapped_without_storages(request: pb.AttachRequest) -> None:
    del request.worker.storages[:]


def _ungainly_blocks(request: pb.AttachRequest) -> None:
    request.identity.hash_block_size = 7


ATTACHES: list[tuple[str, str, Change]] = [
    ("ProtocolUnknown", "protocols", lambda request: request.protocols.__setitem__(0, 99)),
    ("EngineIdInvalid", "engine_id", lambda request: setattr(request, "engine_id", "")),
    ("EngineIdInvalid", "engine_id", lambda request: setattr(request, "engine_id", "x" * 5000)),
    ("IdentityInvalid", "model", lambda request: setattr(request.identity, "model", "")),
    ("IdentityInvalid", "groups", _one_group),
    ("UnservableGroups", "hash_block_size", _ungainly_blocks),
    ("RoleMissing", "neither", lambda request: request.ClearField("worker")),
    ("LayoutInvalid", "full.1", _without_tensor),
    ("LayoutInvalid", "storage", _past_the_storage),
    ("LayoutInvalid", "storages", _mapped_without_storages),
    ("LayoutInvalid", "num_blocks", lambda request: request.worker.ClearField("num_blocks")),
]


@pytest.mark.parametrize(("reason", "named", "change"), ATTACHES)
async def test_an_attach_that_cannot_be_served_is_refused_by_name(
    agent: AgentProcess, reason: str, named: str, change: Change
) -> None:
    rank = model.Rank(0)
    request = model.attach_request("engine", rank=rank)
    change(request)
    async with client(agent.directory) as one:
        with pytest.raises(Refused, match=named) as caught:
            await one.attach(request, [rank.fd])
        assert caught.value.reason == reason
    rank.close()


async def test_the_first_message_has_to_be_an_attach(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        one.open_stream()
        await one.stream.write(pb.ClientEvent(copy_done=pb.CopyDone(transfer=1)))
        assert (await one.next("refused")).reason == "AttachMissing"


def _unsealed(size: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


@pytest.mark.parametrize(
    "make", [_unsealed, lambda size: model.sealed(size - 4096), lambda _: os.open("/dev/null", os.O_RDWR)]
)
async def test_memory_that_could_vanish_or_is_short_is_refused(
    agent: AgentProcess, make: Callable[[int], int]
) -> None:
    rank = model.Rank(0)
    fd = make(len(rank.memory))
    async with client(agent.directory) as one:
        with pytest.raises(Refused, match="memory file") as caught:
            await one.attach(model.attach_request("engine", rank=rank), [fd])
        assert caught.value.reason == "MappingFailed"
    os.close(fd)
    rank.close()


async def test_an_engine_that_leaves_the_mode_open_gets_copy_where_mapping_fails(agent: AgentProcess) -> None:
    rank = model.Rank(0, pb.MODE_UNSPECIFIED)
    fd = _unsealed(len(rank.memory))
    async with client(agent.directory) as one:
        ready = await one.attach(model.attach_request("engine", rank=rank), [fd])
        assert ready.mode == pb.COPY
        assert "not sealed" in ready.mode_reason
    os.close(fd)
    rank.close()


@pytest.mark.parametrize(
    ("first", "count", "fds"),
    [(1, 1, 1), (0, 2, 1), (0, 0, 0), (0, 2, 2)],
    ids=["order", "count", "none", "too-many"],
)
async def test_descriptors_out_of_order_are_refused(
    agent: AgentProcess, first: int, count: int, fds: int
) -> None:
    rank = model.Rank(0)
    async with client(agent.directory) as one:
        one.open_stream()
        await one.stream.write(pb.ClientEvent(attach=model.attach_request("engine", rank=rank)))
        await one.next("descriptors_wanted")
        one.descriptors.send_storages([rank.fd] * fds, first=first, count=count)
        assert (await one.next("refused")).reason == "DescriptorsMalformed"
    rank.close()


async def test_garbage_on_the_descriptor_socket_is_refused(agent: AgentProcess) -> None:
    rank = model.Rank(0)
    async with client(agent.directory) as one:
        one.open_stream()
        await one.stream.write(pb.ClientEvent(attach=model.attach_request("engine", rank=rank)))
        await one.next("descriptors_wanted")
        one.descriptors.sock.send(b"\xff" * 4000)
        assert (await one.next("refused")).reason == "DescriptorsMalformed"
    rank.close()


async def test_a_descriptor_socket_closed_before_its_storages_is_refused(agent: AgentProcess) -> None:
    rank = model.Rank(0)
    async with client(agent.directory) as one:
        one.open_stream()
        await one.stream.write(pb.ClientEvent(attach=model.attach_request("engine", rank=rank)))
        await one.next("descriptors_wanted")
        one.descriptors.sock.close()
        assert (await one.next("refused")).reason == "DescriptorSocketBroken"
    rank.close()


async def test_a_plan_that_was_tampered_with_loads_nothing_mask_covers_hit(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-tamper") as engine:
        await engine.save("tamper", 8, list(range(1, 9)))
        plan = (await engine.lookup("tamper", 8)).plan
        blocks = list(range(30, 37))
        for ranked in engine.ranks:
            ranked.memory.scribble(b"\xa5")

        def pruned_twice(bad: pb.Plan) -> None:
            bad.groups[0].mask = bytes([0b0011_1111])

        def missing_tail_entry(bad: pb.Plan) -> None:
            bad.groups[0].blocks -= 1
            bad.groups[0].mask = bytes([0b0011_1111])

        def longer_hit(bad: pb.Plan) -> None:
            bad.hit_length += model.BLOCK

        def bits_past_the_end(bad: pb.Plan) -> None:
            bad.groups[0].mask = b"\xff"

        def stray_key(bad: pb.Plan) -> None:
            bad.tail_keys.add(group=0, chunk=0, unit=5)

        def too_few_hashes(bad: pb.Plan) -> None:
            bad.hashes = bad.hashes[:32]

        def huge_chain(bad: pb.Plan) -> None:
            bad.total_hashes = 1 << 31

        def huge_mask(bad: pb.Plan) -> None:
            bad.groups[0].blocks = 1 << 31

        def half_hash(bad: pb.Plan) -> None:
            bad.hashes = bad.hashes[:-1]

        for change in (
            pruned_twice, missing_tail_entry, longer_hit, bits_past_the_end, stray_key, too_few_hashes, huge_chain,
            huge_mask, half_hash,
        ):  # fmt: skip
            bad = pb.Plan()
            bad.CopyFrom(plan)
            change(bad)
            code, _ = await status_of(
                engine.ranks[0].client.call("Load", engine.load_request("t", bad, blocks))
            )
            assert code == grpc.StatusCode.INVALID_ARGUMENT, change.__name__
        assert set(engine.ranks[0].memory.memory[:]) == {0xA5}
        good = await engine.load("tamper", plan, blocks)
        assert not good[0].failed


async def test_block_ids_that_cannot_be_the_requests_are_refused_before_anything_is_touched(
    agent: AgentProcess,
) -> None:
    async with engine_on_wire(agent.directory, "engine-blocks") as engine:
        await engine.save("blocks", 8, list(range(1, 9)))
        plan = (await engine.lookup("blocks", 8)).plan
        for ranked in engine.ranks:
            ranked.memory.scribble(b"\xa5")
        good = list(range(30, 37))
        for bad in (
            [0, *good[1:]],
            [-1, *good[1:]],
            [64, *good[1:]],
            [good[1], *good[1:]],
            good[1:],
            [*good, 50],
            [],
        ):
            code, _ = await status_of(
                engine.ranks[0].client.call("Load", engine.load_request("b", plan, bad))
            )
            assert code == grpc.StatusCode.INVALID_ARGUMENT, bad
        assert set(engine.ranks[0].memory.memory[:]) == {0xA5}


async def test_numbers_beyond_the_limits_are_refused(agent: AgentProcess) -> None:
    async with engine_on_wire(agent.directory, "engine-limits") as engine:
        chain = b"".join(model.hashes("x", 4))
        for request in (
            pb.LookupRequest(request_id="", total_hashes=4, hash_size=32, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="x" * 300, total_hashes=4, hash_size=32, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="r", total_hashes=3, hash_size=32, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="r", total_hashes=1 << 30, hash_size=32, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="r", total_hashes=4, hash_size=0, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="r", total_hashes=4, hash_size=31, hashes=chain, max_length=64),
            pb.LookupRequest(request_id="r", total_hashes=4, hash_size=32, hashes=chain, deadline_ms=1 << 31),
            pb.LookupRequest(
                request_id="r",
                total_hashes=4,
                hash_size=32,
                hashes=chain,
                extras=pb.Extras(lora_revision="r"),
            ),
        ):
            assert (await status_of(engine.scheduler.call("Lookup", request)))[
                0
            ] == grpc.StatusCode.INVALID_ARGUMENT
        largest = pb.LookupRequest(
            request_id="r", total_hashes=4, hash_size=32, hashes=chain, max_length=(1 << 64) - 1
        )
        assert (await engine.scheduler.call("Lookup", largest)).plan.hit_length == 0
        rank = engine.ranks[0].client
        for save in (
            pb.SaveRequest(
                request_id="r", hash_size=32, hashes=chain, end=65 * 16, blocks=[pb.BlockIds()] * 2
            ),
            pb.SaveRequest(
                request_id="r", hash_size=32, hashes=chain, start=64, end=16, blocks=[pb.BlockIds()] * 2
            ),
            pb.SaveRequest(request_id="r", hash_size=32, hashes=chain, end=64, blocks=[pb.BlockIds()]),
            pb.SaveRequest(
                request_id="r", hash_size=32, hashes=chain, end=64, blocks=[pb.BlockIds(ids=b"abc")] * 2
            ),
            pb.SaveRequest(
                request_id="r",
                hash_size=32,
                hashes=chain,
                end=64,
                blocks=[pb.BlockIds()] * 2,
                num_prompt_tokens=1 << 60,
            ),
        ):
            assert (await status_of(rank.call("Save", save)))[0] == grpc.StatusCode.INVALID_ARGUMENT
        for release in (pb.ReleaseRequest(), pb.ReleaseRequest(transfer=1)):
            assert (await status_of(engine.scheduler.call("Release", release)))[
                0
            ] == grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_that_are_no_message_are_refused(agent: AgentProcess) -> None:
    async with client(agent.directory) as one:
        await one.attach(model.attach_request("engine"))
        raw = one.channel.unary_unary(rpc.path("Lookup"), request_serializer=None, response_deserializer=None)
        code, text = await status_of(raw(b"\xff" * 100, metadata=one.metadata, timeout=10))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "no LookupRequest" in text


async def test_an_answer_to_a_copy_that_was_never_asked_for_is_dropped_and_counted(
    agent: AgentProcess,
) -> None:
    before = agent.metric("kvpool_transfer_late_total")
    async with engine_on_wire(agent.directory, "engine-late", pb.COPY) as engine:
        await engine.ranks[0].client.stream.write(pb.ClientEvent(copy_done=pb.CopyDone(transfer=77, batch=3)))
        await engine.save("late", 4, [1, 2, 3, 4])
    assert agent.metric("kvpool_transfer_late_total") == before + 1


def test_connections_come_and_go_without_leaving_descriptors(agent: AgentProcess) -> None:
    def opened() -> int:
        return len(os.listdir(f"/proc/{agent.pid}/fd"))  # noqa: PTH208 - their number is all that is wanted

    Descriptors.connect(agent.directory).close()
    before = opened()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(Path(agent.directory) / rpc.DESCRIPTOR_SOCKET))
    # Tokens that nobody claims are kept until they expire, and no longer: see the descriptor server's own tests.
    assert opened() <= before + 21
