"""The CUDA pool's address arithmetic, on host memory: every byte of every allocation, margins included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from kvpool_agent.pools.cuda import open_cuda_pool
from kvpool_agent.pools.device import MAX_COPIES, MAX_PITCH, CudaPool, Direction, Rows, plan_rows
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import PoolError
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout, check_worker
from kvpool_wire.strides import Part
from support.host_driver import HostDriver
from support.layouts import BLOCKS, LAYOUTS, Laid

MARGIN = 512
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@dataclass
class OnDevice:
    laid: Laid
    layout: WorkerLayout
    allocation: NDArray[np.uint8]
    driver: HostDriver
    ring: SealedMemory
    pool: CudaPool

    def expected(self) -> bytes:
        """The whole allocation, if the storages in it hold what the reference's do."""
        pieces = [np.full(MARGIN, 0xEE, np.uint8)]
        for storage in self.laid.storages:
            pieces += [storage, np.full(MARGIN, 0xEE, np.uint8)]
        return np.concatenate(pieces).tobytes()


def declared(laid: Laid) -> tuple[WorkerLayout, NDArray[np.uint8]]:
    """All storages in one allocation, a margin around each."""
    worker = laid.worker()
    offset = MARGIN
    for storage in worker.storages:
        storage.device, storage.device_uuid = pb.CUDA, UUID
        storage.handle, storage.handle_offset = b"h" * 64, offset
        offset += storage.size + MARGIN
    return check_worker(laid.identity(), worker), np.full(offset, 0xEE, np.uint8)


def on_device(name: str) -> OnDevice:
    laid = LAYOUTS[name]()
    laid.fill(seed=1)
    layout, allocation = declared(laid)
    for storage, place in zip(laid.storages, layout.storages, strict=True):
        allocation[place.handle_offset : place.handle_offset + place.size] = storage
    driver = HostDriver({b"h" * 64: allocation})
    ring = SealedMemory.create("ring", 1 << 16)
    return OnDevice(laid, layout, allocation, driver, ring, CudaPool(layout, driver, ring.view))


@pytest.fixture(params=list(LAYOUTS))
def mapped(request: pytest.FixtureRequest) -> Iterator[OnDevice]:
    found = on_device(request.param)
    yield found
    found.pool.close()
    found.ring.close()
    assert found.driver.leftovers() == []


@pytest.fixture
def simple() -> Iterator[OnDevice]:
    found = on_device("all layers in one storage")
    yield found
    found.pool.close()
    found.ring.close()


@pytest.mark.parametrize("block", [0, 3, BLOCKS - 1])
def test_scatter_writes_the_block_and_no_other_byte(mapped: OnDevice, block: int) -> None:
    size = mapped.layout.groups[0].payload_bytes
    payload = mapped.ring.view[64 : 64 + size]
    payload[:] = np.random.default_rng(2).integers(0, 256, size, np.uint8).tobytes()

    mapped.pool.scatter(0, block, payload)

    mapped.laid.write(block, bytes(payload))
    assert mapped.allocation.tobytes() == mapped.expected()
    payload.release()


@pytest.mark.parametrize("block", [0, 3, BLOCKS - 1])
def test_gather_reads_the_block_and_touches_no_engine_byte(mapped: OnDevice, block: int) -> None:
    size = mapped.layout.groups[0].payload_bytes
    mapped.ring.view[:] = b"\xdd" * mapped.ring.size
    payload = mapped.ring.view[64 : 64 + size]

    mapped.pool.gather(0, block, payload)

    assert bytes(payload) == mapped.laid.read(block)
    payload.release()
    assert bytes(mapped.ring.view[:64]) == b"\xdd" * 64
    assert bytes(mapped.ring.view[64 + size :]) == b"\xdd" * (mapped.ring.size - 64 - size)
    assert mapped.allocation.tobytes() == mapped.expected()


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("all layers in one storage", 1),
        ("all layers inside a block", 1),
        ("all layers inside a head", 2),
        ("K and V apart in two storages", 2),
        ("K and V apart in one storage", 2),
        ("mla with scales", 2),
        ("nhd, K and V together, a storage per layer", 3),
    ],
)
def test_a_block_takes_few_driver_calls(name: str, copies: int) -> None:
    found = on_device(name)
    found.pool.gather(0, 1, memoryview(bytearray(found.layout.groups[0].payload_bytes)))
    assert found.driver.copies == copies
    found.pool.close()
    found.ring.close()


