"""A mapped pool in device memory: blocks of a GPU engine, reached through IPC handles of its allocations.

Promises what `pool.MappedPool` does: a copy has left the device's queue when `scatter` or `gather` returns, also when
it raises. All calls of the driver go through `CudaDriver`, so that the arithmetic here runs on host memory in tests.
Refuses: storages of another device, storages that do not fit their allocation, layouts that would take thousands of
copies a block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import product
from queue import SimpleQueue
from typing import Final, Protocol

import numpy as np

from kvpool_agent.pools.pool import Gate, PoolError, check_copy
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout
from kvpool_wire.strides import Part

MAX_PITCH: Final = (1 << 31) - 1
"""Bytes between two rows of one 2D copy (CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far)."""

MAX_COPIES: Final = 4096
"""Driver calls for one block. A layout that needs more (a transposed tensor) is slower than recomputing the tokens."""

EVENT_HANDLE_BYTES: Final = 64
"""Size of a cuIpcEventHandle."""

_FIRST_PAUSE: Final = 20e-6
_LONGEST_PAUSE: Final = 1e-3
"""Seconds between two questions whether an event has happened: a forward pass takes milliseconds."""

_STREAMS: Final = 4
"""Copies on their way at once: the transfers use two threads a session."""


class Direction(Enum):
    """Which way bytes go."""

    TO_DEVICE = "host to device"
    TO_HOST = "device to host"


@dataclass(frozen=True, slots=True)
class Rows:
    """`height` rows of `width` contiguous bytes. Positions and pitches are bytes.

    Attributes:
        device: position in device memory; relative to block 0 in a plan, an address in a call of the driver.
        host: position in host memory; relative to the payload in a plan, an address in a call.
        width: bytes of one row.
        height: rows, at least 1.
        device_pitch: from one row to the next in device memory; at least `width` where there are several rows.
        host_pitch: the same in host memory.
    """

    device: int
    host: int
    width: int
    height: int
    device_pitch: int
    host_pitch: int


class CudaDriver(Protocol):
    """The calls that a pool makes, for one device. Every method raises `PoolError` with the driver's error name."""

    def use(self) -> None:
        """Make the device's context current in the calling thread; the other methods need that."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map an allocation of another process; returns its address."""
        ...

    def close_memory(self, address: int) -> None:
        """Unmap it."""
        ...

    def allocation_size(self, address: int) -> int | None:
        """Bytes of the allocation that begins at `address`; None where the driver cannot say."""
        ...

    def register_host(self, address: int, size: int) -> None:
        """Pin host memory, so that copies run at full speed without staging."""
        ...

    def unregister_host(self, address: int) -> None:
        """Unpin it."""
        ...

    def create_stream(self) -> int:
        """A queue of copies that waits for no other."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Give it back."""
        ...

    def copy(self, rows: Rows, direction: Direction, stream: int) -> None:
        """Queue a copy between host and device; positions are addresses."""
        ...

    def synchronise(self, stream: int) -> None:
        """Return when all copies queued on the stream are done."""
        ...

    def open_event(self, handle: bytes) -> int:
        """Open another process's event."""
        ...

    def event_happened(self, event: int) -> bool:
        """Whether everything that was queued before the event is done; never waits."""
        ...

    def close_event(self, event: int) -> None:
        """Close it."""
        ...

    def release(self) -> None:
        """Let go of the device's context; no method may be called after it."""
        ...


