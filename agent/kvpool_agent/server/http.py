"""Health pages and metrics over HTTP: /healthz, /readyz, /metrics.

Promises: a scrape never blocks the event loop (printing a thousand series takes tens of milliseconds) and scrapes do
not overlap, since the registry's collector hands a snapshot from one to the other. Refuses to change anything.
"""

import asyncio
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvpool_agent.errors import StartFault
from kvpool_agent.server.status import AgentStatus

GRACE_SECONDS: Final = 1.0


class HttpServer:
    """Serves between `start` and `close`."""

    def __init__(self, *, host: str, port: int, status: AgentStatus, registry: CollectorRegistry) -> None:
        self._host = host
        self._port = port
        self._status = status
        self._registry = registry
        self._scraping = asyncio.Lock()
        application = web.Application()
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=GRACE_SECONDS)
        self.address = ("", 0)
        """Host and port that were really taken."""

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            StartFault: the address cannot be had.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartFault(
                f"http://{self._host}:{self._port} cannot be listened on: {error.strerror}; "
                "see telemetry.host and telemetry.port"
            ) from error
        taken = self._runner.addresses[0]
        self.address = (str(taken[0]), int(taken[1]))

    async def close(self) -> None:
        """Stop listening; idempotent."""
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        # The answer itself is the proof: it comes from the event loop that does all the work.
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        why = self._status.not_ready()
        return web.Response(status=503, text=f"{why}\n") if why else web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        async with self._scraping:
            body = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
