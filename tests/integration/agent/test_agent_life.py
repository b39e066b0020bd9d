"""Beginning and end of a real agent: kill -9, drain, wrong configuration, a master or a collector that is not there."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc
from support import hybrid_engine as model
from support.agents import AgentProcess
from support.engine_on_wire import engine_on_wire
from support.mooncake import Master, free_ports
from support.processes import children, ended
from support.wire_client import Refused, client

MakeAgent = Callable[..., AgentProcess]


async def until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Poll what has no event; returns how long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, what
        await asyncio.sleep(0.02)
    return time.monotonic() - begun


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def run_agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpool_agent", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_wrong_config_ends_with_2_and_names_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("pool: {namespace: d, name: p}\nnode: {name: n, ip: 0.0.0.0}\nsegmnt: {size: 1Gi}\n")
    done = run_agent("--config", str(path))
    assert done.returncode == 2
    for part in (
        str(path),
        "node.ip",
        "wildcard",
        "segmnt",
        "'segment'",
        "socket: is missing",
        "store: is missing",
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_the_printed_default_is_a_configuration(tmp_path: Path) -> None:
    printed = run_agent("--print-default-config")
    path = tmp_path / "agent.yaml"
    path.write_text(printed.stdout)
    assert run_agent("--config", str(path), "--check-config").returncode == 0


def test_sigterm_unmounts_and_leaves_nothing(make_agent: MakeAgent, master: Master) -> None:
    agent = make_agent(segment={"size": "32Mi"}).start().wait_for_store()
    workers = agent.workers()
    assert any(one["size_bytes"] == 32 << 20 for one in master.segments())
    for name in (rpc.RPC_SOCKET, rpc.DESCRIPTOR_SOCKET):
        assert (agent.directory / name).stat().st_mode & 0o777 == 0o660
    assert agent.stop() == 0
    assert not any(one["size_bytes"] == 32 << 20 for one in master.segments())
    assert not (agent.directory / rpc.RPC_SOCKET).exists()
    assert not (agent.directory / rpc.DESCRIPTOR_SOCKET).exists()
    assert all(ended(pid) for pid in workers)


async def test_drain_tells_engines_and_serves_what_is_under_way(make_agent: MakeAgent) -> None:
    agent = make_agent(segment={"size": "32Mi"}).start().wait_for_store()
    async with engine_on_wire(agent.directory, "engine", pb.COPY, pb.MAPPED) as engine:
        rank = engine.ranks[0]
        await engine.save("drain", 6, list(range(1, 7)))
        plan = (await engine.lookup("drain", 6)).plan
        rank.answering = False
        load = await rank.client.call("Load", engine.load_request("drain", plan, list(range(20, 25))))
        await until(lambda: any(e.HasField("copy_wanted") for e in rank.other), 10, "no copy was asked for")
        wanted = next(e.copy_wanted for e in rank.other if e.HasField("copy_wanted"))
        assert agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
        await until(lambda: any(e.HasField("draining") for e in rank.other), 10, "no Draining event came")
        assert agent.get("/readyz") == (503, "draining\n")
        assert agent.get("/healthz") == (200, "ok\n"), "who drains must not be killed"
        answer = await engine.lookup("drain", 6)
        assert (answer.miss_reason, answer.plan.hit_length) == (pb.DRAINING, 0)
        save = pb.SaveRequest(request_id="drain", hash_size=32, hashes=b"".join(model.hashes("drain", 6)))
        save.blocks.extend([pb.BlockIds(), pb.BlockIds()])
        skipped = await rank.client.call("Save", save)
        assert (skipped.transfer, skipped.skipped) == (0, "the agent is draining")
        async with client(agent.directory) as late:
            with pytest.raises(Refused) as caught:
                await late.attach(model.attach_request("late"))
            assert caught.value.reason == "Draining"
        done = pb.CopyDone(transfer=wanted.transfer, batch=wanted.batch)
        await rank.client.stream.write(pb.ClientEvent(copy_done=done))
        report = await asyncio.wait_for(rank.result(load.transfer), 10)
        assert not report.failed
        assert await asyncio.to_thread(agent.wait) == 0


async def test_a_second_signal_cuts_the_drain_short(make_agent: MakeAgent) -> None:
    agent = make_agent(segment={"size": "32Mi"}, drain={"timeout": "10m"}).start()
    async with engine_on_wire(agent.directory, "engine", pb.COPY, pb.MAPPED) as engine:
        rank = engine.ranks[0]
        await engine.save("hurry", 6, list(range(1, 7)))
        plan = (await engine.lookup("hurry", 6)).plan
        rank.answering = False
        await rank.client.call("Load", engine.load_request("hurry", plan, list(range(20, 25))))
        await until(lambda: any(e.HasField("copy_wanted") for e in rank.other), 10, "no copy was asked for")
        assert agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
        await until(lambda: any(e.HasField("draining") for e in rank.other), 10, "no Draining event came")
        agent.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(agent.wait) == 0


async def test_killed_agent_leaves_nothing_that_its_successor_trips_over_crash_only(
    make_agent: MakeAgent,
) -> None:
    first = make_agent().start()
    async with engine_on_wire(first.directory, "engine"):
        workers = first.workers()
        assert len(workers) >= 3, "a prober and two loaders"
        first.kill()
        assert all(ended(pid) for pid in workers)
    assert (first.directory / rpc.RPC_SOCKET).exists()
    second = make_agent(directory=first.directory).start()
    async with engine_on_wire(second.directory, "engine") as engine:
        assert (await engine.lookup("nothing", 4)).miss_reason == pb.MISS_UNSPECIFIED


def test_a_second_agent_on_one_folder_is_refused(agent: AgentProcess, make_agent: MakeAgent) -> None:
    intruder = make_agent(directory=agent.directory, node="intruder").launch()
    assert intruder.wait() == 3
    assert "another agent serves" in intruder.log()
    assert agent.get("/readyz") == (200, "ok\n")


def test_a_foreign_listener_or_file_in_the_folder_is_left_alone(make_agent: MakeAgent) -> None:
    agent = make_agent()
    path = agent.directory / rpc.DESCRIPTOR_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen()
        assert agent.launch().wait() == 3
        assert "somebody listens" in agent.log()
    path.unlink()
    path.write_text("mine")
    assert agent.launch().wait() == 3
    assert path.read_text() == "mine"


def test_a_taken_port_is_named(agent: AgentProcess, make_agent: MakeAgent) -> None:
    port = int(agent.http.rpartition(":")[2])
    other = make_agent(telemetry={"port": port}).launch()
    assert other.wait() == 3
    assert "telemetry.port" in other.log()


async def test_without_a_master_the_agent_serves_misses_and_recovers(
    make_agent: MakeAgent, tmp_path: Path
) -> None:
    port, http_port, page_port = free_ports(3)
    agent = make_agent(f"127.0.0.1:{port}", telemetry={"port": page_port}).launch()
    agent.http = f"127.0.0.1:{page_port}"
    # The store's first processes are waited for, so that an agent without a master is at its start for a while.
    await until(lambda: listens(page_port), 20, "no health page")
    assert agent.get("/readyz") == (503, "starting\n")
    assert agent.get("/healthz") == (200, "ok\n"), "who is starting must not be restarted"
    await asyncio.to_thread(agent.wait_for, "ready", 30)
    master = Master(tmp_path, port=port, http_port=http_port)
    try:
        async with engine_on_wire(agent.directory, "engine") as engine:
            begun = time.monotonic()
            assert (await engine.lookup("x", 8)).miss_reason == pb.STORE_UNAVAILABLE
            assert time.monotonic() - begun < 5
            status = await engine.scheduler.call("Status", pb.StatusRequest())
            assert not status.store_reachable
            assert not status.HasField("store_last_success_age_s"), "absent: it has never answered"
            assert status.integrity == "Always"
            assert agent.get("/readyz")[0] == 200, "its engines lose nothing by staying"
            assert agent.get("/healthz") == (200, "ok\n")
            await asyncio.to_thread(master.start)

            async def answered() -> bool:
                return bool((await engine.lookup("x", 8)).miss_reason == pb.MISS_UNSPECIFIED)

            deadline = time.monotonic() + 25
            while not await answered():
                assert time.monotonic() < deadline, "the store never came back"
                await asyncio.sleep(0.1)
            status = await engine.scheduler.call("Status", pb.StatusRequest())
            assert status.HasField("store_last_success_age_s")
            assert status.store_last_success_age_s < 25
    finally:
        master.kill()


def doomed_engine(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
    )


async def test_a_killed_engine_is_fenced_and_freed_within_a_second(agent: AgentProcess) -> None:
    before = set(children(agent.pid))
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kvpool_wire import agent_pb2 as pb\n"
        "from support.engine_on_wire import engine_on_wire\n"
        "async def main():\n"
        "    async with engine_on_wire(Path(sys.argv[1]), 'doomed', pb.MAPPED, pb.COPY) as engine:\n"
        "        await engine.save('doomed', 6, list(range(1, 7)))\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = doomed_engine(script, agent.directory)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    loaders = set(children(agent.pid)) - before
    assert loaders
    process.kill()
    process.wait()
    process.stdout.close()
    maps = Path(f"/proc/{agent.pid}/maps")
    took = await until(
        lambda: all(ended(int(pid)) for pid in loaders) and "memfd:engine" not in maps.read_text(),
        10,
        "not freed",
    )
    assert took < 5, "a second, and the rest for a machine that is busy with other tests"


async def test_release_says_unconfirmed_until_the_client_has_stopped_copying_fenced(
    agent: AgentProcess,
) -> None:
    async with engine_on_wire(agent.directory, "engine-fence", pb.COPY, pb.MAPPED) as engine:
        rank = engine.ranks[0]
        await engine.save("fence", 6, list(range(1, 7)))
        plan = (await engine.lookup("fence", 6)).plan
        rank.answering = False
        load = await rank.client.call("Load", engine.load_request("fence", plan, list(range(20, 25))))
        await until(lambda: any(e.HasField("copy_wanted") for e in rank.other), 10, "no copy was asked for")
        wanted = next(e.copy_wanted for e in rank.other if e.HasField("copy_wanted"))
        # The scheduler's release reaches every rank of its engine.
        release = pb.ReleaseRequest(request_id="fence", deadline_ms=200)
        answer = await engine.scheduler.call("Release", release)
        assert (answer.state, list(answer.unconfirmed)) == (pb.FENCE_UNCONFIRMED, [load.transfer])
        done = pb.CopyDone(transfer=wanted.transfer, batch=wanted.batch)
        await rank.client.stream.write(pb.ClientEvent(copy_done=done))
        release.deadline_ms = 5000
        assert (await engine.scheduler.call("Release", release)).state == pb.FENCED
        report = await asyncio.wait_for(rank.result(load.transfer), 10)
        assert {failure.reason for failure in report.failed} <= {pb.CANCELLED}


async def test_a_frozen_master_costs_a_lookup_its_deadline_and_no_more_bounded(
    make_agent: MakeAgent, master: Master
) -> None:
    agent = make_agent(engines={"maxSessions": 1, "maxLookups": 1}).start()
    async with client(agent.directory) as one, client(agent.directory) as two:
        await one.attach(model.attach_request("engine"))
        with pytest.raises(Refused) as refused:
            await two.attach(model.attach_request("engine"))
        assert refused.value.reason == "TooManySessions"
        chain = b"".join(model.hashes("frozen", 8))
        request = pb.LookupRequest(
            request_id="r", total_hashes=8, hash_size=32, hashes=chain, max_length=128, deadline_ms=400
        )
        assert (await one.call("Lookup", request)).miss_reason == pb.MISS_UNSPECIFIED
        master.freeze()
        try:
            begun = time.monotonic()
            answers = await asyncio.gather(
                one.call("Lookup", request), one.call("Lookup", request), return_exceptions=True
            )
            took = time.monotonic() - begun
        finally:
            master.thaw()
        (busy,) = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert busy.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        (late,) = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert late.miss_reason in (pb.DEADLINE, pb.STORE_UNAVAILABLE)
        assert took < 4, "0.4 s, and the rest for a machine that is busy with other tests"


async def test_unclaimed_tokens_expire_and_connections_are_bounded(make_agent: MakeAgent) -> None:
    agent = make_agent(socket={"tokenTimeout": "1s", "maxConnections": 3}).start()
    async with client(agent.directory), client(agent.directory), client(agent.directory) as third:
        with pytest.raises(ConnectionError):
            async with client(agent.directory):
                pass
        # Expiry closes the connection: the client sees the end of it.
        assert await asyncio.to_thread(third.descriptors.sock.recv, 1) == b""
    async with client(agent.directory) as one:
        await one.attach(model.attach_request("engine"))


def test_an_uid_that_is_not_allowed_is_turned_away(make_agent: MakeAgent) -> None:
    agent = make_agent(socket={"allowedUids": [4_000_000]}).launch()
    # The agent's own user is not allowed either: its own call over the sockets says so at start.
    assert agent.wait() == 3
    assert "may not connect" in agent.log()


def test_a_dead_collector_does_not_hold_the_exit(make_agent: MakeAgent) -> None:
    (port,) = free_ports(1)
    agent = make_agent(
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
        }
    ).start()
    begun = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - begun < 12, "2 s for telemetry; the SDK alone would take 14"


def test_a_silent_collector_does_not_hold_the_exit(make_agent: MakeAgent) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        agent = make_agent(
            telemetry={"port": 0, "otlp": {"endpoint": f"http://127.0.0.1:{sock.getsockname()[1]}"}}
        ).start()
        begun = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - begun < 12


def test_log_lines_are_json_with_pool_and_node(agent: AgentProcess) -> None:
    records = [json.loads(line) for line in agent.lines if line.startswith("{")]
    assert {(one["pool"], one["node"]) for one in records} == {("default.pool", "node-a")}
    assert threading.active_count() < 50
