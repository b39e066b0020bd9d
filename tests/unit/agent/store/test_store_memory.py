"""The fake store keeps the protocol's promises, and its faults strike where they were put."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvpool_agent.store.errors import StoreDeadline, StoreMisuse, StoreUnavailable
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.memory import Call, MemoryCluster, MemoryLoader, MemoryStore
from kvpool_agent.store.mooncake_store import MooncakeStore
from kvpool_agent.store.protocol import ChunkStatus, GetItem, Loader, Prober, PutItem, Store
from kvpool_agent.store.segment import sealed_memory

OK, ABSENT = ChunkStatus.OK, ChunkStatus.ABSENT
A, B = GetItem(b"a", 100, 8), GetItem(b"b", 200, 8)


@dataclass
class Ring:
    fd: int
    size: int = 1024

    def read(self, item: GetItem) -> bytes:
        return os.pread(self.fd, item.size, item.offset)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(sealed_memory("unit-ring", 1024))
    yield ring
    os.close(ring.fd)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryCluster({b"a": b"AAAAAAAA", b"b": b"BBBBBBBB"}))


def soon() -> float:
    return asyncio.get_running_loop().time() + 5


def now() -> float:
    return asyncio.get_running_loop().time()


def test_both_stores_have_the_protocols_shape(store: MemoryStore) -> None:
    fits: Store = store
    real: type[Store] = MooncakeStore
    prober: Prober = store.prober
    assert (fits, real, prober) == (store, MooncakeStore, store.prober)


async def test_what_one_node_puts_another_gets(store: MemoryStore, ring: Ring) -> None:
    loader: Loader = await store.open_loader(ring)
    os.pwrite(ring.fd, b"12345678", 0)
    assert await loader.put([PutItem(b"c", 0, 8), PutItem(b"a", 8, 8)], deadline=soon()) == [OK, OK]
    other = MemoryStore(store.cluster)
    reader = await other.open_loader(ring)
    items = [GetItem(b"c", 500, 8), A, GetItem(b"none", 600, 8)]
    assert await reader.get(items, deadline=soon()) == [OK, OK, ABSENT]
    assert ring.read(items[0]) == b"12345678"
    assert ring.read(A) == b"AAAAAAAA"  # the first bytes stayed
    assert ring.read(items[2]) == bytes(8)
    # A reader's lease keeps a chunk, by whoever it is to be removed.
    assert await reader.remove([b"c"], deadline=soon()) == [ChunkStatus.LEASED]
    assert await other.prober.remove([b"c"], deadline=soon()) == [ChunkStatus.LEASED]
    store.cluster.leases.clear()
    assert await reader.remove([b"c", b"c"], deadline=soon()) == [OK, ABSENT]
    assert await other.prober.exists_keys([b"a"], deadline=soon()) == [OK]
    assert await other.prober.remove([b"a"], deadline=soon()) == [ChunkStatus.LEASED]


async def test_existence_has_a_row_per_prefix(store: MemoryStore) -> None:
    store.cluster.objects[b"p/0102"] = b"x"
    answer = await store.prober.exists([b"p/", b"q/"], b"\x01\x01\x01\x02", 2, deadline=soon())
    np.testing.assert_array_equal(answer, np.array([[0, 1], [0, 0]], dtype=np.uint8))
    assert await store.prober.exists_keys([b"a", b"z"], deadline=soon()) == [OK, ABSENT]
    with pytest.raises(StoreMisuse):
        await store.prober.exists([b"p/"], b"123", 2, deadline=soon())


async def test_calls_are_recorded(store: MemoryStore, ring: Ring) -> None:
    loader = await store.open_loader(ring)
    await loader.get([B, A], deadline=soon())
    await store.prober.exists_keys([b"a"], deadline=soon())
    assert store.calls == [Call(Operation.GET, (b"b", b"a")), Call(Operation.EXISTS, (b"a",))]


@pytest.mark.parametrize(
    ("fault", "status", "data"),
    [
        (Fault(FaultKind.STATUS, status=ChunkStatus.PEER_FAILED), ChunkStatus.PEER_FAILED, bytes(8)),
        (Fault(FaultKind.CORRUPT), OK, b"AAAA\xbeAAA"),
        (Fault(FaultKind.FOREIGN, other_key=b"b"), OK, b"BBBBBBBB"),
        (Fault(FaultKind.WRONG_SIZE), ChunkStatus.BAD_SIZE, b"AAAAAAA\0"),
        (Fault(FaultKind.TORN), ChunkStatus.PEER_FAILED, b"AAAA\0\0\0\0"),
    ],
)
async def test_a_fault_strikes_its_key_and_no_other(
    store: MemoryStore, ring: Ring, fault: Fault, status: ChunkStatus, data: bytes
) -> None:
    fault.keys, fault.times = frozenset({b"a"}), 1
    loader = await store.open_loader(ring)
    store.inject(fault)
    assert await loader.get([B], deadline=soon()) == [OK]
    assert await loader.get([A, B], deadline=soon()) == [status, OK]
    assert fault.struck.is_set()
    assert ring.read(A) == data
    assert ring.read(B) == b"BBBBBBBB"
    assert await loader.get([A], deadline=soon()) == [OK]  # it was armed once


async def test_a_hang_ends_with_its_event_or_at_the_deadline(store: MemoryStore, ring: Ring) -> None:
    loader = await store.open_loader(ring)
    event = asyncio.Event()
    hang = store.inject(Fault(FaultKind.HANG, event=event, times=2))
    call = asyncio.create_task(loader.get([A], deadline=soon()))
    await hang.struck.wait()
    assert not call.done()
    event.set()
    assert await call == [OK]
    event.clear()
    generation = loader.generation
    assert await loader.get([A], deadline=now() + 0.01) == [ChunkStatus.DEADLINE]
    assert loader.generation == generation + 1


async def test_a_late_write_lands_before_the_call_returns_or_at_its_event(
    store: MemoryStore, ring: Ring
) -> None:
    loader = await store.open_loader(ring)
    store.inject(Fault(FaultKind.LATE_WRITE, times=1))
    assert await loader.get([A], deadline=now() + 0.01) == [ChunkStatus.DEADLINE]
    assert ring.read(A) == b"\xa5" * 8
    event = asyncio.Event()
    store.inject(Fault(FaultKind.LATE_WRITE, times=1, event=event))
    assert await loader.get([B], deadline=now() + 0.01) == [ChunkStatus.DEADLINE]
    assert ring.read(B) == bytes(8)
    event.set()
    await asyncio.gather(*loader._late)
    assert ring.read(B) == b"\xa5" * 8


async def test_a_put_that_dies_blocks_its_keys_and_stores_nothing(store: MemoryStore, ring: Ring) -> None:
    store.put_discard_timeout = 0.05
    loader = await store.open_loader(ring)
    store.inject(Fault(FaultKind.DIE, Operation.PUT, times=1))
    put = PutItem(b"new", 0, 8)
    assert await loader.put([put], deadline=soon()) == [ChunkStatus.WORKER_DIED]
    assert await loader.put([put], deadline=soon()) == [ChunkStatus.NOT_READY]
    until = loader.blocked_until(b"new")
    assert until is not None
    await asyncio.sleep(max(0.0, until - now()))
    assert await loader.put([put], deadline=soon()) == [OK]
    assert loader.blocked_until(b"new") is None


async def test_displaced_full_and_unavailable(store: MemoryStore, ring: Ring) -> None:
    loader = await store.open_loader(ring)
    store.inject(Fault(FaultKind.DISPLACED, Operation.PUT, keys=frozenset({b"new"}), times=1))
    assert await loader.put([PutItem(b"new", 0, 8)], deadline=soon()) == [OK]
    assert await store.prober.exists_keys([b"new"], deadline=soon()) == [ABSENT]
    store.cluster.capacity = 20
    assert await loader.put([PutItem(b"new", 0, 8)], deadline=soon()) == [ChunkStatus.FULL]
    store.inject(Fault(FaultKind.UNAVAILABLE, Operation.EXISTS))
    with pytest.raises(StoreUnavailable):
        await store.prober.exists_keys([b"a"], deadline=soon())
    assert not store.health().master_reachable
    store.clear_faults()
    store.inject(Fault(FaultKind.HANG, Operation.EXISTS))
    with pytest.raises(StoreDeadline):
        await store.prober.exists_keys([b"a"], deadline=now() + 0.01)


async def test_a_closed_loader_attempts_nothing(store: MemoryStore, ring: Ring) -> None:
    loader: MemoryLoader = await store.open_loader(ring)
    await store.stop(deadline=soon())
    assert await loader.get([A], deadline=soon()) == [ChunkStatus.NOT_ATTEMPTED]
    assert loader.pid is None


async def test_misuse_is_refused_as_by_the_real_store(store: MemoryStore, ring: Ring) -> None:
    loader = await store.open_loader(ring)
    with pytest.raises(StoreMisuse):
        await loader.get([GetItem(b"a", 1020, 8)], deadline=soon())
    assert await loader.get([GetItem(b"a", 0, 4)], deadline=soon()) == [ChunkStatus.BAD_SIZE]
    assert ring.read(GetItem(b"a", 0, 8)) == bytes(8)
