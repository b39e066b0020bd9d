"""A real master and real stores for transfers; every process of them is gone when its test ends."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.mooncake_store import MooncakeStore
from support.mooncake import Master, running_master
from support.processes import gone
from support.store_nodes import now

SEGMENT = 64 << 20

NewStore = Callable[..., Awaitable[MooncakeStore]]


@pytest.fixture
def pool_master(tmp_path: Path) -> Iterator[Master]:
    """A master with short times, for this test alone."""
    flags = ("--default_kv_lease_ttl=1000", "--client_ttl=3", "--put_start_discard_timeout_sec=2")
    with running_master(tmp_path, *flags) as running:
        yield running


@pytest.fixture
async def new_store(pool_master: Master, tmp_path: Path) -> AsyncIterator[NewStore]:
    """Makes a node's store; with `segment` bytes it owns a part of the pool."""
    stores: list[MooncakeStore] = []

    async def make(*, segment: int = SEGMENT) -> MooncakeStore:
        store = MooncakeStore(
            StoreConfig(pool_master.address, "127.0.0.1", log_dir=str(tmp_path), segment_size=segment)
        )
        await store.start()
        stores.append(store)
        assert await store.wait_ready(deadline=now() + 15), store.health()
        return store

    yield make
    for store in stores:
        pids = store.health().pids.values()
        await store.stop(deadline=now() + 5)
        assert [pid for pid in pids if not gone(pid)] == []
