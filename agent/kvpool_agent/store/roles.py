"""What a worker process does, by role: hold a segment, answer what is there, or move chunks through a ring.

Promises: requests run on threads, so that the main thread always sees the agent's end; the threads that call
Mooncake's transfers have the lowest ordinary priority, since they spin while they wait.
Refuses requests of another role.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool_agent.store import frames
from kvpool_agent.store.errors import StoreError
from kvpool_agent.store.frames import Op
from kvpool_agent.store.introspect import handshake_port, mapping_of
from kvpool_agent.store.mooncake import MooncakeClient

PIECE: Final = 2048
SENTINEL: Final = "kvpool-probe"  # a key that is never put, so that asking takes no lease
_LOWEST_PRIORITY: Final = 19

Answer = Callable[[int, Callable[[], bytes]], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is told at its start.

    Attributes:
        setup: arguments of Mooncake's setup; the port of the name is chosen here.
        local_host: host part of the client's name.
        threads: of the prober.
        memory_fd: ring or segment, -1 without.
    """

    setup: Mapping[str, str | int]
    local_host: str
    threads: int
    memory_fd: int

    @staticmethod
    def parse(value: Mapping[str, object], *, memory_fd: int) -> Settings:
        """From the first frame."""
        setup = value["setup"]
        if not isinstance(setup, dict):
            raise StoreError("the settings have no setup")
        return Settings(setup, str(value["local_host"]), int(str(value["threads"])), memory_fd)

    def client(self) -> tuple[MooncakeClient, str]:
        """A client under a name that is free now, and the name."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            name = f"{self.local_host}:{probe.getsockname()[1]}"
        return MooncakeClient({**self.setup, "local_hostname": name}), name


class Role(Protocol):
    """A role that has been set up."""

    def facts(self) -> dict[str, object]:
        """What the agent is told when the role is ready."""
        ...

    def handle(self, op: Op, request: int, payload: bytes) -> None:
        """Take a request; must not block."""
        ...

    def stop(self) -> bytes:
        """Leave the pool cleanly."""
        ...


class SegmentRole:
    """Mounts the agent's memory as a segment, and holds it."""

    def __init__(self, settings: Settings, answer: Answer) -> None:
        self._answer = answer
        self._client, self._name = settings.client()
        fd = settings.memory_fd
        self._size = os.fstat(fd).st_size
        self._inode = os.fstat(fd).st_ino
        self._ids = self._client.mount(
            f"/proc/self/fd/{fd}", self._size, protocol=str(settings.setup["protocol"])
        )
        self._endpoint = f"{settings.local_host}:{handshake_port()}"

    def facts(self) -> dict[str, object]:
        """Where the segment is."""
        base = mapping_of(self._inode)
        return {
            "name": self._name,
            "base": base,
            "size": self._size,
            "endpoint": self._endpoint,
            "ids": self._ids,
        }

    def handle(self, op: Op, request: int, payload: bytes) -> None:
        """A segment answers nothing."""
        self._answer(request, lambda: _refuse(op, "segment"))

    def stop(self) -> bytes:
        """Unmount, then close."""
        code = self._client.unmount(self._ids)
        self._client.close()
        return frames.pack_codes([code])