def test_fenced_a_copy_that_fails_half_way_is_finished_before_the_error_is_raised(simple: OnDevice) -> None:
    class FailsSecond(HostDriver):
        @override
        def copy(self, rows: Rows, direction: Direction, stream: int) -> None:
            if self.copies == 1:
                self.fail = "copy"
            super().copy(rows, direction, stream)

    laid = LAYOUTS["nhd, K and V together, a storage per layer"]()
    layout, allocation = declared(laid)
    driver = FailsSecond({b"h" * 64: allocation})
    pool = CudaPool(layout, driver, simple.ring.view)
    with pytest.raises(PoolError, match="could not copy"):
        pool.scatter(0, 0, memoryview(bytes(layout.groups[0].payload_bytes)))
    assert not driver.queued
    after = allocation.tobytes()
    driver.fail = ""
    pool.close()
    assert allocation.tobytes() == after
    assert driver.leftovers() == []


def test_fenced_a_closed_pool_makes_no_call_of_the_driver(simple: OnDevice) -> None:
    simple.pool.close()
    calls = list(simple.driver.calls)
    assert calls[-1] == "release"
    with pytest.raises(PoolError, match="closed"):
        simple.pool.scatter(0, 0, memoryview(bytes(simple.layout.groups[0].payload_bytes)))
    with pytest.raises(PoolError, match="closed"):
        simple.pool.wait_ordering(pb.Ordering(cuda_event=bytes(64)), give_up=lambda: True)
    simple.pool.close()
    assert simple.driver.calls == calls


