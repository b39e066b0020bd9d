"""The agent's side of one worker process: start it, talk to it, kill it, know when it is gone.

Promises: never blocks the event loop; a call ends with its answer, at its deadline, or with `WorkerDied` when the
process is gone, and `WorkerDied` is never raised before the process has been reaped (FENCED rests on that).
Refuses to fork (the child is exec'd, with two descriptors and no others) and to restart anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool_agent.store import frames
from kvpool_agent.store.errors import FenceUnconfirmed, StoreError, StoreUnavailable, WorkerDied
from kvpool_agent.store.frames import HEADER, FrameError, Op

_log: Final = logging.getLogger(__name__)
_STDERR: Final = 2


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to start a worker.

    Attributes:
        name: for logs and health, "loader-3".
        role: "segment", "prober" or "loader".
        settings: the first frame, see `roles.Settings`.
        environment: the whole environment of the process.
        memory_fd: ring or segment that the process inherits, None without.
        log_dir: where its stderr goes, None inherits ours.
        max_outstanding: requests that it may hold.
    """

    name: str
    role: str
    settings: Mapping[str, object]
    environment: Mapping[str, str]
    memory_fd: int | None
    log_dir: str | None
    max_outstanding: int


class WorkerProcess:
    """One process. Made by `start`; dead for good once `gone` is set."""

    def __init__(self, spec: WorkerSpec, popen: subprocess.Popen[bytes], control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pid: Final = popen.pid
        self.started: Final = loop.time()
        self.gone = asyncio.Event()
        self.ready: asyncio.Future[dict[str, object]] = loop.create_future()
        self._popen = popen
        self._control = control
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._asked: dict[int, float] = {}
        self._next = 1
        self._idle = asyncio.Event()
        self._reaped: asyncio.Future[None] = loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._reap)
        self._task = loop.create_task(self._run(), name=f"kvpool-{spec.name}")

    @staticmethod
    def start(spec: WorkerSpec) -> WorkerProcess:
        """Exec the process; returns before it is ready (await `ready`)."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        memory = () if spec.memory_fd is None else (spec.memory_fd,)
        command = [
            sys.executable,
            "-P",  # nothing from the current folder
            "-m",
            "kvpool_agent.store.worker",
            spec.role,
            f"--control-fd={theirs.fileno()}",
        ]
        command += [f"--memory-fd={fd}" for fd in memory]
        if threading.current_thread() is threading.main_thread():  # any other thread may end before the agent
            command.append(f"--parent={os.getpid()}")
        try:
            with theirs, _log_file(spec) as log:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(spec.environment),
                    pass_fds=(theirs.fileno(), *memory),
                    start_new_session=True,  # a Ctrl-C is for the agent, which drains first
                )
        except OSError as error:
            ours.close()
            raise StoreUnavailable(f"{spec.name}: cannot start {command[0]}: {error}") from error
        return WorkerProcess(spec, popen, ours)

    @property
    def outstanding(self) -> int:
        """Requests that the process has not answered, those that nobody waits for included."""
        return len(self._asked)

    @property
    def oldest(self) -> float | None:
        """`loop.time()` at which the oldest unanswered request was sent."""
        return next(iter(self._asked.values()), None)

    def send(self, op: Op, payload: bytes) -> asyncio.Future[bytes]:
        """Send a request. The future ends with the answer, `StoreError`, or `WorkerDied` once the process is gone.

        Cancelling the future forgets the request; the process still works on it.
        """
        if self.gone.is_set() or self._writer is None:
            raise WorkerDied(f"{self.spec.name} (pid {self.pid}) is gone")
        if self.outstanding >= self.spec.max_outstanding:
            raise StoreUnavailable(
                f"{self.spec.name}: {self.outstanding} requests are waiting already, the limit (BOUNDED); try later"
            )
        loop = asyncio.get_running_loop()
        request, self._next = self._next, self._next + 1
        future: asyncio.Future[bytes] = loop.create_future()
        future.add_done_callback(_retrieve)
        self._pending[request] = future
        self._asked[request] = loop.time()
        self._idle.clear()
        self._writer.write(frames.frame(op, request, payload))
        return future

    def kill(self) -> None:
        """SIGKILL. Await `wait_gone` before touching memory that the process had."""
        if self._popen.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_idle(self, deadline: float) -> None:
        """Until every request is answered, the process is gone, or `deadline` (`loop.time()`) has come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()

    async def wait_gone(self, timeout: float) -> None:
        """Until the process is reaped.

        Raises:
            FenceUnconfirmed: it was not in `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.gone.wait()
        except TimeoutError:
            raise FenceUnconfirmed(
                f"{self.spec.name}: pid {self.pid} is not gone {timeout:.1f} s after SIGKILL (stuck in the kernel?); "
                "its ring must not be used again",
                pid=self.pid,
            ) from None

    async def stop(self, timeout: float) -> None:
        """Ask the process to leave the pool cleanly, kill it if it does not in `timeout` seconds, reap it."""
        try:
            async with asyncio.timeout(timeout):
                if not self.ready.done():
                    await asyncio.wait({self.ready})
                with contextlib.suppress(WorkerDied, StoreUnavailable):
                    await self.send(Op.STOP, b"")
                await self.gone.wait()
        except (TimeoutError, StoreError) as error:
            _log.warning("%s: no clean stop: %s", self.spec.name, str(error) or "timed out")
        finally:
            self.kill()

    async def _run(self) -> None:
        """Read answers until the process closes its end, then make sure that it is gone and say so."""
        reason = "closed its control socket"
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
            self._writer.write(frames.frame(Op.CONFIG, 0, frames.pack_json(self.spec.settings)))
            while True:
                length, op, request = frames.parse_header(await reader.readexactly(HEADER.size))
                self._take(op, request, await reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except FrameError as error:
            reason = str(error)
        finally:
            self.kill()
            await asyncio.shield(self._reaped)
            self._end(reason)

    def _take(self, op: Op, request: int, payload: bytes) -> None:
        if op is Op.READY:
            self.ready.set_result(frames.unpack_json(payload))
            return
        if op is Op.FAILED:
            self._fail_start(
                StoreUnavailable(f"{self.spec.name}: {frames.unpack_json(payload).get('error')}")
            )
            return
        self._asked.pop(request, None)
        if not self._asked:
            self._idle.set()
        future = self._pending.pop(request, None)
        if future is None or future.done():
            return  # nobody waits any more
        if op is Op.REPLY:
            future.set_result(payload)
        else:
            future.set_exception(StoreError(f"{self.spec.name}: {frames.unpack_json(payload).get('error')}"))

    def _fail_start(self, error: StoreError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved here; whoever waits for it still gets it

    def _reap(self) -> None:
        """The kernel says that the process has ended."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._popen.wait()
        os.close(self._pidfd)
        self._reaped.set_result(None)

    def _end(self, reason: str) -> None:
        code = self._popen.returncode
        died = f"{self.spec.name} (pid {self.pid}) {reason}, exit status {code}"
        if self._writer is not None:
            self._writer.close()
        else:
            self._control.close()
        self.gone.set()
        self._fail_start(WorkerDied(died))
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied(died))
        self._pending.clear()
        self._asked.clear()
        self._idle.set()


def _retrieve(future: asyncio.Future[bytes]) -> None:
    """Take note of an error, so that one which nobody waits for any more is not reported as lost."""
    if not future.cancelled():
        future.exception()


@contextlib.contextmanager
def _log_file(spec: WorkerSpec) -> Iterator[int]:
    """Where the process writes: its own file, or our stderr."""
    if spec.log_dir is None:
        yield _STDERR
        return
    with Path(spec.log_dir, f"{spec.name}.log").open("ab") as file:
        yield file.fileno()
