"""`Store` over Mooncake in worker processes. Runs in the agent, which imports no Mooncake.

Promises: the agent's event loop is never blocked and never crashes with a client; a hung or dead worker costs its own
calls and nothing else; the master's death is noticed by a probe (clients without a segment have no heartbeat) and
answered at once until it is back, after which everything reconnects by itself.
Refuses to cache what is there, and to retry calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from typing import Final

from kvpool_agent.store import frames
from kvpool_agent.store.blocked import BlockedKeys
from kvpool_agent.store.codes import exist_outcome
from kvpool_agent.store.config import StoreConfig, setup_arguments, worker_environment
from kvpool_agent.store.errors import StoreError, StoreMisuse, StoreUnavailable
from kvpool_agent.store.frames import Op
from kvpool_agent.store.loader import MooncakeLoader
from kvpool_agent.store.prober import MooncakeProber
from kvpool_agent.store.process import WorkerProcess, WorkerSpec
from kvpool_agent.store.protocol import RingLike, SegmentInfo, StoreHealth
from kvpool_agent.store.reach import MasterReach
from kvpool_agent.store.segment import SegmentHolder, sealed_memory
from kvpool_agent.store.supervisor import State, Supervisor

_log: Final = logging.getLogger(__name__)


class MooncakeStore:
    """See `protocol.Store`. Construct and use it inside a running event loop."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._reach = MasterReach(asyncio.get_running_loop().time)
        self._blocked = BlockedKeys()
        self._loaders: list[MooncakeLoader] = []
        self._opened = 0
        self._probing = Supervisor(self._spec("prober", "prober", None), config)
        self._prober = MooncakeProber(self._probing, self._reach)
        self._segment: SegmentHolder | None = None
        self._holding: Supervisor | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._running = False

    @property
    def prober(self) -> MooncakeProber:
        """See `Store.prober`."""
        return self._prober

    @property
    def segment(self) -> SegmentInfo | None:
        """See `Store.segment`."""
        return None if self._segment is None else self._segment.info

    async def start(self) -> None:
        """See `Store.start`.

        Raises:
            StoreMisuse: it runs already.
            OSError: the memory of the segment cannot be had.
        """
        if self._running:
            raise StoreMisuse("the store runs already; make a new one after stop")
        self._running = True
        if self._config.segment_size:
            self._segment = SegmentHolder(
                self._config, sealed_memory("kvpool-segment", self._config.segment_size)
            )
            spec = self._spec("segment", "segment", self._segment.fd)
            self._holding = Supervisor(spec, self._config, on_ready=self._segment.mounted)
            self._segment.watch(self._holding)
            self._holding.start()
        self._probing.start()
        self._monitor = asyncio.get_running_loop().create_task(
            self._watch_master(), name="kvpool-store-monitor"
        )

    async def wait_ready(self, *, deadline: float) -> bool:
        """See `Store.wait_ready`."""
        return all([await one.wait_up(deadline) for one in self._supervisors()])

    async def stop(self, *, deadline: float) -> None:
        """See `Store.stop`."""
        if not self._running:
            return
        self._running = False
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait({self._monitor})
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        holding = [] if self._holding is None else [self._holding.stop(clean=left)]
        closing = [loader.close() for loader in list(self._loaders)]
        ended = await asyncio.gather(self._probing.stop(), *closing, *holding, return_exceptions=True)
        if self._segment is not None:
            self._segment.close()
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def open_loader(self, ring: RingLike) -> MooncakeLoader:
        """See `Store.open_loader`.

        Raises:
            StoreMisuse: the store does not run, or the ring is not as long as it says.
        """
        if not self._running:
            raise StoreMisuse("the store does not run: call start first")
        if os.fstat(ring.fd).st_size < ring.size:
            raise StoreMisuse(f"the ring says {ring.size} bytes, its memory has {os.fstat(ring.fd).st_size}")
        self._opened += 1
        supervisor = Supervisor(self._spec(f"loader-{self._opened}", "loader", ring.fd), self._config)
        loader = MooncakeLoader(
            supervisor,
            self._config,
            ring_size=ring.size,
            blocked=self._blocked,
            reach=self._reach,
            on_close=self._forget,
        )
        self._loaders.append(loader)
        supervisor.start()
        return loader

    def health(self) -> StoreHealth:
        """See `Store.health`."""
        supervisors = list(self._supervisors())
        fresh = 3 * (self._config.probe_interval + self._config.probe_timeout)
        age = self._reach.age
        reachable = age is not None and age <= fresh and not self._reach.known_down
        errors = [one.last_error for one in supervisors if one.state is not State.UP and one.last_error]
        return StoreHealth(
            last_success_age=age,
            master_reachable=reachable,
            segment_mounted_bytes=self._config.segment_size if reachable and self.segment is not None else 0,
            pids={one.name: pid for one in supervisors if (pid := one.pid) is not None},
            restarts={one.name: one.generation - 1 for one in supervisors},
            last_error=self._reach.why or (errors[0] if errors else ""),
        )

    def _supervisors(self) -> Iterator[Supervisor]:
        if self._holding is not None:
            yield self._holding
        yield self._probing
        yield from (loader.supervisor for loader in self._loaders)

    def _forget(self, loader: MooncakeLoader) -> None:
        if loader in self._loaders:
            self._loaders.remove(loader)

    def _spec(self, name: str, role: str, memory_fd: int | None) -> WorkerSpec:
        settings = {
            "setup": setup_arguments(self._config, local_port=0),
            "local_host": self._config.local_host,
            "threads": self._config.probe_threads,
        }
        return WorkerSpec(
            name=name,
            role=role,
            settings=settings,
            environment=worker_environment(self._config, os.environ),
            memory_fd=memory_fd,
            log_dir=self._config.log_dir,
            max_outstanding=self._config.max_outstanding,
        )

    async def _watch_master(self) -> None:
        """Probe the master for ever; replace a prober that hangs."""
        loop = asyncio.get_running_loop()
        while True:
            if not await self._probing.wait_up(loop.time() + self._config.probe_interval):
                continue  # which says nothing about the master
            try:
                process = self._probing.current()
                await self._probe(process)
                oldest = process.oldest
                if oldest is not None and loop.time() - oldest > self._config.hang_timeout:
                    _log.warning("prober %d hangs for %.0f s, replaced", process.pid, loop.time() - oldest)
                    await self._probing.discard(process)
            except StoreUnavailable as error:
                _log.info("probe of the master: %s", error)  # the prober died meanwhile, or is full
            except StoreError as error:
                _log.error("probe of the master: %s", error)
            await asyncio.sleep(self._config.probe_interval)

    async def _probe(self, process: WorkerProcess) -> None:
        """Ask once. Slow is down until the answer comes, unless other answers came meanwhile."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        future = process.send(Op.PING, b"")
        done, _ = await asyncio.wait({future}, timeout=self._config.probe_timeout)
        if not done:
            age = self._reach.age
            if age is None or age > loop.time() - begun:
                self._reach.failed(f"no answer to a probe in {self._config.probe_timeout} s")
            await asyncio.wait({future}, timeout=self._config.hang_timeout)
        if not future.done():
            future.cancel()
            return
        code = int(frames.unpack_codes(future.result(), count=1)[0])
        if code >= 0:
            self._reach.answered()
            for one in self._supervisors():
                one.hurry()  # whoever could not start without a master can now
        else:
            self._reach.failed(f"a probe got {exist_outcome(code).name} ({code})")
