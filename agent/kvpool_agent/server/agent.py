"""The composition root: one agent, from its configuration to its end.

Promises: what was started is stopped, in reverse, whichever step fails; ready is said only after the agent's own call
over its sockets has worked; the store may be down the whole time. Refuses to hold logic: every part is built here and
lives elsewhere.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from contextlib import AsyncExitStack
from typing import Final

import grpc.aio

from kvpool_agent.config import AgentConfig, Protocol
from kvpool_agent.errors import StartFault
from kvpool_agent.server.attach import Attacher
from kvpool_agent.server.descriptors import DescriptorServer
from kvpool_agent.server.drain import STORE_SECONDS, drain
from kvpool_agent.server.http import HttpServer
from kvpool_agent.server.preflight import raise_file_limit
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.selfdial import dial
from kvpool_agent.server.service import AgentService
from kvpool_agent.server.sockets import SocketFolder
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.server.stream import SessionStreams
from kvpool_agent.server.worker import WorkerTools
from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.mooncake_store import MooncakeStore
from kvpool_agent.store.protocol import Transport
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_agent.telemetry.setup import Telemetry, TelemetrySettings
from kvpool_agent.transfer.guard import SaveGuard, Shared, TransferIds
from kvpool_agent.transfer.lookup import Lookups
from kvpool_agent.transfer.removals import Removals
from kvpool_agent.transfer.settings import TransferSettings
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_agent.transfer.types import Integrity
from kvpool_wire import limits

log = logging.getLogger(__name__)

MAX_TOMBSTONES: Final = 65_536
RPC_GRACE_SECONDS: Final = 1.0
REMOVAL_SECONDS: Final = 1.0

FIRST_STORE_SECONDS: Final = 5.0
"""Mooncake notices a dead master after 4.3 s; after that the agent is ready without its store."""

_SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


def telemetry_settings(config: AgentConfig) -> TelemetrySettings:
    """What the SDK is built from."""
    otlp = config.telemetry.otlp
    return TelemetrySettings(
        endpoint=otlp.endpoint,
        protocol=otlp.protocol,
        sampling=otlp.sampling,
        resource={"k8s.node.name": config.node.name, "kvpool.pool": config.pool.full_name},
    )


def store_config(config: AgentConfig) -> StoreConfig:
    """What the store is built from."""
    return StoreConfig(
        master_address=config.store.master_address,
        local_host=config.node.ip,
        protocol=Transport.RDMA if config.store.protocol is Protocol.RDMA else Transport.TCP,
        devices=config.store.devices,
        segment_size=config.segment.size,
        rpc_timeout=config.store.rpc_timeout,
        cluster_id=config.store.cluster_id,
    )


class Agent:
    """One node agent. `run` returns when it has ended."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._sessions = Sessions(config.engines.max_sessions)
        self.metrics: Final = AgentMetrics()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain.

        Raises:
            StartFault: the node cannot run the agent as configured.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        raise_file_limit()
        # Sockets are for the agent's user and the folder's group from the moment that they exist.
        os.umask(0o007)
        async with AsyncExitStack() as parts:
            telemetry = Telemetry(telemetry_settings(self._config), self.metrics)
            telemetry.install()
            # Entered first, left last: whatever the others count or trace on their way out is still told.
            parts.push_async_callback(asyncio.to_thread, telemetry.close)
            store = MooncakeStore(store_config(self._config))
            status = AgentStatus(self._config, self._sessions, store.health)
            self.metrics.watch(status.gauges)
            folder = SocketFolder(self._config.socket.directory)
            parts.callback(folder.close)
            http = await self._start_http(parts, status, telemetry)
            await self._start_store(parts, store)
            await self._serve(parts, store, status, folder)
            await dial(folder)
            await self._wait_for_store(store)
            status.serving = True
            self._say_ready(http, folder)
            await self._stop.wait()
            await drain(status, self._sessions, seconds=self._config.drain.timeout, hurry=self._hurry)

    def _signalled(self, number: signal.Signals) -> None:
        log.info("signal %s%s", number.name, "" if not self._stop.is_set() else ": the drain is cut short")
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _start_http(
        self, parts: AsyncExitStack, status: AgentStatus, telemetry: Telemetry
    ) -> HttpServer:
        settings = self._config.telemetry
        http = HttpServer(host=settings.host, port=settings.port, status=status, registry=telemetry.registry)
        await http.start()
        parts.push_async_callback(http.close)
        return http

    async def _start_store(self, parts: AsyncExitStack, store: MooncakeStore) -> None:
        try:
            await store.start()
        except OSError as error:
            raise StartFault(
                f"segment.size {self._config.segment.size}: no memory for it: {error.strerror}"
            ) from error
        parts.push_async_callback(self._stop_store, store)

    async def _wait_for_store(self, store: MooncakeStore) -> None:
        """Give the store's first processes a moment: engines that attach at once should not see misses without need."""
        ready = asyncio.ensure_future(
            store.wait_ready(deadline=asyncio.get_running_loop().time() + FIRST_STORE_SECONDS)
        )
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            ready.cancel()
        elif not ready.result():
            log.warning(
                "the store does not answer, lookups miss until it does: %s", store.health().last_error
            )

    async def _stop_store(self, store: MooncakeStore) -> None:
        await store.stop(deadline=asyncio.get_running_loop().time() + STORE_SECONDS)

    async def _serve(
        self, parts: AsyncExitStack, store: MooncakeStore, status: AgentStatus, folder: SocketFolder
    ) -> None:
        """Open both sockets."""
        config = self._config
        lease = config.cache.lease_ttl
        tombstones = Tombstones(ttl=6 * lease, capacity=MAX_TOMBSTONES, clock=time.monotonic)
        lookups = Lookups(
            prober=store.prober, tombstones=tombstones, metrics=self.metrics, lease_seconds=lease
        )
        epoch = secrets.randbits(63)
        shared = self._shared(parts, store, tombstones, epoch)
        tools = WorkerTools(
            config=config,
            store=store,
            shared=shared,
            metrics=self.metrics,
            settings=TransferSettings(
                max_transfers=config.engines.max_queued,
                integrity=Integrity(config.cache.integrity.value),
            ),
        )
        descriptors = DescriptorServer(
            folder.descriptors,
            epoch=epoch,
            allowed_uids=config.socket.allowed_uids,
            token_timeout=config.socket.token_timeout,
            max_connections=config.socket.max_connections,
        )
        streams = SessionStreams(
            sessions=self._sessions,
            descriptors=descriptors,
            attacher=Attacher(tools, self._sessions),
            status=status,
            attach_seconds=config.socket.token_timeout,
        )
        service = AgentService(
            sessions=self._sessions,
            descriptors=descriptors,
            streams=streams,
            lookups=lookups,
            guard=shared.guard,
            status=status,
            metrics=self.metrics,
            cache=config.cache,
            max_lookups=config.engines.max_lookups,
        )
        # Before gRPC's socket: whoever sees that one finds the other.
        descriptors.start()
        parts.callback(descriptors.close)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((service.handlers(),))
        try:
            server.add_insecure_port(f"unix:{folder.rpc}")
        except RuntimeError as error:
            raise StartFault(f"{folder.rpc} cannot be listened on: {error}") from error
        await server.start()
        parts.push_async_callback(server.stop, RPC_GRACE_SECONDS)
        # Sessions end before the server does, so that streams are over when it waits for them.
        parts.push_async_callback(self._sessions.close_all, "the agent is going away")
        folder.rpc.chmod(0o660)

    def _shared(
        self, parts: AsyncExitStack, store: MooncakeStore, tombstones: Tombstones, epoch: int
    ) -> Shared:
        """What outlives worker sessions; ends after the last of them and before the store."""
        lease = self._config.cache.lease_ttl
        removals = Removals(store.prober, tombstones=tombstones, metrics=self.metrics, lease_seconds=lease)

        async def end() -> None:
            # What a lease still holds back can be removed once it has lapsed.
            await removals.close(deadline=asyncio.get_running_loop().time() + lease + REMOVAL_SECONDS)

        parts.push_async_callback(end)
        guard = SaveGuard(removals=removals, metrics=self.metrics, clock=time.monotonic)
        return Shared(ids=TransferIds(epoch), guard=guard, removals=removals, tombstones=tombstones)

    def _say_ready(self, http: HttpServer, folder: SocketFolder) -> None:
        log.info(
            "ready",
            extra={
                "http": f"{http.address[0]}:{http.address[1]}",
                "sockets": str(folder.rpc.parent),
                "master": self._config.store.master_address,
                "segment_bytes": self._config.segment.size,
            },
        )
