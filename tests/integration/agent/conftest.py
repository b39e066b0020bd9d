"""One real master and one real agent for the tests that do not break them, and a maker of agents for those that do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agents import AgentProcess
from support.mooncake import Master

MakeAgent = Callable[..., AgentProcess]


def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    yield from _folder()


@pytest.fixture(scope="module")
def master(module_folder: Path) -> Iterator[Master]:
    one = Master(module_folder, "--default_kv_lease_ttl=2000").start()
    yield one
    one.kill()


@pytest.fixture(scope="module")
def agent(module_folder: Path, master: Master) -> Iterator[AgentProcess]:
    """An agent that no test of the module breaks."""
    folder = module_folder / "a"
    folder.mkdir()
    one = AgentProcess(folder, master.address)
    try:
        yield one.start().wait_for_store()
    finally:
        one.kill()


@pytest.fixture(scope="module")
def other_agent(module_folder: Path, master: Master) -> Iterator[AgentProcess]:
    """A second node that no test of the module breaks."""
    folder = module_folder / "b"
    folder.mkdir()
    one = AgentProcess(folder, master.address, node="node-b")
    try:
        yield one.start().wait_for_store()
    finally:
        one.kill()


@pytest.fixture
def make_agent(master: Master) -> Iterator[MakeAgent]:
    """Agents of a test's own, on folders of their own; killed after it.

    They bring no segment unless the test says so: the master goes on choosing a killed one for new chunks for 10 s.
    """
    made: list[AgentProcess] = []
    folders: list[Path] = []

    def make(address: str | None = None, **arguments: Any) -> AgentProcess:
        folder = arguments.pop("directory", None)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="kvp-"))
            folders.append(folder)
        arguments.setdefault("segment", {"size": "0"})
        made.append(AgentProcess(folder, address or master.address, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.kill()
    for folder in folders:
        shutil.rmtree(folder)
