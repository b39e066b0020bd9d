"""The mapped pool in shared memory: every byte of every storage is compared with the obvious reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvpool_agent.pools.cpu import MappedCpuPool
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import PoolError
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout, check_worker
from support.layouts import BLOCKS, LAYOUTS, Laid


@dataclass(frozen=True)
class Mapped:
    """A pool that was mapped from the engine's files, and both sides' view of the bytes."""

    laid: Laid
    layout: WorkerLayout
    engine: list[SealedMemory]
    pool: MappedCpuPool

    def bytes(self) -> list[bytes]:
        return [bytes(memory.view) for memory in self.engine]

    @property
    def payload_bytes(self) -> int:
        return self.layout.groups[0].payload_bytes


@pytest.fixture(params=list(LAYOUTS))
def mapped(request: pytest.FixtureRequest) -> Iterator[Mapped]:
    laid = LAYOUTS[request.param]()
    laid.fill(seed=1)
    layout = check_worker(laid.identity(), laid.worker())
    engine = [SealedMemory.create("engine", storage.nbytes) for storage in laid.storages]
    for memory, storage in zip(engine, laid.storages, strict=True):
        memory.view[:] = storage.tobytes()
    found = Mapped(laid, layout, engine, MappedCpuPool.open(layout, [memory.fd for memory in engine]))
    yield found
    found.pool.close()
    for memory in engine:
        memory.close()


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


@pytest.mark.parametrize("block", [0, 3, BLOCKS - 1])
def test_scatter_writes_the_block_and_no_other_byte(mapped: Mapped, block: int) -> None:
    payload = random_bytes(mapped.payload_bytes, seed=2)

    mapped.pool.scatter(0, block, memoryview(payload))

    mapped.laid.write(block, payload)
    assert mapped.bytes() == [storage.tobytes() for storage in mapped.laid.storages]


@pytest.mark.parametrize("block", [0, 3, BLOCKS - 1])
def test_gather_reads_the_block_and_touches_no_engine_byte(mapped: Mapped, block: int) -> None:
    around = bytearray(b"\xee" * (mapped.payload_bytes + 128))
    before = mapped.bytes()

    mapped.pool.gather(0, block, memoryview(around)[64:-64])

    assert bytes(around[64:-64]) == mapped.laid.read(block)
    assert around[:64] == around[-64:] == b"\xee" * 64
    assert mapped.bytes() == before


def test_all_blocks_survive_a_round_trip_in_another_order(mapped: Mapped) -> None:
    before = mapped.bytes()
    chunks = [bytearray(mapped.payload_bytes) for _ in range(BLOCKS)]
    for block, chunk in enumerate(chunks):
        mapped.pool.gather(0, block, memoryview(chunk))
    for block, chunk in enumerate(chunks):
        mapped.pool.scatter(0, block, memoryview(b"\0" * len(chunk)))
        mapped.pool.scatter(0, block, memoryview(chunk))
    assert mapped.bytes() == before


def test_a_payload_at_an_odd_address_is_copied_as_well(mapped: Mapped) -> None:
    payload = random_bytes(mapped.payload_bytes + 1, seed=3)
    mapped.pool.scatter(0, 2, memoryview(payload)[1:])
    mapped.laid.write(2, payload[1:])
    assert mapped.bytes() == [storage.tobytes() for storage in mapped.laid.storages]


def test_fenced_a_closed_pool_touches_nothing(mapped: Mapped) -> None:
    before = mapped.bytes()
    mapped.pool.close()
    mapped.pool.close()
    with pytest.raises(PoolError, match="closed"):
        mapped.pool.scatter(0, 1, memoryview(bytes(mapped.payload_bytes)))
    with pytest.raises(PoolError, match="closed"):
        mapped.pool.gather(0, 1, memoryview(bytearray(mapped.payload_bytes)))
    assert mapped.bytes() == before


def one(name: str = "all layers in one storage") -> tuple[WorkerLayout, list[SealedMemory]]:
    laid = LAYOUTS[name]()
    layout = check_worker(laid.identity(), laid.worker())
    return layout, [SealedMemory.create("engine", storage.nbytes) for storage in laid.storages]


def test_closing_unmaps(tmp_path: object) -> None:
    layout, memories = one()
    pool = MappedCpuPool(layout, memories)
    pool.close()
    assert all(memory.closed for memory in memories)


def test_fenced_close_waits_for_the_copy_under_way() -> None:
    layout, memories = one()
    pool = MappedCpuPool(layout, memories)
    inside, closed = threading.Event(), threading.Event()

    def close() -> None:
        inside.wait(10)
        pool.close()
        closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    with pool._gate.inside():
        inside.set()
        # No event can tell that a thread is still waiting; that it has not got through in this time has to do.
        assert not closed.wait(0.05)
        assert not memories[0].closed
    closer.join(10)
    assert closed.is_set()
    assert memories[0].closed


def test_threads_copy_side_by_side_without_mixing_blocks() -> None:
    layout, memories = one()
    pool = MappedCpuPool(layout, memories)
    size = layout.groups[0].payload_bytes
    chunks = [random_bytes(size, seed=block) for block in range(BLOCKS)]

    def work(first: int) -> None:
        for _ in range(20):
            for block in range(first, BLOCKS, 2):
                pool.scatter(0, block, memoryview(chunks[block]))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for block, chunk in enumerate(chunks):
        found = bytearray(size)
        pool.gather(0, block, memoryview(found))
        assert found == chunk
    pool.close()


@pytest.mark.parametrize(
    ("group", "block", "size", "message"),
    [
        (1, 0, None, "group 1"),
        (-1, 0, None, "group -1"),
        (0, BLOCKS, None, f"block {BLOCKS}"),
        (0, -1, None, "block -1"),
        (0, 4, None, "block 4"),
        (0, 1, 10, "contiguous bytes, got 10"),
    ],
)
def test_a_copy_that_makes_no_sense_is_refused_before_a_byte_moves(
    group: int, block: int, size: int | None, message: str
) -> None:
    layout, memories = one()
    layout = replace(layout, groups=(replace(layout.groups[0], null_block=4),))
    pool = MappedCpuPool(layout, memories)
    payload = memoryview(b"\xff" * (layout.groups[0].payload_bytes if size is None else size))
    with pytest.raises(PoolError, match=message):
        pool.scatter(group, block, payload)
    assert not any(memories[0].view)
    pool.close()


def test_gather_wants_a_writable_payload() -> None:
    layout, memories = one()
    pool = MappedCpuPool(layout, memories)
    with pytest.raises(PoolError, match="writable"):
        pool.gather(0, 0, memoryview(bytes(layout.groups[0].payload_bytes)))
    pool.close()


def test_ordering_needs_no_proof_on_a_cpu_but_refuses_a_cuda_event() -> None:
    layout, memories = one()
    pool = MappedCpuPool(layout, memories)
    pool.wait_ordering(pb.Ordering(synchronised=True), give_up=lambda: False)
    with pytest.raises(PoolError, match="CUDA event"):
        pool.wait_ordering(pb.Ordering(cuda_event=bytes(64)), give_up=lambda: False)
    pool.close()


def test_a_file_that_is_too_short_leaves_nothing_mapped() -> None:
    layout, memories = one("K and V apart in two storages")
    short = SealedMemory.create("short", 8)
    with pytest.raises(PoolError, match="storage 1: the memory file has 8 bytes"):
        MappedCpuPool.open(layout, [memories[0].fd, short.fd])
    with pytest.raises(PoolError, match="1 descriptors for 2 storages"):
        MappedCpuPool.open(layout, [memories[0].fd])
    with pytest.raises(PoolError, match="1 memory files for 2 storages"):
        MappedCpuPool(layout, memories[:1])
    with pytest.raises(PoolError, match="storage 1 has 8 bytes"):
        MappedCpuPool(layout, [memories[0], short])
    for memory in [*memories, short]:
        memory.close()


def test_a_worker_without_storages_has_nothing_to_map() -> None:
    layout, memories = one()
    with pytest.raises(PoolError, match="copy mode"):
        MappedCpuPool(replace(layout, storages=()), [])
    cuda = replace(layout.storages[0], device=pb.CUDA)
    with pytest.raises(PoolError, match="not on the CPU"):
        MappedCpuPool(replace(layout, storages=(cuda,)), memories)
    memories[0].close()
