"""The demo's small parts: the hash chain, what each prompt is to hit, the trace as a tree, talk with its processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_demo import model, processes
from kvpool_demo.content import HASH_BYTES, Prompt, block_bytes
from kvpool_demo.otlp import SpanRecord, tree
from kvpool_demo.processes import Child, DemoFault, EngineProcess, answers, wait_until
from kvpool_demo.scenario import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    ERIN,
    EXPECTED,
    NOBODY,
    Account,
    _expect_hits,
    request,
)
from kvpool_wire.identity import check_identity

# --------------------------------------------------------------------------------------------------- prompts and chains


def shared_units(one: Prompt, other: Prompt) -> int:
    pairs = zip(one.hashes(16), other.hashes(16), strict=False)
    return next((unit for unit, (a, b) in enumerate(pairs) if a != b), min(one.tokens, other.tokens) // 16)


def test_the_chain_has_one_hash_per_whole_unit() -> None:
    for tokens, units in ((0, 0), (15, 0), (16, 1), (31, 1), (32, 2)):
        chain = Prompt("p", (("part", tokens),)).hashes(16)
        assert len(chain) == units
        assert all(len(unit) == HASH_BYTES for unit in chain)


def test_a_hash_names_all_tokens_before_it() -> None:
    long = Prompt("p", (("a", 64), ("b", 64)))
    assert long.hashes(16)[:4] == Prompt("q", (("a", 64),)).hashes(16), "the name of the prompt is no token"
    swapped = Prompt("p", (("b", 64), ("a", 64)))
    assert not set(long.hashes(16)) & set(swapped.hashes(16))
    shifted = Prompt("p", (("x", 1), ("a", 63))).hashes(16)
    assert not set(shifted) & set(long.hashes(16)), "an early token changes every hash after it"


def test_prompts_share_exactly_what_they_begin_with() -> None:
    assert shared_units(ALICE, BOB) == shared_units(ALICE, DAVE) == 1024 // 16
    for one in (CAROL, ERIN, NOBODY):
        assert shared_units(ALICE, one) == 0


def test_block_bytes_depend_on_every_argument_and_on_nothing_else() -> None:
    def made(unit: bytes = b"u", layer: str = "l", part: int = 0, rank: int = 0) -> bytes:
        return block_bytes(unit, layer=layer, part=part, rank=rank, size=256).tobytes()

    assert made() == made()
    assert len({made(), made(unit=b"v"), made(layer="m"), made(part=1), made(rank=1)}) == 5


def test_the_model_is_one_that_an_agent_would_serve() -> None:
    check_identity(model.identity())


@pytest.mark.parametrize("prompt", [ALICE, DAVE, CAROL, NOBODY], ids=lambda prompt: prompt.name)
def test_what_is_expected_is_what_was_saved_less_one_block(prompt: Prompt) -> None:
    """PRUNE_ONCE by hand: whole blocks that a saved prompt shares, short of the last token, less one (EAGLE)."""
    saved = max(shared_units(prompt, one) for one in (ALICE, BOB, CAROL))
    whole = min(saved, (prompt.tokens - 1) // 16)
    hit, pruned = ((whole - 1) * 16, 16) if whole else (0, 0)
    assert EXPECTED[prompt.name] == (hit, pruned)


@pytest.mark.parametrize(("hit", "pruned"), [(1504, 16), (1520, 0), (1536, 16)])
def test_another_hit_than_expected_is_a_broken_promise(hit: int, pruned: int) -> None:
    account = Account()
    made = request(_Named("node B"), ALICE)  # type: ignore[arg-type]
    _expect_hits([(made, {"hit": hit, "pruned": pruned})], EXPECTED, account)
    assert account.faults == [f"alice@B: hit, pruned = ({hit}, {pruned}), not (1520, 16)"]


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


# ------------------------------------------------------------------------------------------------------------ the tree


def span(name: str, parent: str, begun: int, *, trace: str = "t", **attributes: str) -> SpanRecord:
    return SpanRecord(trace, name, parent, name, "agent", begun, begun + 1_500_000, attributes)


def test_a_trace_is_a_tree_in_order_of_time_and_other_traces_are_left_out() -> None:
    spans = [
        span("load", "request", 20, **{"kvpool.chunks.ok": "3", "keys": "2"}),
        span("get", "load", 30),
        span("exist", "lookup", 11),
        span("lookup", "request", 10),
        span("get again", "load", 40),
        span("request", "", 0),
        span("stranger", "", 5, trace="other"),
        span("orphan", "a span that never arrived", 50),
    ]
    assert tree(spans, "t") == [
        "request 1.5 ms [agent]",
        "├─ lookup 1.5 ms [agent]",
        "│  └─ exist 1.5 ms [agent]",
        "└─ load 1.5 ms [agent] keys=2 chunks.ok=3",
        "   ├─ get 1.5 ms [agent]",
        "   └─ get again 1.5 ms [agent]",
        "orphan 1.5 ms [agent]",
    ]


# ------------------------------------------------------------------------------------------------------- its processes

READY = 'import json, sys; print(json.dumps({"answer": {}}), flush=True)\n'


class Bench:
    """Starts programs as the demo starts its engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: list[Child] = []

    def engine(self, name: str, code: str) -> EngineProcess:
        log = self._folder / f"{name}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        self.children.append(Child(name, process, log))
        return EngineProcess(self.children[-1])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for child in made.children:
        child.stop(signal.SIGKILL)


