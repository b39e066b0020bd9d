"""Opens a worker session: its layout, its ring, its mapping where that can be had, its loader, its transfers.

Promises: either the session is complete, or an error says why and everything that was made for it is gone again: no
mapping, no ring, no loader process. Mapping and unmapping run in threads: a page table for gigabytes takes its time.
Refuses: memory that is not sealed, storages on several devices, a ring that holds less than two chunks.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from kvpool_agent.config import AgentConfig, EngineMode
from kvpool_agent.errors import SessionRefused
from kvpool_agent.pools.cpu import MappedCpuPool
from kvpool_agent.pools.cuda import open_cuda_pool
from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import MappedPool, PoolError
from kvpool_agent.server import codec
from kvpool_agent.server.descriptors import Channel
from kvpool_agent.server.session import Outbox, SessionArguments, WorkerParts, WorkerSession
from kvpool_agent.store.errors import StoreError
from kvpool_agent.store.protocol import Loader, Store
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_agent.transfer.guard import Shared
from kvpool_agent.transfer.manager import TransferManager
from kvpool_agent.transfer.movers import CopyMover, MappedMover
from kvpool_agent.transfer.ring import Ring
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.types import BlockMover, TransferResult
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import LayoutError, WorkerLayout, check_worker

log = logging.getLogger(__name__)

MAPPED: Final = "mapped"
COPY: Final = "copy"

LEAST_SLOTS: Final = 2
"""One that is verified while the next one is fetched."""

Send = Callable[[pb.ServerEvent], Awaitable[None]]
"""Writes one event to the client's stream."""


@dataclass(frozen=True, slots=True)
class WorkerTools:
    """What all worker sessions of an agent share."""

    config: AgentConfig
    store: Store
    shared: Shared
    metrics: AgentMetrics
    settings: TransferSettings


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """Which mode to try, and whether copy mode may replace it."""

    mode: str
    may_fall_back: bool = False
    reason: str = ""


def choose_mode(asked: pb.Mode.ValueType, allowed: EngineMode, *, storages: int) -> ModeChoice:
    """The mode to try for a rank: an engine that names one gets it or a reason, one that does not gets a mapping.

    Raises:
        SessionRefused: the engine asks for what the pool does not allow, or for a mapping without storages.
    """
    if allowed is EngineMode.COPY:
        return ModeChoice(COPY, reason="the pool's engines.mode is Copy" if asked == pb.MAPPED else "")
    if asked == pb.COPY:
        if allowed is EngineMode.MAPPED:
            raise SessionRefused(
                "ModeNotAllowed", "the pool's engines.mode is Mapped, the engine asks for copy mode"
            )
        return ModeChoice(COPY)
    if not storages:
        if allowed is EngineMode.MAPPED or asked == pb.MAPPED:
            raise SessionRefused("StoragesMissing", "mapped mode needs the storages that the tensors lie in")
        return ModeChoice(COPY, reason="the engine declared no storages")
    return ModeChoice(MAPPED, may_fall_back=asked == pb.MODE_UNSPECIFIED and allowed is EngineMode.AUTO)


async def open_worker(
    tools: WorkerTools, worker: pb.Worker, common: SessionArguments, *, send: Send, ready: pb.Ready
) -> WorkerSession:
    """Open the session of one rank, send its ring, and fill in `ready`.

    Args:
        tools: what all sessions of the agent share.
        worker: what the rank declares, untrusted.
        common: who attaches.
        send: writes to the client's stream.
        ready: what the client is told at the end.

    Raises:
        SessionRefused: why not; nothing of the session is left.
    """
    try:
        layout = check_worker(common["keyspace"].identity, worker)
    except LayoutError as error:
        raise SessionRefused("LayoutInvalid", str(error)) from error
    choice = choose_mode(worker.mode, tools.config.engines.mode, storages=len(layout.storages))
    async with AsyncExitStack() as undo:
        memory, ring = _make_ring(tools.config.segment.ring_size, layout)
        undo.callback(memory.close)
        pool, reason = None, choice.reason
        if choice.mode == MAPPED:
            fds = await _receive_storages(layout, common["channel"], send, tools.config.socket.token_timeout)
            pool, reason = await _map(layout, fds, memory, choice)
        mover = _mover(tools, pool, ring, layout, common["outbox"])
        undo.push_async_callback(mover.close)
        try:
            loader = await tools.store.open_loader(ring)
        except (StoreError, OSError) as error:
            raise SessionRefused("LoaderFailed", f"no loader could be started: {error}") from error
        undo.push_async_callback(loader.close)
        parts = WorkerParts(
            rank=worker.rank,
            mode=mover.mode,
            memory=memory,
            loader=loader,
            manager=_manager(tools, common, layout=layout, loader=loader, ring=ring, mover=mover),
            copying=mover if isinstance(mover, CopyMover) else None,
        )
        common["channel"].send_ring(memory.fd, memory.size)
        ready.mode = pb.MAPPED if mover.mode == MAPPED else pb.COPY
        ready.mode_reason = reason
        ready.ring_size = memory.size
        undo.pop_all()
        return WorkerSession(parts, **common)


