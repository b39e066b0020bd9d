"""A node of the demo: its agent, and the engine on it with one scheduler and two ranks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvpool_demo import model
from kvpool_demo.content import Prompt
from kvpool_demo.processes import Child, DemoFault, EngineProcess, Fleet, answers, wait_until
from kvpool_wire import rpc

SEGMENT: Final = "256Mi"
RING: Final = "64Mi"


@dataclass(slots=True)
class Node:
    """One node. Blocks are handed out once and never reused, so that a check can judge all of them."""

    name: str
    mode: str
    agent: Child
    scheduler: EngineProcess
    ranks: tuple[EngineProcess, ...]
    _used: list[int] = field(default_factory=lambda: [0, 0])
    held: list[dict[int, bytes]] = field(default_factory=lambda: [{}, {}])
    """Per group, block id to the hash of the unit that closes what it must hold, on every rank."""
    unsure: list[set[int]] = field(default_factory=lambda: [set(), set()])
    """Per group, blocks of chunks that were reported failed."""

    def blocks(self, count: int) -> list[list[int]]:
        """`count` blocks of each group that nothing has used, scattered: neighbours in a prompt are not in memory."""
        taken: list[list[int]] = []
        for group, used in enumerate(self._used):
            if used + count >= model.BLOCKS:
                raise DemoFault(f"the engine on {self.name} has no blocks left in group {group}")
            # The stride is coprime to the number of blocks: a permutation that leaves out block 0, the null block.
            taken.append([(used + 1 + index) * 5 % model.BLOCKS for index in range(count)])
            self._used[group] += count
        return taken

    def on_ranks(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """One call on every rank at once."""
        for rank in self.ranks:
            rank.send(call, **arguments)
        return answers(self.ranks)

    def note(self, group: int, prompt: Prompt, chunks: Sequence[int], blocks: Sequence[int]) -> None:
        """From now on these blocks must hold these chunks of the prompt."""
        units = prompt.hashes(model.BLOCK_TOKENS)
        self.held[group].update({block: units[chunk] for chunk, block in zip(chunks, blocks, strict=True)})

    def check(self) -> list[dict[str, Any]]:
        """Every byte of every block of every rank."""
        held = [{str(block): unit.hex() for block, unit in blocks.items()} for blocks in self.held]
        return self.on_ranks("check", held=held, unsure=[sorted(blocks) for blocks in self.unsure])


@dataclass(frozen=True, slots=True)
class Starting:
    """A node whose processes are on their way."""

    name: str
    mode: str
    agent: Child
    socket_dir: Path


def start_agent(fleet: Fleet, name: str, mode: str, *, master: str, ip: str) -> Starting:
    """Exec the node's agent; it comes up while other things start."""
    socket_dir = fleet.folder / name[-1].lower()
    socket_dir.mkdir(mode=0o750)
    config = {
        "pool": {"namespace": "demo", "name": "pool"},
        "node": {"name": name, "ip": ip},
        "socket": {"directory": str(socket_dir)},
        "store": {"masterAddress": master},
        "segment": {"size": SEGMENT, "ringSize": RING},
        "cache": {"leaseTTL": "30s"},
        "telemetry": {"port": 0},
        "log": {"format": "text"},
        "drain": {"timeout": "3s"},
    }
    path = fleet.folder / f"{name.replace(' ', '-')}.json"
    path.write_text(json.dumps(config, indent=2))
    agent = fleet.start(name, [sys.executable, "-m", "kvpool_agent", "--config", str(path)])
    return Starting(name, mode, agent, socket_dir)


def finish(fleet: Fleet, starting: Starting) -> Node:
    """Wait for the agent, start its engine, and wait until that is attached."""
    wait_until((starting.socket_dir / rpc.RPC_SOCKET).exists, starting.agent)
    engine_id = f"engine-on-{starting.name[-1].lower()}"
    command = [sys.executable, "-m", "kvpool_demo.engine"]
    where = [str(starting.socket_dir), engine_id]
    scheduler = fleet.start(f"{engine_id} scheduler", [*command, "scheduler", *where])
    ranks = [
        fleet.start(f"{engine_id} rank {rank}", [*command, "rank", *where, str(rank), starting.mode])
        for rank in range(model.RANKS)
    ]
    return Node(
        starting.name,
        starting.mode,
        starting.agent,
        EngineProcess(scheduler),
        tuple(EngineProcess(rank) for rank in ranks),
    )


def attach(node: Node) -> None:
    """Wait until every process of the node's engine says that it is attached, and the node's segment is mounted."""
    answers((node.scheduler, *node.ranks))
    wait_until(lambda: bool(node.scheduler.call("store")["mounted"]), node.agent)
