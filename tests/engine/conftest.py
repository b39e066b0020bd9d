"""Engines for the tests: two on two agents, and one without any cache that says what is right. Started once a session.

The tests need the engine's virtual environment: `make test-engine` makes it and runs them.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from engine.rig import prompts
from engine.rig.engines import Cluster, Engine, engine_python, options
from engine.rig.prompts import Prompt

MAX_TOKENS: Final = 5
SHARED: Final = 200
SETS: Final = {
    "warm": (4, 19),
    "shared": (SHARED, 20),
    "damaged": (6, 21),
    "owner": (6, 22),
    "agent": (12, 23),
    "missing": (6, 24),
    "aborted": (8, 25),
    "preempted": (10, 26),
    "frozen": (6, 27),
    "back": (6, 28),
    "drained": (8, 30),
    "alone": (4, 31),
    "ranks": (16, 29),
}
"""By name: how many prompts, from which seed. No set shares a block with another."""


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """Logs and checkpoints; kept when a test has failed and removed otherwise by the system's own rules."""
    if not Path(engine_python()).exists():
        pytest.fail(f"{engine_python()} is missing: run `make test-engine`, which makes it")
    folder = Path(tempfile.mkdtemp(prefix="kvpool-engine-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(work: Path) -> Iterator[Cluster]:
    """A master and the agents of nodes a and b."""
    sockets = Path(tempfile.mkdtemp(prefix="kvp-"))
    made = Cluster(work, sockets)
    try:
        yield made.start()
    finally:
        made.close()
        shutil.rmtree(sockets)


@dataclass
class Pair:
    """Two engines that share a pool, and the right answers."""

    eagle: bool
    a: Engine
    b: Engine
    right: dict[str, list[dict[str, Any]]]
    cluster: Cluster
    saved: dict[str, set[str]] = field(default_factory=dict)
    """Digests of all blocks at their save, by the hash that closes them.

    Several, where two requests computed one block side by side: the drafter's KV of a block's last token depends on the
    token after it, which no hash covers, and which of them the store kept first is not known here.
    """
    first: dict[str, str] = field(default_factory=dict)
    """How the blocks of the last set that was stored begin."""

    def prompts(self, name: str) -> list[Prompt]:
        """A set of prompts."""
        return prompts.shared_prefixes(*SETS[name])

    def run(self, engine: Engine, name: str, **faults: Any) -> dict[str, Any]:
        """Run a set on one engine."""
        answer: dict[str, Any] = engine.call(
            "generate", prompts=self.prompts(name), max_tokens=MAX_TOKENS, **faults
        )
        return answer

    def check(self, name: str, answer: dict[str, Any]) -> None:
        """Tokens and logprobs are those of the engine without a cache."""
        wrong = prompts.differences(self.right[name], answer["outputs"])
        assert not wrong, f"{len(wrong)} of {len(answer['outputs'])} prompts answered wrongly: {wrong[:5]}"

    def store(self, name: str, **faults: Any) -> dict[str, Any]:
        """Engine A computes and saves a set, wave by wave; nothing is under way afterwards."""
        answer = self.run(self.a, name, settle=True, **faults)
        answer["counts"] = self.idle(self.a)["counts"]
        seen = self.a.call("seen")
        self._note(seen["saved"])
        self.first = seen["first"]
        return answer

    def _note(self, saved: dict[str, list[str]]) -> None:
        for name, digests in saved.items():
            self.saved.setdefault(name, set()).update(digests)

    def check_loaded(self, engine: Engine) -> int:
        """Every block that arrived holds the bytes that were saved under its hash; how many arrived."""
        seen = engine.call("seen")
        self._note(seen["saved"])
        wrong = [name for name, digest in seen["loaded"] if digest not in self.saved.get(name, ())]
        assert not wrong, f"{len(wrong)} of {len(seen['loaded'])} loaded blocks are not what was saved"
        assert seen["unloaded"] == 0, f"{seen['unloaded']} blocks were called loaded and hold poison"
        return len(seen["loaded"])

    def idle(self, engine: Engine) -> dict[str, Any]:
        """Wait until nothing is under way: every block is free again (no pin leaks)."""
        state: dict[str, Any] = engine.call("settle")
        assert not state["busy"], state
        assert state["taken"] == 0, state
        return state

    def fresh(self, engine: Engine) -> None:
        """Only the pool may answer from here on."""
        assert engine.call("forget")["done"]
        engine.call("seen")


def _pair(work: Path, cluster: Cluster, *, eagle: bool) -> Iterator[Pair]:
    kind = "eagle" if eagle else "plain"
    folder = work / kind
    folder.mkdir()
    engines: list[Engine] = []
    try:
        plain = Engine("without-cache", options(folder, eagle=eagle, socket_dir=None), folder)
        engines.append(plain)
        plain.ready()
        right = {
            name: plain.call("generate", prompts=prompts.shared_prefixes(*which), max_tokens=MAX_TOKENS)[
                "outputs"
            ]
            for name, which in SETS.items()
        }
        plain.close()
        for name, agent in cluster.agents.items():
            made = options(folder, eagle=eagle, socket_dir=agent.socket_dir)
            engines.append(Engine(f"engine-{name}", made, folder))
        a, b = (engine.ready() for engine in engines[1:])
        for engine in (a, b):
            assert engine.call("attached")["attached"], engine.tail()
        made_pair = Pair(eagle, a, b, right, cluster)
        # The first transfer of a session waits for its loader process, which no figure here should show.
        made_pair.store("warm")
        made_pair.run(b, "warm")
        made_pair.idle(b)
        made_pair.check_loaded(b)
        yield made_pair
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture(scope="session")
def plain(work: Path, cluster: Cluster) -> Iterator[Pair]:
    """Engines without speculative decoding."""
    yield from _pair(work, cluster, eagle=False)


@pytest.fixture(scope="session")
def eagle(work: Path, cluster: Cluster) -> Iterator[Pair]:
    """Engines with an EAGLE drafter."""
    yield from _pair(work, cluster, eagle=True)


@pytest.fixture(params=["plain", "eagle"], scope="session")
def pair(request: pytest.FixtureRequest) -> Pair:
    """Each kind in turn."""
    made: Pair = request.getfixturevalue(request.param)
    return made
