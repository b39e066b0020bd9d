"""Two real agents over one real master, and engines that use the client library; nothing of it outlives the module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from integration.engine_client.engine import LibraryEngine, attach
from kvpool_engine.types import Mode
from support.agents import AgentProcess
from support.mooncake import Master

MakeEngine = Callable[..., Awaitable[LibraryEngine]]
MakeAgent = Callable[[], AgentProcess]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvp-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def master(folder: Path) -> Iterator[Master]:
    one = Master(folder, "--default_kv_lease_ttl=2000").start()
    yield one
    one.kill()


def _agent(folder: Path, master: Master, name: str, **sections: Any) -> AgentProcess:
    own = folder / name
    own.mkdir()
    return AgentProcess(own, master.address, node=name, **sections)


@pytest.fixture(scope="module")
def agent_a(folder: Path, master: Master) -> Iterator[AgentProcess]:
    one = _agent(folder, master, "a")
    try:
        yield one.start().wait_for_store()
    finally:
        one.kill()


@pytest.fixture(scope="module")
def agent_b(folder: Path, master: Master) -> Iterator[AgentProcess]:
    one = _agent(folder, master, "b")
    try:
        yield one.start().wait_for_store()
    finally:
        one.kill()


@pytest.fixture
def mortals(master: Master, socket_dir: Path) -> Iterator[MakeAgent]:
    """Agents for a test that kills them, one run after the other on one folder.

    Without a segment, since the master would go on choosing a dead one for new chunks.
    """
    made: list[AgentProcess] = []

    def make() -> AgentProcess:
        made.append(AgentProcess(socket_dir, master.address, node="m", segment={"size": "0"}))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture
def mortal(mortals: MakeAgent) -> AgentProcess:
    return mortals().start().wait_for_store()


@pytest.fixture
async def engine() -> AsyncIterator[MakeEngine]:
    async with AsyncExitStack() as stack:

        async def make(agent: AgentProcess, *modes: Mode, name: str = "engine") -> LibraryEngine:
            return await attach(stack, agent.directory, name, modes or (Mode.MAPPED,))

        yield make
