"""A fake agent and clients of it; every client is closed before the agent is."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool_engine.aio import SchedulerClient, WorkerClient
from kvpool_engine.link import Backoff
from kvpool_engine.types import Mode
from unit.engine import samples
from unit.engine.fake_agent import FakeAgent

FAST = Backoff(first=0.01, longest=0.02, refused=0.05, attach_timeout=5.0)


@pytest.fixture
async def agent(socket_dir: Path) -> AsyncIterator[FakeAgent]:
    async with FakeAgent(socket_dir) as running:
        yield running


@pytest.fixture
async def scheduler(agent: FakeAgent) -> AsyncIterator[SchedulerClient]:
    client = SchedulerClient(agent.folder, samples.identity(), "engine-1", backoff=FAST)
    await client.connect(5)
    yield client
    await client.close()


MakeWorker = Callable[..., Awaitable[tuple[WorkerClient, samples.Engine]]]


@pytest.fixture
async def worker(agent: FakeAgent) -> AsyncIterator[MakeWorker]:
    made: list[WorkerClient] = []

    async def make(
        mode: Mode = Mode.MAPPED, *, connect: float = 5, **options: Any
    ) -> tuple[WorkerClient, samples.Engine]:
        engine = samples.engine(**options)
        client = WorkerClient(
            agent.folder, samples.identity(), "engine-1", engine.declaration, mode=mode, backoff=FAST
        )
        made.append(client)
        await client.connect(connect)
        return client, engine

    yield make
    for client in made:
        await client.close(deadline=0.2)