ECHO = READY + 'for line in sys.stdin: print(json.dumps({"answer": json.loads(line)}), flush=True)'
SILENT = READY + "sys.stdin.read()"
FROZEN = READY + "import signal; signal.pause()"


def test_calls_are_answered_in_the_order_of_the_processes(bench: Bench) -> None:
    ranks = [bench.engine(f"rank {number}", ECHO) for number in range(3)]
    assert answers(ranks) == [{}, {}, {}]
    for number, rank in enumerate(ranks):
        rank.send("load", number=number, padding="x" * 200_000)
    assert [answer["number"] for answer in answers(ranks)] == [0, 1, 2]
    assert ranks[1].call("check", number=7) == {"call": "check", "number": 7}


def test_bounded_a_process_that_does_not_answer_is_named_with_the_call(bench: Bench) -> None:
    rank = bench.engine("rank 0", SILENT)
    assert answers([rank]) == [{}]
    rank.send("load")
    with pytest.raises(DemoFault, match=r"rank 0 has not answered 'load' for 0 s"):
        answers([rank], seconds=0.05)


def test_bounded_a_process_that_does_not_read_is_named_with_the_call(bench: Bench) -> None:
    rank = bench.engine("rank 0", FROZEN)
    assert answers([rank]) == [{}]
    with pytest.raises(DemoFault, match=r"rank 0 has not read 'check' for 0 s"):
        rank.send("check", seconds=0.05, held="x" * 500_000)


def test_the_one_that_dies_is_named_although_another_is_asked_first(bench: Bench) -> None:
    silent = bench.engine("rank 0", SILENT)
    dying = bench.engine("rank 1", READY + "sys.stdin.readline(); sys.exit('out of memory')")
    assert answers([silent, dying]) == [{}, {}]
    for rank in (silent, dying):
        rank.send("load")
    begun = time.monotonic()
    with pytest.raises(DemoFault, match=r"(?s)rank 1 ended in mid-call \('load'\).*out of memory"):
        answers([silent, dying])
    assert time.monotonic() - begun < processes.ANSWER_SECONDS / 2
    dying.child.process.wait(10)
    with pytest.raises(DemoFault, match="rank 1 is gone"):
        dying.send("load")


@pytest.mark.parametrize("said", ["nonsense", "[]", '{"result": 1}', '{"answer": {}}\\n{"answer": {}}'])
def test_a_line_that_is_no_answer_is_shown(bench: Bench, said: str) -> None:
    rank = bench.engine(
        "rank 0", f"import sys; sys.stdout.write('''{said}\\n'''); sys.stdout.flush(); sys.stdin.read()"
    )
    with pytest.raises(DemoFault, match="rank 0 answered 'start' with"):
        answers([rank])


def test_a_dead_process_is_seen_before_what_somebody_else_brought_about(bench: Bench) -> None:
    master = bench.engine("master", "import sys; sys.exit('address in use')").child
    master.process.wait(10)
    with pytest.raises(DemoFault, match="(?s)master ended with 1.*address in use"):
        wait_until(lambda: True, master)


def test_only_the_process_itself_counts_as_listening(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = bench.engine("master", SILENT).child
        assert processes.listens(port)
        assert not other.listens(port)
        me = Child("me", _Pid(), other.log)  # type: ignore[arg-type]
        assert me.listens(port)
    assert not me.listens(port)


class _Pid:
    pid = os.getpid()
