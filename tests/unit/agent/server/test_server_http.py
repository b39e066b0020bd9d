"""The health pages and `/metrics` over a real port: what each says in each state of the agent, and after its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvpool_agent.config import AgentConfig
from kvpool_agent.errors import StartFault
from kvpool_agent.server.http import HttpServer
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.store.protocol import StoreHealth

CONFIG = AgentConfig.model_validate(
    {
        "pool": {"namespace": "default", "name": "pool"},
        "node": {"name": "n", "ip": "127.0.0.1"},
        "socket": {"directory": "/x"},
        "store": {"masterAddress": "m:1"},
    }
)
NO_STORE = StoreHealth(
    last_success_age=None, master_reachable=False, segment_mounted_bytes=0, pids={}, restarts={}
)


class Site:
    """One server, its status, and what a page of it answers."""

    def __init__(self) -> None:
        self.status = AgentStatus(CONFIG, Sessions(1), lambda: NO_STORE)
        self.registry = CollectorRegistry()
        self.server = HttpServer(host="127.0.0.1", port=0, status=self.status, registry=self.registry)

    async def get(self, path: str) -> tuple[int, str]:
        host, port = self.server.address
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    one = Site()
    await one.server.start()
    yield one
    await one.server.close()


async def test_readiness_follows_the_agents_life_and_health_does_not(site: Site) -> None:
    assert await site.get("/readyz") == (503, "starting\n")
    assert await site.get("/healthz") == (200, "ok\n"), "who is starting must not be restarted"
    site.status.serving = True
    assert await site.get("/readyz") == (200, "ok\n"), "a store that is down costs hits, not readiness"
    site.status.draining = True
    assert await site.get("/readyz") == (503, "draining\n")
    assert await site.get("/healthz") == (200, "ok\n"), "who drains must not be killed"


async def test_metrics_are_those_of_the_registry(site: Site) -> None:
    Counter("kvpool_example", "Example.", registry=site.registry).inc()
    status, page = await site.get("/metrics")
    assert status == 200
    assert "kvpool_example_total 1.0" in page.splitlines()


async def test_there_is_no_other_page(site: Site) -> None:
    assert (await site.get("/"))[0] == 404


async def test_nobody_listens_after_the_end(site: Site) -> None:
    await site.server.close()
    with pytest.raises(aiohttp.ClientConnectorError):
        await site.get("/healthz")


async def test_a_taken_port_is_named_with_the_fields_that_choose_it(site: Site) -> None:
    host, port = site.server.address
    second = HttpServer(host=host, port=port, status=site.status, registry=site.registry)
    with pytest.raises(StartFault, match=rf"{host}:{port} .* telemetry\.port"):
        await second.start()
