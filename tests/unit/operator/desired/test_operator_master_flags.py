"""The masters' command line is one that the real program accepts, and opens the ports that we say it opens.

A peer renders a flag that its server has dropped, and tests only that it is rendered.
"""

import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool_operator.desired import master
from support.mooncake import free_ports, master_binary
from unit.operator.desired.builders import container, facts, pool
from unit.operator.desired.cases import CASES, ETCD

needs_mooncake = pytest.mark.skipif(
    not master_binary().exists(), reason="mooncake_master is not installed: install kvpool[agent-cpu]"
)


def command(case: str) -> list[str]:
    stateful_set = master.stateful_set(*CASES[case])
    assert stateful_set is not None
    one = container(stateful_set)
    return [*one["command"], *one["args"]]


@pytest.fixture(scope="module")
def known_flags() -> frozenset[str]:
    text = subprocess.run(
        [master_binary(), "--help"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    return frozenset(re.findall(r"^ {4}-([a-z0-9_]+) \(", text, re.MULTILINE))


@needs_mooncake
@pytest.mark.parametrize("case", ["tcp", "rdma", "etcd", "everything"])
def test_every_flag_is_known_to_the_real_master(case: str, known_flags: frozenset[str]) -> None:
    assert "rpc_port" in known_flags
    program, *arguments = command(case)
    assert program == "mooncake_master"
    assert {argument[2:].partition("=")[0] for argument in arguments} <= known_flags


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [master_binary(), *arguments],
            cwd=folder,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@needs_mooncake
def test_the_real_master_starts_with_our_arguments_and_opens_both_ports(tmp_path: Path) -> None:
    ports = dict(zip((master.RPC_PORT, master.ADMIN_PORT), free_ports(2), strict=True))
    _, *arguments = command("tcp")
    # The kubelet puts the pod's address in; the ports are moved, since other tests run masters too.
    arguments = [
        re.sub(r"\b(50051|9003)$", lambda found: str(ports[int(found[0])]), one) for one in arguments
    ]
    arguments = [one.replace("$(POD_IP)", "127.0.0.1") for one in arguments]
    with running(arguments, tmp_path) as process:
        deadline, pause = time.monotonic() + 20, threading.Event()
        while not all(map(answers, ports.values())):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            pause.wait(0.05)
        base = f"http://127.0.0.1:{ports[master.ADMIN_PORT]}"
        with urllib.request.urlopen(f"{base}/metrics", timeout=5) as page:
            assert b"master_total_capacity_bytes" in page.read()
        with urllib.request.urlopen(f"{base}/health", timeout=5) as page:
            assert page.status == 200


def test_masters_that_elect_a_leader_each_have_their_own_address_and_use_etcd() -> None:
    """Two masters that call themselves 0.0.0.0 both lead (a peer's commit e15514808); only etcd is compiled in."""
    _, *arguments = command("etcd")
    assert "--rpc_address=$(POD_IP)" in arguments
    assert "--ha_backend_type=etcd" in arguments
    assert "--enable_oplog=true" in arguments
    assert "--ha_backend_connstring=etcd-0.etcd:2379;etcd-1.etcd:2379" in arguments


def test_nothing_is_rendered_that_makes_mooncake_lie() -> None:
    refused = re.compile(r"snapshot|http_metadata_server|multi_tenants|offload|cxl|memory_allocator")
    for case in ("tcp", "rdma", "etcd", "everything"):
        assert [argument for argument in command(case) if refused.search(argument)] == []


def test_a_pool_that_is_made_anew_does_not_find_its_predecessors_index() -> None:
    first, second = (pool(ETCD, uid=uid) for uid in ("11111111-aaaa", "22222222-bbbb"))
    assert master.cluster_id(first) != master.cluster_id(second)
    assert master.cluster_id(pool()) == ""


def test_an_external_store_gets_no_masters() -> None:
    one = CASES["external"][0]
    assert master.stateful_set(one, facts()) is None
    assert master.client_service(one, facts()) is None
    assert master.headless_service(one, facts()) is None
    assert master.address(one) == "mooncake.store.svc:50051"


def test_a_lost_master_is_never_replaced_without_the_operator() -> None:
    stateful_set = master.stateful_set(pool(), facts())
    assert stateful_set is not None
    assert stateful_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    # A standby is never ready: one after the other they would never start.
    assert stateful_set["spec"]["podManagementPolicy"] == "Parallel"
