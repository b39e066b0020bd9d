"""`python -m kvpool_agent.store.worker ROLE`: one Mooncake client at arm's length from the agent.

Promises (CRASH_ONLY): it dies with the agent, by signal and by end of file on the control socket, whatever its threads
hang in; requests are answered in the order in which they finish, each exactly once.
Refuses to outlive its control socket, to listen on anything of its own, and to decide anything: deadlines, retries
and order are the agent's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from kvpool_agent.store import frames
from kvpool_agent.store.errors import StoreError
from kvpool_agent.store.frames import HEADER, Op
from kvpool_agent.store.roles import ROLES, Role, Settings

_PR_SET_PDEATHSIG: Final = 1


class Control:
    """The worker's end of the control socket. Writers may be any thread, the reader is the main thread."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()

    def read(self) -> tuple[Op, int, bytes] | None:
        """The next frame; None at the end of file."""
        header = self._read_exactly(HEADER.size)
        if header is None:
            return None
        length, op, request = frames.parse_header(header)
        payload = self._read_exactly(length)
        return None if payload is None else (op, request, payload)

    def write(self, op: Op, request: int, payload: bytes) -> None:
        """Write a frame; without a reader there is nothing left to live for."""
        try:
            with self._lock:
                self._socket.sendall(frames.frame(op, request, payload))
        except OSError:
            leave(1)

    def _read_exactly(self, count: int) -> bytes | None:
        parts = bytearray(count)
        view = memoryview(parts)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                return None
            view = view[got:]
        return bytes(parts)


def leave(status: int) -> NoReturn:
    """End now. No handlers: Mooncake's own would wait for peers and for the master."""
    sys.stderr.flush()
    os._exit(status)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the agent's thread that started it ends.

    `parent` is 0 when that thread may end before the agent does; then only the control socket tells.
    """
    if parent == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above
        leave(1)


def guarded(control: Control, request: int, work: Callable[[], bytes]) -> None:
    """Run `work` and answer the request, with its result or with what went wrong."""
    try:
        payload, op = work(), Op.REPLY
    except Exception as error:  # noqa: BLE001 -- whatever it is, the agent has to hear of it
        traceback.print_exc()
        payload, op = frames.pack_json({"error": f"{type(error).__name__}: {error}"}), Op.ERROR
    control.write(op, request, payload)


def start_role(control: Control, settings: Settings, role: str) -> Role:
    """Set up the role or tell the agent why not, and end."""
    try:
        started = ROLES[role](settings, lambda request, work: guarded(control, request, work))
        control.write(Op.READY, 0, frames.pack_json(started.facts()))
        return started
    except Exception as error:  # noqa: BLE001 -- as above
        traceback.print_exc()
        control.write(Op.FAILED, 0, frames.pack_json({"error": f"{type(error).__name__}: {error}"}))
        leave(2)


def serve(control: Control, role: Role) -> NoReturn:
    """Hand requests to the role until the agent says stop or is gone."""
    while (message := control.read()) is not None:
        op, request, payload = message
        if op is Op.STOP:
            guarded(control, request, role.stop)
            leave(0)
        role.handle(op, request, payload)
    leave(1)


def main() -> NoReturn:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="kvpool_agent.store.worker")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, default=-1)
    parser.add_argument("--parent", type=int, default=0)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # a Ctrl-C or a node's SIGTERM is for the agent, which drains first
    control = Control(arguments.control_fd)
    first = control.read()
    if first is None:
        leave(1)
    if first[0] is not Op.CONFIG:
        raise StoreError(f"the first frame is {first[0].name}, not CONFIG")
    settings = Settings.parse(frames.unpack_json(first[2]), memory_fd=arguments.memory_fd)
    serve(control, start_role(control, settings, arguments.role))


if __name__ == "__main__":
    main()