class CudaPool:
    """`MappedPool` over imported device memory; `cuda.open_cuda_pool` makes one with the real driver."""

    def __init__(self, layout: WorkerLayout, driver: CudaDriver, ring: memoryview) -> None:
        """Map the layout's storages and pin the ring. Takes over `driver`, and releases it also when it raises.

        Args:
            layout: its storages are all of the driver's device.
            driver: of the device that the storages name.
            ring: the session's ring; every payload lies in it. The pool keeps its address, not the view.

        Raises:
            PoolError: what could not be mapped; nothing stays mapped.
        """
        self._layout = layout
        self._driver = driver
        self._gate = Gate()
        self._streams: SimpleQueue[int] = SimpleQueue()
        with ExitStack() as undo:
            undo.callback(driver.release)
            self._plans = tuple(
                tuple((part, plan_rows(part)) for part in group.parts) for group in layout.groups
            )
            driver.use()
            self._bases = self._open_storages(undo)
            address = _address(ring)
            driver.register_host(address, ring.nbytes)
            undo.callback(driver.unregister_host, address)
            for _ in range(_STREAMS):
                stream = driver.create_stream()
                undo.callback(driver.destroy_stream, stream)
                self._streams.put(stream)
            self._undo = undo.pop_all()

    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool.scatter`."""
        self._copy(group, block, payload, Direction.TO_DEVICE)

    def gather(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool.gather`."""
        if payload.readonly:
            raise PoolError("gather needs a writable payload")
        self._copy(group, block, payload, Direction.TO_HOST)

    def wait_ordering(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """See `MappedPool.wait_ordering`. The calling thread asks for the event at growing intervals.

        It does not let the driver wait: that has no deadline, and `close` would wait with it (BOUNDED).
        """
        proof = ordering.WhichOneof("proof")
        if proof == "synchronised" and ordering.synchronised:
            return
        if proof != "cuda_event":
            raise PoolError(
                "no proof that kernels have left the blocks: send `synchronised` or a `cuda_event`"
            )
        if len(ordering.cuda_event) != EVENT_HANDLE_BYTES:
            raise PoolError(
                f"a CUDA event handle has {EVENT_HANDLE_BYTES} bytes, got {len(ordering.cuda_event)}"
            )
        with self._gate.inside():
            self._driver.use()
            event = self._driver.open_event(ordering.cuda_event)
            try:
                self._wait(event, give_up)
            finally:
                self._driver.close_event(event)

    def close(self) -> None:
        """See `MappedPool.close`."""
        if self._gate.close():
            with self._undo:
                self._driver.use()

    def _wait(self, event: int, give_up: Callable[[], bool]) -> None:
        pause = _FIRST_PAUSE
        while not self._driver.event_happened(event):
            if give_up():
                raise PoolError(
                    "the engine's event did not happen before the transfer ended; record it on the stream that computes"
                    " the blocks, before the call"
                )
            time.sleep(pause)  # noqa: TID251 - a device has no event that a thread could wait for with a deadline
            pause = min(_LONGEST_PAUSE, pause * 2)

    def _open_storages(self, undo: ExitStack) -> tuple[int, ...]:
        """Addresses of the storages; storages of one allocation share its mapping."""
        opened: dict[bytes, int] = {}
        bases: list[int] = []
        for index, storage in enumerate(self._layout.storages):
            if storage.device != pb.CUDA or storage.device_uuid != self._layout.storages[0].device_uuid:
                raise PoolError(
                    f"storage {index} is on another device than storage 0; one rank has one device"
                )
            if storage.handle not in opened:
                base = self._driver.open_memory(storage.handle)
                undo.callback(self._driver.close_memory, base)
                opened[storage.handle] = base
            base = opened[storage.handle]
            size = self._driver.allocation_size(base)
            if size is not None and storage.handle_offset + storage.size > size:
                raise PoolError(
                    f"storage {index}: {storage.size} bytes from offset {storage.handle_offset} run past its allocation"
                    f" of {size} bytes"
                )
            bases.append(base + storage.handle_offset)
        return tuple(bases)

    def _copy(self, group: int, block: int, payload: memoryview, direction: Direction) -> None:
        check_copy(self._layout, group, block, payload)
        host = _address(payload)
        with self._gate.inside(), self._stream() as stream:
            for part, plan in self._plans[group]:
                device = self._bases[part.storage] + block * part.block_stride
                for rows in plan:
                    self._driver.copy(_placed(rows, device, host), direction, stream)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """A stream of one's own; whatever was queued on it is done when the block is left, also by an exception."""
        stream = self._streams.get()
        try:
            self._driver.use()
            try:
                yield stream
            finally:
                self._driver.synchronise(stream)
        finally:
            self._streams.put(stream)


def plan_rows(part: Part) -> tuple[Rows, ...]:
    """The 2D copies that move one part, relative to block 0 and to the payload.

    A contiguous innermost run becomes the width, the longest axis that a 2D copy can step over the height; the other
    axes are separate copies (layers that lie further apart than `MAX_PITCH`, for one).

    Raises:
        PoolError: more than `MAX_COPIES` copies.
    """
    axes = list(zip(part.shape, part.strides, part.chunk_strides, strict=True))
    width = part.itemsize
    if axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    fitting = [
        axis for axis in axes if max(axis[1:]) <= MAX_PITCH
    ]  # none is below the width: axes are nested
    height, device_pitch, host_pitch = max(fitting, default=(1, width, width))
    if fitting:
        axes.remove((height, device_pitch, host_pitch))
    if math.prod(extent for extent, _, _ in axes) > MAX_COPIES:
        raise PoolError(f"one block would take more than {MAX_COPIES} device copies ({part}); use copy mode")
    return tuple(
        Rows(
            part.offset + sum(i * axis[1] for i, axis in zip(indexes, axes, strict=True)),
            part.chunk_offset + sum(i * axis[2] for i, axis in zip(indexes, axes, strict=True)),
            width,
            height,
            device_pitch,
            host_pitch,
        )
        for indexes in product(*(range(extent) for extent, _, _ in axes))
    )


def _placed(rows: Rows, device: int, host: int) -> Rows:
    return Rows(
        device + rows.device, host + rows.host, rows.width, rows.height, rows.device_pitch, rows.host_pitch
    )


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
