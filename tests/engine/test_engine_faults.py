"""Whatever dies or goes wrong between two engines: the answers are those of an engine without a cache, nothing hangs.

The tests run in order on one pair of engines, which live through all of it; agents are killed and come back.
"""

import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import MAX_TOKENS, Pair
from engine.rig.engines import Agent, Engine, options

pytestmark = pytest.mark.timeout(300)

BOUND = 30.0
"""Seconds that any of these runs may take; the load's deadline is 10 s, a lookup's 5 s."""


def gated(pair: Pair, name: str, at_first_load: Callable[[], None]) -> dict[str, Any]:
    """Run a set on engine B; between its first lookup and its first load something happens."""
    engine = pair.b
    engine.call("spoil", gate=True)
    engine.send("generate", prompts=pair.prompts(name), max_tokens=MAX_TOKENS, deadline=60)
    waiting: list[Callable[[], None]] = [at_first_load]
    while "event" in (message := engine.hear(90)):
        while waiting:
            waiting.pop()()
        engine.line("go")
    assert not waiting, f"no load began, so nothing happened between lookup and load: {message}"
    engine.call("spoil", gate=False)
    answer: dict[str, Any] = message["answer"]
    return answer


def came_back(engine: Engine, agent: Agent) -> None:
    """Start the agent again and wait until the engine has attached by itself."""
    agent.start()
    assert engine.call("attached")["attached"]


def failed_loads(counts: dict[str, int]) -> int:
    return counts.get("load_failed", 0)


def refused(counts: dict[str, int]) -> int:
    """Lookups that missed for want of an agent, saves that were skipped, loads that failed."""
    wants = ("lookup_miss:draining", "lookup_miss:agent", "save_skipped:", "load_failed")
    return sum(count for name, count in counts.items() if name.startswith(wants))


def test_damaged_chunk_is_computed_again(eagle: Pair) -> None:
    """Bytes change in the owner's memory: reported corrupt, never used."""
    eagle.store("damaged")
    names = sorted(eagle.first)[::3]
    damaged = sum(damage(eagle.cluster.agents["a"].pid, bytes.fromhex(eagle.first[name])) for name in names)
    assert damaged >= len(names)
    eagle.fresh(eagle.b)
    answer = eagle.run(eagle.b, "damaged")
    eagle.check("damaged", answer)
    eagle.check_loaded(eagle.b)
    eagle.idle(eagle.b)
    corrupt = answer["counts"].get("load_failed_chunks:corrupt", 0)
    print(f"\n{len(names)} chunks damaged, {corrupt} reported corrupt, {answer['seconds']:.1f} s")
    assert corrupt >= 1


def test_aborted_requests_give_their_blocks_back(eagle: Pair) -> None:
    """Aborted while their loads run: the others are right, and not one block stays taken."""
    eagle.store("aborted")
    eagle.fresh(eagle.b)
    answer = eagle.run(eagle.b, "aborted", abort=3)
    aborted = sum(bool(output.get("aborted")) for output in answer["outputs"])
    assert aborted == 3
    eagle.check("aborted", answer)
    eagle.check_loaded(eagle.b)
    eagle.idle(eagle.b)


def test_fenced_preempted_request_never_spoils_what_it_saves(eagle: Pair) -> None:
    """Preempted while its saves read its blocks, which are overwritten as soon as vLLM may reuse them."""
    eagle.a.call("seen")
    eagle.a.call("spoil", slow_gather=0.02)
    first = eagle.store("preempted", preempt=6)
    eagle.a.call("spoil", slow_gather=0.0)
    eagle.check("preempted", first)
    eagle.fresh(eagle.b)
    second = eagle.run(eagle.b, "preempted")
    eagle.check("preempted", second)
    loaded = eagle.check_loaded(eagle.b)
    eagle.idle(eagle.b)
    print(f"\n6 preemptions under saves; {loaded} blocks loaded afterwards, all as they were saved")
    assert loaded > 0


def test_owner_killed_between_lookup_and_load(eagle: Pair) -> None:
    """LOADED_OR_REPORTED: what cannot be fetched any more is computed, within the load's deadline."""
    eagle.store("owner")
    eagle.fresh(eagle.b)
    owner = eagle.cluster.agents["a"]
    before = failed_loads(eagle.b.call("settle")["counts"])
    answer = gated(eagle, "owner", owner.kill)
    eagle.check("owner", answer)
    eagle.check_loaded(eagle.b)
    eagle.idle(eagle.b)
    failed = failed_loads(answer["counts"]) - before
    print(f"\nowner killed: {failed} loads failed, {answer['seconds']:.1f} s")
    assert failed >= 1
    assert answer["seconds"] < BOUND