def _make_ring(size: int, layout: WorkerLayout) -> tuple[SealedMemory, Ring]:
    try:
        memory = SealedMemory.create("kvpool-ring", size)
    except PoolError as error:
        raise SessionRefused("RingFailed", str(error)) from error
    try:
        ring = Ring(memory, chunk_bytes=layout.max_chunk_bytes)
        if ring.slots < LEAST_SLOTS:
            raise ValueError(
                f"a ring of {size} bytes holds one chunk of {ring.slot_bytes}; raise segment.ringSize"
            )
    except ValueError as error:
        memory.close()
        raise SessionRefused("RingTooSmall", str(error)) from error
    return memory, ring


async def _receive_storages(layout: WorkerLayout, channel: Channel, send: Send, seconds: float) -> list[int]:
    """Ask for the descriptors of the CPU storages; the caller owns what comes."""
    count = sum(storage.device == pb.CPU for storage in layout.storages)
    if count == 0:
        return []
    await send(pb.ServerEvent(descriptors_wanted=pb.DescriptorsWanted(count=count)))
    return await channel.storages(count, seconds=seconds)


async def _map(
    layout: WorkerLayout, fds: list[int], ring: SealedMemory, choice: ModeChoice
) -> tuple[MappedPool | None, str]:
    """Map the engine's memory; (None, why) where that failed and copy mode may replace it."""
    opening = asyncio.ensure_future(asyncio.to_thread(_open_pool, layout, fds, ring))
    try:
        return await asyncio.shield(opening), choice.reason
    except PoolError as error:
        if not choice.may_fall_back:
            raise SessionRefused("MappingFailed", str(error)) from error
        log.warning("engine memory cannot be mapped, copy mode instead: %s", error)
        return None, f"mapping failed: {error}"
    except asyncio.CancelledError:
        # The thread cannot be stopped; what it maps has no owner any more.
        opening.add_done_callback(_close_orphan)
        raise


def _close_orphan(opening: "asyncio.Future[MappedPool]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _open_pool(layout: WorkerLayout, fds: list[int], ring: SealedMemory) -> MappedPool:
    try:
        if len(fds) == len(layout.storages):
            return MappedCpuPool.open(layout, fds)
        if fds:
            raise PoolError("the worker's storages are on the CPU and on a GPU; attach one session for each")
        return open_cuda_pool(layout, ring.view)
    finally:
        for fd in fds:
            os.close(fd)


def _mover(
    tools: WorkerTools, pool: MappedPool | None, ring: Ring, layout: WorkerLayout, outbox: Outbox
) -> MappedMover | CopyMover:
    threads = tools.settings.mover_threads
    if pool is not None:
        return MappedMover(pool, ring=ring, layout=layout, threads=threads)

    def send(wanted: pb.CopyWanted) -> None:
        outbox.put(pb.ServerEvent(copy_wanted=wanted))

    return CopyMover(send=send, on_late=tools.metrics.late_completion, threads=threads)


def _manager(
    tools: WorkerTools,
    common: SessionArguments,
    *,
    layout: WorkerLayout,
    loader: Loader,
    ring: Ring,
    mover: BlockMover,
) -> TransferManager:
    outbox = common["outbox"]

    def report(result: TransferResult) -> None:
        outbox.put(codec.transfer_done(result))

    return TransferManager(
        engine_id=common["engine_id"],
        shared=tools.shared,
        coordinator=common["coordinator"],
        keyspace=common["keyspace"],
        layout=layout,
        loader=loader,
        prober=tools.store.prober,
        ring=ring,
        mover=mover,
        settings=tools.settings,
        metrics=tools.metrics,
        on_done=report,
    )
