"""Starts and ends the demo's processes: the master, the agents, the engines.

Promises: every child dies with the demo, also when the demo is killed; `Fleet.close` leaves no process, socket or
shared memory behind and waits for each child by its own exit, never by a pause.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

MASTER: Final = "mooncake_master"
START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 8.0


class DemoFault(Exception):
    """The demo cannot go on: what, where, and where its log is."""


def free_port() -> int:
    """A port of 127.0.0.1 that was free just now, below the range that the kernel hands out by itself."""
    for port in range(20_000 + os.getpid() % 8_000, 32_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoFault("no free port between 20000 and 32000 on 127.0.0.1")


@dataclass(slots=True)
class Child:
    """One process and its log."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def pid(self) -> int:
        """Process id, also after its death."""
        return self.process.pid

    def check_alive(self) -> None:
        """Raise with the end of its log if it is dead."""
        if self.process.poll() is not None:
            raise DemoFault(
                f"{self.name} ended with {self.process.returncode}; its log ends:\n{tail(self.log)}"
            )

    def stop(self, signum: int = signal.SIGTERM, *, seconds: float = STOP_SECONDS) -> None:
        """Send `signum` and wait; SIGKILL for one that does not go in time. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in text[-lines:])


class EngineProcess:
    """One process of an engine, spoken to by JSON lines: a call has one answer."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def send(self, call: str, **arguments: Any) -> None:
        """Begin a call; `receive` brings its answer."""
        stream = self.child.process.stdin
        if stream is None:
            raise DemoFault(f"{self.child.name} has no standard input")
        try:
            stream.write(json.dumps({"call": call, **arguments}) + "\n")
            stream.flush()
        except BrokenPipeError as error:
            raise DemoFault(f"{self.child.name} is gone; its log ends:\n{tail(self.child.log)}") from error

    def receive(self) -> dict[str, Any]:
        """The answer to the oldest call without one."""
        stream = self.child.process.stdout
        line = stream.readline() if stream is not None else ""
        if not line:
            self.child.process.wait(STOP_SECONDS)
            raise DemoFault(f"{self.child.name} ended in mid-call; its log ends:\n{tail(self.child.log)}")
        answer: dict[str, Any] = json.loads(line)["answer"]
        return answer

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        """One call and its answer."""
        self.send(call, **arguments)
        return self.receive()


@dataclass(slots=True)
class Fleet:
    """All children of one demo. Use as a context manager."""

    folder: Path
    environment: Mapping[str, str]
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], *, extra: Mapping[str, str] | None = None) -> Child:
        """Exec `command` in a session of its own (Ctrl-C reaches the demo alone), tied to the demo's life."""
        log = self.folder / f"{name.replace(' ', '-')}.log"
        environment = {
            **os.environ,
            **self.environment,
            **(extra or {}),
            "KVPOOL_TETHER_PARENT": str(os.getpid()),
        }
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvpool_demo.tether", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if "kvpool_demo.engine" in command else stream,
                stderr=stream,
                env=environment,
                start_new_session=True,
                text=True,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def close(self) -> None:
        """End all children, engines first, the master last."""
        for child in self.children:
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
                child.process.stdin = None
        for child in reversed(self.children):
            child.stop()


def start_master(fleet: Fleet) -> tuple[Child, str]:
    """A real master on free ports; returns it with its address."""
    beside = Path(sys.executable).parent / MASTER
    program = str(beside) if beside.exists() else shutil.which(MASTER)
    if program is None:
        raise DemoFault(f"{MASTER} is not installed; install the extra: pip install 'kvpool[agent-cpu]'")
    port = free_port()
    metrics = free_port_after(port)
    child = fleet.start(
        "master",
        [
            program,
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
            "--default_kv_lease_ttl=30s",
        ],
    )
    wait_until(lambda: listens(port), child)
    return child, f"127.0.0.1:{port}"


def free_port_after(port: int) -> int:
    """Another free port, above `port`."""
    for candidate in range(port + 1, 32_768):
        if not listens(candidate):
            return candidate
    raise DemoFault(f"no free port above {port} on 127.0.0.1")


def listens(port: int) -> bool:
    """Whether somebody accepts connections on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(true: Callable[[], bool], child: Child, *, seconds: float = START_SECONDS) -> None:
    """Poll a condition that no event tells of (a foreign program's readiness) while `child` lives."""
    end = time.monotonic() + seconds
    while not true():
        child.check_alive()
        if time.monotonic() > end:
            raise DemoFault(
                f"{child.name} is not ready after {seconds:.0f} s; its log ends:\n{tail(child.log)}"
            )
        time.sleep(0.05)  # noqa: TID251 - a foreign program's readiness has no event