def test_engine_without_an_agent_goes_on(eagle: Pair) -> None:
    """The agent of node a is dead since the test before: misses and skipped saves, counted; nothing waits."""
    answer = eagle.run(eagle.a, "missing")
    eagle.check("missing", answer)
    counts = eagle.idle(eagle.a)["counts"]
    assert counts["lookup_miss:agent_unavailable"] >= len(answer["outputs"])
    assert counts["save_skipped:no_session_with_the_agent"] >= 1
    assert answer["seconds"] < BOUND


def test_crash_only_a_restarted_agent_is_used_again(eagle: Pair) -> None:
    """It comes back on the same sockets; both engines share through it without a restart of theirs."""
    came_back(eagle.a, eagle.cluster.agents["a"])
    eagle.store("back")
    eagle.fresh(eagle.b)
    answer = eagle.run(eagle.b, "back")
    eagle.check("back", answer)
    assert eagle.check_loaded(eagle.b) > 0
    eagle.idle(eagle.b)


def test_agent_killed_in_mid_load(eagle: Pair) -> None:
    """The engine's own agent dies when the loads begin: all of them are computed."""
    eagle.store("agent")
    eagle.fresh(eagle.b)
    agent = eagle.cluster.agents["b"]
    before = failed_loads(eagle.b.call("settle")["counts"])
    answer = gated(eagle, "agent", agent.kill)
    eagle.check("agent", answer)
    eagle.check_loaded(eagle.b)
    eagle.idle(eagle.b)
    failed = failed_loads(answer["counts"]) - before
    print(f"\nagent killed: {failed} loads failed, {answer['seconds']:.1f} s")
    assert failed >= 1
    assert answer["seconds"] < BOUND
    came_back(eagle.b, agent)


def test_draining_agent_costs_misses_and_skipped_saves(eagle: Pair) -> None:
    """SIGTERM in mid-run: what is under way ends, what comes later is a miss; then the agent comes back."""
    eagle.store("drained")
    eagle.fresh(eagle.b)
    agent = eagle.cluster.agents["b"]
    before = refused(eagle.b.call("settle")["counts"])
    answer = gated(eagle, "drained", lambda: agent.kill(signal.SIGTERM))
    eagle.check("drained", answer)
    eagle.check_loaded(eagle.b)
    counts = eagle.idle(eagle.b)["counts"]
    print(f"\nagent drained: {refused(counts) - before} refused, {answer['seconds']:.1f} s")
    assert answer["seconds"] < BOUND
    assert refused(counts) - before >= 1
    came_back(eagle.b, agent)


def test_bounded_frozen_agent_costs_a_lookup_at_most(eagle: Pair) -> None:
    """It neither answers nor dies: lookups end by their own deadline."""
    eagle.store("frozen")
    eagle.fresh(eagle.b)
    agent = eagle.cluster.agents["b"]
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        answer = eagle.run(eagle.b, "frozen")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    eagle.check("frozen", answer)
    assert answer["seconds"] < BOUND
    assert answer["counts"]["lookup_miss:deadline"] >= 1
    assert eagle.b.call("attached")["attached"]
    eagle.idle(eagle.b)


def test_an_engine_that_starts_without_an_agent_serves_and_attaches_later(
    eagle: Pair, work: Path, tmp_path: Path
) -> None:
    """Nobody listens in the folder when vLLM starts: every prompt is computed; an agent that comes later is used."""
    sockets = Path(tempfile.mkdtemp(prefix="kvp-"))
    made = options(work / "eagle", eagle=True, socket_dir=sockets)
    engine = Engine("engine-alone", made, tmp_path).ready()
    late = Agent("late", sockets, tmp_path, eagle.cluster.master.address)
    try:
        answer = engine.call("generate", prompts=eagle.prompts("alone"), max_tokens=MAX_TOKENS)
        eagle.check("alone", answer)
        counts = eagle.idle(engine)["counts"]
        assert counts["lookup_miss:agent_unavailable"] >= len(answer["outputs"])
        assert answer["seconds"] < BOUND
        late.start()
        assert engine.call("attached")["attached"]
    finally:
        engine.close()
        late.kill(signal.SIGTERM)
        shutil.rmtree(sockets)


def damage(pid: int, beginning: bytes) -> int:
    """Flip a byte of every chunk in a process's memory files that begins so; how many there were."""
    count = 0
    for path in memory_files(pid):
        with path.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
            place = memory.find(beginning)
            while place >= 0:
                memory[place + 1000] ^= 0x01
                count += 1
                place = memory.find(beginning, place + 1)
    return count


def memory_files(pid: int) -> Iterator[Path]:
    """The process's memory files that are not empty, each once."""
    seen: set[int] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if not str(link.readlink()).startswith("/memfd:"):
            continue
        status = link.stat()
        if status.st_size and status.st_ino not in seen:
            seen.add(status.st_ino)
            yield link
