"""Starts and ends the demo's processes: the master, the agents, the engines.

Promises: every child dies with the demo, also when the demo is killed; `Fleet.close` leaves no process, socket or
shared memory behind and waits for each child by its own exit, never by a pause. An engine's process that dies, freezes
or talks nonsense ends the demo with a `DemoFault` that names it, never with a wait without end (BOUNDED).
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

MASTER: Final = "mooncake_master"
START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 8.0
ANSWER_SECONDS: Final = 60.0
"""For one answer of an engine's process: above the deadlines of its own calls, and above a slow import of torch."""


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

    def listens(self, port: int) -> bool:
        """Whether this very process listens on an IPv4 port; another one there is no sign of this one's readiness."""
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
        try:
            return any(str(link.readlink()) in sockets for link in Path(f"/proc/{self.pid}/fd").iterdir())
        except FileNotFoundError:
            return False  # it, or one of its descriptors, went away while we looked

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
    """One process of an engine, spoken to by JSON lines: a call has one answer; the first line says "attached"."""

    def __init__(self, child: Child) -> None:
        if child.process.stdin is None or child.process.stdout is None:
            raise DemoFault(f"{child.name} was started without pipes")
        self.child = child
        self._input = child.process.stdin.fileno()
        self.output: int = child.process.stdout.fileno()
        """Descriptor that becomes readable when it answers or ends."""
        os.set_blocking(self._input, False)
        self._received = bytearray()
        self._asked: deque[str] = deque(["start"])

    @property
    def awaited(self) -> str:
        """The oldest call without an answer."""
        return self._asked[0]

    def send(self, call: str, *, seconds: float = ANSWER_SECONDS, **arguments: Any) -> None:
        """Begin a call; `answers` brings what comes of it.

        Raises:
            DemoFault: the process is gone, or has not read the call after `seconds`.
        """
        unsent = memoryview(json.dumps({"call": call, **arguments}).encode() + b"\n")
        writable = select.poll()
        writable.register(self._input, select.POLLOUT)
        end = time.monotonic() + seconds
        while unsent:
            if not writable.poll(max(0.0, end - time.monotonic()) * 1000):
                raise self.fault(f"has not read {call!r} for {seconds:.0f} s")
            try:
                unsent = unsent[os.write(self._input, unsent) :]
            except BrokenPipeError as error:
                raise self.fault("is gone") from error
        self._asked.append(call)

    def take(self) -> dict[str, Any] | None:
        """What the process said last, as far as it is there: one answer, or None while it is not whole.

        Raises:
            DemoFault: the process has ended, or its line is no answer.
        """
        said = os.read(self.output, 65_536)
        if not said:
            raise self.fault(f"ended in mid-call ({self.awaited!r})")
        self._received += said
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = bytearray()
        try:
            if rest:
                raise ValueError("more than one line for one call")
            answer: dict[str, Any] = json.loads(line)["answer"]
        except (ValueError, LookupError, TypeError) as error:
            raise self.fault(f"answered {self.awaited!r} with {bytes(line + rest)[:200]!r}") from error
        self._asked.popleft()
        return answer

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        """One call and its answer."""
        self.send(call, **arguments)
        return answers([self])[0]

    def fault(self, what: str) -> DemoFault:
        """An error about this process, with the end of its log."""
        return DemoFault(f"{self.child.name} {what}; its log ends:\n{tail(self.child.log)}")


def answers(processes: Sequence[EngineProcess], *, seconds: float = ANSWER_SECONDS) -> list[dict[str, Any]]:
    """One answer of each process, in their order; they are heard in any order, so the first that dies is the one named.

    Raises:
        DemoFault: one has ended, talks nonsense, or has not answered after `seconds`.
    """
    found: dict[int, dict[str, Any]] = {}
    waiting = {process.output: process for process in processes}
    readable = select.poll()
    for output in waiting:
        readable.register(output, select.POLLIN)
    end = time.monotonic() + seconds
    while waiting:
        ready = readable.poll(max(0.0, end - time.monotonic()) * 1000)
        if not ready:
            process = next(iter(waiting.values()))
            raise process.fault(f"has not answered {process.awaited!r} for {seconds:.0f} s")
        for output, _ in ready:
            answer = waiting[output].take()
            if answer is not None:
                found[output] = answer
                readable.unregister(output)
                del waiting[output]
    return [found[process.output] for process in processes]


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
    attempts = 3
    while True:
        port = free_port()
        child = fleet.start(
            "master",
            [
                program,
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port_after(port)}",
                "--default_kv_lease_ttl=30s",
            ],
        )
        try:
            wait_until(partial(child.listens, port), child)
        except DemoFault:
            # Somebody else, another demo perhaps, may have taken one of the ports since they were seen free.
            attempts -= 1
            if not attempts or child.process.poll() is None:
                raise
        else:
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
    while True:
        # In this order: what a dead process was to bring about may be there from somebody else.
        child.check_alive()
        if true():
            return
        if time.monotonic() > end:
            raise DemoFault(
                f"{child.name} is not ready after {seconds:.0f} s; its log ends:\n{tail(child.log)}"
            )
        time.sleep(0.05)  # noqa: TID251 - a foreign program's readiness has no event
