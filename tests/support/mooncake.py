"""A real `mooncake_master` on free ports, for tests.

Promises: ready when `start` returns (probed, not slept for); killed and reaped by its own pid; its log is kept.
Refuses to run without the installed binary, and to listen on anything but loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free on loopback now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def master_binary() -> Path:
    """The `mooncake_master` of this environment."""
    return Path(sys.executable).with_name("mooncake_master")


class Master:
    """One master process; may be killed, frozen and started again on the same ports."""

    def __init__(
        self, directory: Path, *flags: str, port: int | None = None, http_port: int | None = None
    ) -> None:
        free = free_ports(2)
        self.port = port or free[0]
        self.http_port = http_port or free[1]
        self.flags = flags
        self.log = directory / f"master-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port of its RPC."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the running master."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout: float = 15.0) -> Master:
        """Start and wait until both ports answer."""
        command = [
            str(master_binary()),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.http_port}",
            *self.flags,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        for port in (self.port, self.http_port):
            while not _answers(port):
                if self._process.poll() is not None:
                    raise RuntimeError(
                        f"mooncake_master ended with {self._process.returncode}: {self.tail()}"
                    )
                if time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"mooncake_master not ready in {timeout} s: {self.tail()}")
                pause.wait(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL and reap. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def get(self, path: str) -> str:
        """GET a path of its HTTP port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def segments(self) -> list[dict[str, Any]]:
        """Segments that it knows."""
        found = json.loads(self.get("/get_segments_detail")).get("segments", [])
        return list(found)

    def keys(self) -> set[str]:
        """All keys that it knows; takes no lease."""
        return set(self.get("/get_all_keys").split())


@contextlib.contextmanager
def running_master(directory: Path, *flags: str) -> Iterator[Master]:
    """A master for the length of the block."""
    master = Master(directory, *flags)
    try:
        yield master.start()
    finally:
        master.kill()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