class ProberRole:
    """Answers what is there and removes what must not be; builds keys itself and asks in pieces side by side."""

    def __init__(self, settings: Settings, answer: Answer) -> None:
        self._answer = answer
        self._client, self._name = settings.client()
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="probe")
        self._pings = ThreadPoolExecutor(1, thread_name_prefix="ping")  # never behind a long question

    def facts(self) -> dict[str, object]:
        """The client's name."""
        return {"name": self._name}

    def handle(self, op: Op, request: int, payload: bytes) -> None:
        """Start the pieces; the one that ends last answers."""
        if op is Op.PING:
            self._pings.submit(
                self._answer, request, lambda: frames.pack_codes(self._client.exist([SENTINEL]))
            )
            return
        try:
            build, count = self._builder(op, payload)
        except Exception as error:  # noqa: BLE001 -- the agent has to hear of it
            broken = error
            self._answer(request, lambda: _raise(broken))
            return
        if op is Op.LOCATE:
            self._threads.submit(
                self._answer, request, lambda: frames.pack_locations(self._client.locate(build(0, count)))
            )
            return
        if op is Op.REMOVE:
            self._threads.submit(
                self._answer, request, lambda: frames.pack_codes(self._client.remove(build(0, count)))
            )
            return
        gathered = _Gathered(count, lambda work: self._answer(request, work))
        for start in range(0, count, PIECE):
            self._threads.submit(
                gathered.run, start, lambda first: self._client.exist(build(first, first + PIECE))
            )
        if count == 0:
            self._answer(request, lambda: b"")

    def _builder(self, op: Op, payload: bytes) -> tuple[Callable[[int, int], list[str]], int]:
        """(function from a range to its keys, number of keys)."""
        if op in (Op.EXISTS_KEYS, Op.LOCATE, Op.REMOVE):
            keys, _ = frames.unpack_keys(payload)
            return lambda first, last: keys[first:last], len(keys)
        if op is not Op.EXISTS:
            _refuse(op, "prober")
        prefixes, hashes, size = frames.unpack_hashes(payload)
        text = hashes.hex()
        units = len(hashes) // size

        def build(first: int, last: int) -> list[str]:
            built: list[str] = []
            last = min(last, units * len(prefixes))
            while first < last:
                group, unit = divmod(first, units)
                end = min(units, unit + last - first)
                prefix, width = prefixes[group], 2 * size
                built += [prefix + text[at : at + width] for at in range(unit * width, end * width, width)]
                first += end - unit
            return built

        return build, units * len(prefixes)

    def stop(self) -> bytes:
        """Close."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pings.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        return b""


class LoaderRole:
    """Moves chunks between the pool and one ring."""

    def __init__(self, settings: Settings, answer: Answer) -> None:
        self._answer = answer
        self._size = os.fstat(settings.memory_fd).st_size
        self._ring = mmap.mmap(settings.memory_fd, self._size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._ring))
        self._client, self._name = settings.client()
        self._client.register(self._base, self._size)
        # One thread per kind: one get in flight is the fastest, and a put that hangs holds up no get.
        self._threads = {
            op: ThreadPoolExecutor(1, op.name, _yield_cores) for op in (Op.GET, Op.PUT, Op.REMOVE)
        }

    def facts(self) -> dict[str, object]:
        """The client's name."""
        return {"name": self._name}

    def handle(self, op: Op, request: int, payload: bytes) -> None:
        """Queue the request behind those of its kind."""
        threads = self._threads.get(op)
        if threads is None:
            self._answer(request, lambda: _refuse(op, "loader"))
        else:
            threads.submit(self._answer, request, lambda: self._run(op, payload))

    def _run(self, op: Op, payload: bytes) -> bytes:
        if op is Op.REMOVE:
            return frames.pack_codes(self._client.remove(frames.unpack_keys(payload)[0]))
        keys, offsets, sizes = frames.unpack_items(payload)
        move = self._client.get if op is Op.GET else self._client.put
        return frames.pack_codes(move(keys, (offsets + self._base).tolist(), sizes.tolist()))

    def stop(self) -> bytes:
        """Close, after what is under way."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        return b""


ROLES: Final[Mapping[str, Callable[[Settings, Answer], Role]]] = {
    "segment": SegmentRole,
    "prober": ProberRole,
    "loader": LoaderRole,
}


class _Gathered:
    """Collects the pieces of one existence request."""

    def __init__(self, count: int, answer: Callable[[Callable[[], bytes]], None]) -> None:
        self._codes = [0] * count
        self._left = -(-count // PIECE)
        self._answer = answer
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def run(self, start: int, ask: Callable[[int], list[int]]) -> None:
        """Ask one piece; answer if it is the last."""
        try:
            codes = ask(start)
            self._codes[start : start + len(codes)] = codes
        except Exception as error:  # noqa: BLE001 -- raised again when the answer is due
            self._error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._answer(self._finish)

    def _finish(self) -> bytes:
        if self._error is not None:
            raise self._error
        return frames.pack_codes(self._codes)


def _yield_cores() -> None:
    """Lower this thread's priority: Mooncake's caller spins, and the cores are wanted for checksums."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _refuse(op: Op, role: str) -> bytes:
    raise StoreError(f"a {role} does not serve {op.name}")


def _raise(error: Exception) -> bytes:
    raise error
