"""A `CudaDriver` whose device memory is host memory, so that a CUDA pool's arithmetic runs byte for byte without a GPU.

Promises: copies move real bytes, but only when their stream is synchronised, as a device would be free to do; every
address is checked against what is mapped; leftovers can be counted. Refuses to model speed.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.pools.device import MAX_PITCH, Direction, Rows
from kvpool_agent.pools.pool import PoolError


@dataclass
class HostDriver:
    """Allocations by IPC handle; `fail` names a method that raises, `knows_sizes` whether ranges can be asked for."""

    allocations: dict[bytes, NDArray[np.uint8]]
    fail: str = ""
    knows_sizes: bool = True
    opened: list[int] = field(default_factory=list)
    registered: list[tuple[int, int]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    queued: dict[int, list[tuple[Rows, Direction]]] = field(default_factory=lambda: defaultdict(list))
    events: list[bytes] = field(default_factory=list)
    open_events: int = 0
    pending_questions: int = 0
    """So often an event is said not to have happened yet."""
    questions: int = 0
    calls: list[str] = field(default_factory=list)
    copies: int = 0
    released: bool = False

    def _call(self, name: str) -> None:
        if self.released:
            raise AssertionError(f"{name} after release")
        self.calls.append(name)
        if name == self.fail:
            raise PoolError(f"could not {name}: CUDA_ERROR_UNKNOWN")

    def use(self) -> None:
        self._call("use")

    def open_memory(self, handle: bytes) -> int:
        self._call("open_memory")
        address = int(self.allocations[handle].ctypes.data)
        if address in self.opened:
            raise PoolError("CUDA_ERROR_ALREADY_MAPPED")
        self.opened.append(address)
        return address

    def close_memory(self, address: int) -> None:
        self._call("close_memory")
        self.opened.remove(address)

    def allocation_size(self, address: int) -> int | None:
        self._call("allocation_size")
        sizes = {int(memory.ctypes.data): memory.nbytes for memory in self.allocations.values()}
        return sizes[address] if self.knows_sizes else None

    def register_host(self, address: int, size: int) -> None:
        self._call("register_host")
        self.registered.append((address, size))

    def unregister_host(self, address: int) -> None:
        self._call("unregister_host")
        self.registered = [one for one in self.registered if one[0] != address]

    def create_stream(self) -> int:
        self._call("create_stream")
        self.streams.append(max(self.streams, default=0) + 1)
        return self.streams[-1]

    def destroy_stream(self, stream: int) -> None:
        self._call("destroy_stream")
        self.streams.remove(stream)

    def copy(self, rows: Rows, direction: Direction, stream: int) -> None:
        self._call("copy")
        self.copies += 1
        if rows.height > 1 and not rows.width <= min(rows.device_pitch, rows.host_pitch):
            raise PoolError("CUDA_ERROR_INVALID_VALUE: a row is wider than its pitch")
        if max(rows.device_pitch, rows.host_pitch) > MAX_PITCH:
            raise PoolError("CUDA_ERROR_INVALID_VALUE: pitch")
        self._check_range(rows.device, (rows.height - 1) * rows.device_pitch + rows.width)
        self.queued[stream].append((rows, direction))

    def synchronise(self, stream: int) -> None:
        self._call("synchronise")
        for rows, direction in self.queued.pop(stream, []):
            for row in range(rows.height):
                device, host = rows.device + row * rows.device_pitch, rows.host + row * rows.host_pitch
                pair = (device, host) if direction is Direction.TO_DEVICE else (host, device)
                ctypes.memmove(*pair, rows.width)

    def open_event(self, handle: bytes) -> int:
        self._call("open_event")
        self.events.append(handle)
        self.open_events += 1
        return len(self.events)

    def event_happened(self, event: int) -> bool:
        self._call("event_happened")
        self.questions += 1
        return self.questions > self.pending_questions

    def close_event(self, event: int) -> None:
        self._call("close_event")
        self.open_events -= 1

    def release(self) -> None:
        self._call("release")
        self.released = True

    def _check_range(self, address: int, size: int) -> None:
        for memory in self.allocations.values():
            start = int(memory.ctypes.data)
            if start in self.opened and start <= address and address + size <= start + memory.nbytes:
                return
        raise PoolError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def leftovers(self) -> list[object]:
        """What was not given back."""
        return [*self.opened, *self.registered, *self.streams, *self.queued] + (
            [] if self.released else ["context"]
        )
