"""A real master and a real owner of chunks for the session, and stores of ours on them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.mooncake_store import MooncakeStore
from support.mooncake import Master, running_master
from support.processes import gone
from support.raw import Raw, raw_client
from support.store_nodes import Node, Ring, now


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store-logs")


@pytest.fixture(scope="session")
def master(logs: Path) -> Iterator[Master]:
    with running_master(logs, "--default_kv_lease_ttl=2000", "--client_ttl=10") as running:
        yield running


@pytest.fixture(scope="session")
def owner(master: Master, logs: Path) -> Iterator[Raw]:
    """A process that owns 256 MiB of the session's pool."""
    with raw_client(logs / "owner.log") as raw:
        assert raw.connect(master, segment=256 << 20, buffer=4 << 20) == 0
        yield raw


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[Master]:
    """A master for tests that kill or freeze, with short timeouts."""
    flags = ("--default_kv_lease_ttl=1000", "--client_ttl=3", "--put_start_discard_timeout_sec=2")
    with running_master(tmp_path, *flags) as running:
        yield running


@pytest.fixture
def new_raw(tmp_path: Path) -> Iterator[Callable[..., Raw]]:
    """Makes raw processes that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **environment: stack.enter_context(raw_client(tmp_path / "raw.log", **environment))


@pytest.fixture
async def new_node(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Node]]]:
    """Makes stores with a loader; they are stopped with the test, and every process of theirs is then gone."""
    nodes: list[Node] = []

    async def make(master: Master, *, ready: bool = True, **settings: Any) -> Node:
        config = StoreConfig(master.address, "127.0.0.1", log_dir=str(tmp_path), **settings)
        store = MooncakeStore(config)
        await store.start()
        ring = Ring()
        node = Node(store, await store.open_loader(ring), ring)
        nodes.append(node)
        if ready:
            assert await store.wait_ready(deadline=now() + 15), store.health()
        return node

    yield make
    for node in nodes:
        pids = node.store.health().pids.values()
        await node.store.stop(deadline=now() + 5)
        node.ring.close()
        assert [pid for pid in pids if not gone(pid)] == []


@pytest.fixture
async def node(master: Master, owner: Raw, new_node: Callable[..., Awaitable[Node]]) -> Node:
    """A store without a segment on the session's pool."""
    return await new_node(master)
