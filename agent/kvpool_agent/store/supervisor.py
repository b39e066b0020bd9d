"""Keeps one worker up: starts it, restarts it when it dies, swaps it on request.

Promises (CRASH_ONLY): whatever happens to the process, another is started, at once after a swap, after a growing
pause after a death; nobody who asks for the worker waits for a start that is known to be failing.
Refuses to judge a process's work; whoever finds it hung kills it, or asks for a swap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from kvpool_agent.store.backoff import pause
from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.errors import StoreError, StoreUnavailable
from kvpool_agent.store.process import WorkerProcess, WorkerSpec

_log: Final = logging.getLogger(__name__)


class State(StrEnum):
    """What the supervisor is at."""

    STARTING = "starting"
    UP = "up"
    BACKOFF = "backoff"
    STOPPED = "stopped"


class Supervisor:
    """Owner of the successive processes of one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: StoreConfig,
        on_ready: Callable[[dict[str, object]], None] | None = None,
    ) -> None:
        self.name: Final = spec.name
        self.generation = 0
        self.last_error = ""
        self._spec = spec
        self._config = config
        self._on_ready = on_ready
        self._state = State.STARTING
        self._failures = 0
        self._process: WorkerProcess | None = None
        self._leaving: set[WorkerProcess] = set()
        self._swap = asyncio.Event()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """What the supervisor is at. A process that has ended is not up, even before that has been dealt with."""
        if self._state is State.UP and (self._process is None or self._process.gone.is_set()):
            return State.BACKOFF
        return self._state

    @property
    def pid(self) -> int | None:
        """Pid of the present process, ready or not."""
        return self._process.pid if self._process is not None and not self._process.gone.is_set() else None

    def start(self) -> None:
        """Start the first process in the background."""
        self._launch()
        self._task = asyncio.get_running_loop().create_task(self._keep_up(), name=f"kvpool-keep-{self.name}")

    def current(self) -> WorkerProcess:
        """The process, if it is ready now.

        Raises:
            StoreUnavailable: it is not; the message says why.
        """
        if self.state is not State.UP or self._process is None:
            raise StoreUnavailable(f"{self.name} is {self.state}: {self.last_error or 'no error so far'}")
        return self._process

    async def acquire(self, deadline: float) -> WorkerProcess:
        """The process, waiting for it only while its first or swapped start is under way.

        Raises:
            StoreUnavailable: the last start failed, or the process is not ready by the deadline.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._state is State.STARTING and self._failures == 0:
                    await self._changed.wait()
        return self.current()

    async def wait_up(self, deadline: float) -> bool:
        """Whether the process is ready before the deadline, however often it has to be started."""
        try:
            async with asyncio.timeout_at(deadline):
                while self.state is not State.UP:
                    if self._state is State.STOPPED:
                        return False
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def hurry(self) -> None:
        """What made starts fail is over: end a pause, or the next one."""
        if self.state is not State.UP:
            self._hurry.set()

    def swap(self, process: WorkerProcess) -> None:
        """Start a new process at once, if `process` is still the present one. Does not kill it."""
        if process is self._process and self._state is State.UP:
            self._leaving.add(process)
            self._set(State.STARTING)
            self._swap.set()

    async def discard(self, process: WorkerProcess) -> None:
        """Kill a process and wait until it is gone.

        Raises:
            FenceUnconfirmed: it cannot be reaped.
        """
        self.swap(process)
        process.kill()
        await process.wait_gone(self._config.reap_timeout)
        self._leaving.discard(process)

    async def discard_all(self) -> None:
        """As `discard`, for every process that was ever given work and is still there.

        Raises:
            FenceUnconfirmed: one cannot be reaped.
        """
        if self._state is State.UP and self._process is not None:
            self.swap(self._process)
        for process in list(self._leaving):
            await self.discard(process)

    async def stop(self, *, clean: float = 0.0) -> None:
        """End for good: `clean` seconds for the process to leave the pool by itself, then kill and reap.

        Raises:
            FenceUnconfirmed: a process cannot be reaped.
        """
        self._set(State.STOPPED)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        process = self._process
        if process is not None and clean > 0:
            await process.stop(clean)
        for one in [*self._leaving, *([process] if process is not None else [])]:
            one.kill()
            await one.wait_gone(self._config.reap_timeout)
        self._leaving.clear()

    async def _keep_up(self) -> None:
        while True:
            process = self._process
            try:
                if process is None:
                    raise StoreUnavailable(self.last_error)
                await self._serve(process)
                self._failures = 0
            except StoreError as error:
                self._failures += 1
                self.last_error = str(error)
                _log.warning("%s: %s (failure %d in a row)", self.name, error, self._failures)
                self._set(State.BACKOFF)
                seconds = pause(
                    self._failures,
                    first=self._config.backoff_first,
                    most=self._config.backoff_most,
                    random=random.random,
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._hurry.wait()
                self._hurry.clear()
            self._launch()

    async def _serve(self, process: WorkerProcess) -> None:
        """From start to swap. A death is an error."""
        try:
            async with asyncio.timeout(self._config.setup_timeout):
                facts = await asyncio.shield(process.ready)
        except TimeoutError:
            process.kill()
            await process.wait_gone(self._config.reap_timeout)
            raise StoreUnavailable(f"{self.name}: not ready in {self._config.setup_timeout} s") from None
        except StoreError:
            process.kill()
            await process.wait_gone(self._config.reap_timeout)
            raise
        if self._on_ready is not None:
            self._on_ready(facts)
        self._hurry.clear()
        self._set(State.UP)
        up_since = asyncio.get_running_loop().time()
        await self._until_swapped_or_gone(process)
        if process in self._leaving:
            return
        if asyncio.get_running_loop().time() - up_since > self._config.backoff_most:
            self._failures = 0  # it had been well; start again with a short pause
        raise StoreUnavailable(f"{self.name}: process {process.pid} died")

    async def _until_swapped_or_gone(self, process: WorkerProcess) -> None:
        waits = {asyncio.ensure_future(self._swap.wait()), asyncio.ensure_future(process.gone.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
            self._swap.clear()

    def _launch(self) -> None:
        self._set(State.STARTING)
        self.generation += 1
        try:
            self._process = WorkerProcess.start(self._spec)
        except StoreUnavailable as error:
            self._process = None
            self.last_error = str(error)

    def _set(self, state: State) -> None:
        if self._state is State.STOPPED:
            return
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()