def test_threads_share_the_streams_and_mix_no_blocks(simple: OnDevice) -> None:
    size = simple.layout.groups[0].payload_bytes
    chunks = [
        np.random.default_rng(block).integers(0, 256, size, np.uint8).tobytes() for block in range(BLOCKS)
    ]

    def work(block: int) -> None:
        for _ in range(10):
            simple.pool.scatter(0, block, memoryview(chunks[block]))

    threads = [threading.Thread(target=work, args=(block,)) for block in range(BLOCKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for block, chunk in enumerate(chunks):
        simple.laid.write(block, chunk)
    assert simple.allocation.tobytes() == simple.expected()


def test_crash_only_whatever_fails_at_opening_leaves_nothing_behind() -> None:
    laid = LAYOUTS["all layers in one storage"]()
    layout, allocation = declared(laid)
    ring = SealedMemory.create("ring", 4096)
    for step in ("use", "open_memory", "allocation_size", "register_host", "create_stream"):
        driver = HostDriver({b"h" * 64: allocation}, fail=step)
        with pytest.raises(PoolError, match=step):
            CudaPool(layout, driver, ring.view)
        assert driver.leftovers() == [], step
    ring.close()


def test_one_failure_at_closing_keeps_nothing_else_from_being_given_back(simple: OnDevice) -> None:
    simple.driver.fail = "unregister_host"
    with pytest.raises(PoolError, match="unregister_host"):
        simple.pool.close()
    assert (simple.driver.opened, simple.driver.streams, simple.driver.released) == ([], [], True)


def test_the_ring_is_pinned_whole(simple: OnDevice) -> None:
    address = np.frombuffer(simple.ring.view, np.uint8).ctypes.data
    assert simple.driver.registered == [(address, simple.ring.size)]


def test_a_storage_past_its_allocation_is_refused_where_the_driver_knows() -> None:
    laid = LAYOUTS["all layers in one storage"]()
    layout, allocation = declared(laid)
    ring = SealedMemory.create("ring", 4096)
    short = allocation[: MARGIN + 10]
    with pytest.raises(PoolError, match="run past its allocation"):
        CudaPool(layout, HostDriver({b"h" * 64: short}), ring.view)
    silent = HostDriver({b"h" * 64: short}, knows_sizes=False)
    CudaPool(layout, silent, ring.view).close()
    ring.close()


@pytest.mark.parametrize("change", [{"device_uuid": "GPU-other"}, {"device": pb.CPU}])
def test_storages_of_two_devices_are_refused(change: dict[str, object]) -> None:
    laid = LAYOUTS["K and V apart in two storages"]()
    layout, allocation = declared(laid)
    other = replace(layout.storages[1], **change)  # type: ignore[arg-type]  # one of two fields
    ring = SealedMemory.create("ring", 4096)
    driver = HostDriver({b"h" * 64: allocation})
    with pytest.raises(PoolError, match="storage 1 is on another device"):
        CudaPool(replace(layout, storages=(layout.storages[0], other)), driver, ring.view)
    assert driver.leftovers() == []
    ring.close()


def never() -> bool:
    return False


def test_ordering_waits_for_the_event_or_takes_the_clients_word(simple: OnDevice) -> None:
    simple.pool.wait_ordering(pb.Ordering(synchronised=True), give_up=never)
    assert simple.driver.events == []
    simple.driver.pending_questions = 3
    simple.pool.wait_ordering(pb.Ordering(cuda_event=b"e" * 64), give_up=never)
    assert simple.driver.events == [b"e" * 64]
    assert (simple.driver.questions, simple.driver.open_events) == (4, 0)


def test_bounded_an_event_that_never_happens_is_given_up_and_the_pool_can_be_closed(simple: OnDevice) -> None:
    simple.driver.pending_questions = 1 << 60
    asked = iter([False, False, True])
    with pytest.raises(PoolError, match="did not happen before the transfer ended"):
        simple.pool.wait_ordering(pb.Ordering(cuda_event=b"e" * 64), give_up=lambda: next(asked))
    assert (simple.driver.questions, simple.driver.open_events) == (3, 0)
    simple.pool.close()
    assert simple.driver.leftovers() == []


@pytest.mark.parametrize(
    ("ordering", "message"),
    [
        (pb.Ordering(), "no proof"),
        (pb.Ordering(synchronised=False), "no proof"),
        (pb.Ordering(cuda_event=b"short"), "64 bytes, got 5"),
    ],
)
def test_ordering_without_a_usable_proof_is_refused(
    simple: OnDevice, ordering: pb.Ordering, message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        simple.pool.wait_ordering(ordering, give_up=never)


def test_copies_that_make_no_sense_are_refused(simple: OnDevice) -> None:
    size = simple.layout.groups[0].payload_bytes
    with pytest.raises(PoolError, match="block 99"):
        simple.pool.scatter(0, 99, memoryview(bytes(size)))
    with pytest.raises(PoolError, match="writable"):
        simple.pool.gather(0, 0, memoryview(bytes(size)))
    assert simple.driver.copies == 0


def part(shape: tuple[int, ...], strides: tuple[int, ...], chunk: tuple[int, ...], itemsize: int = 8) -> Part:
    return Part(
        storage=0,
        offset=1000,
        block_stride=1 << 40,
        shape=shape,
        strides=strides,
        chunk_offset=64,
        chunk_strides=chunk,
        itemsize=itemsize,
    )


def test_layers_further_apart_than_a_pitch_become_single_copies() -> None:
    far = MAX_PITCH + 1
    assert plan_rows(part((2, 4), (far, 8), (32, 8))) == (
        Rows(1000, 64, 32, 1, 32, 32),
        Rows(1000 + far, 96, 32, 1, 32, 32),
    )


def test_the_longest_axis_becomes_the_height() -> None:
    assert plan_rows(part((2, 50, 4), (8000, 160, 8), (1600, 32, 8))) == (
        Rows(1000, 64, 32, 50, 160, 32),
        Rows(9000, 1664, 32, 50, 160, 32),
    )
    assert plan_rows(part((), (), ())) == (Rows(1000, 64, 8, 1, 8, 8),)


def test_a_layout_of_thousands_of_copies_is_refused() -> None:
    count = MAX_COPIES + 1
    scattered = part((count, 2), (MAX_PITCH + 1, 16), (16, 8))
    with pytest.raises(PoolError, match="copy mode"):
        plan_rows(scattered)


def test_without_a_gpu_the_pool_says_what_is_missing() -> None:
    laid = LAYOUTS["all layers in one storage"]()
    cpu = check_worker(laid.identity(), laid.worker())
    with pytest.raises(PoolError, match="no CUDA storage"):
        open_cuda_pool(cpu, memoryview(bytearray(64)))
