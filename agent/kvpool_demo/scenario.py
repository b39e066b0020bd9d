"""The story that the demo plays, and the proof that every byte in it is right."""

import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvpool_demo import model
from kvpool_demo.content import Prompt
from kvpool_demo.nodes import Node
from kvpool_engine.plan import Plan
from kvpool_engine.types import FailReason

SYSTEM: Final = ("system prompt", 1024)
ALICE: Final = Prompt("alice", (SYSTEM, ("alice's question", 519)))
BOB: Final = Prompt("bob", (SYSTEM, ("bob's question", 387)))
CAROL: Final = Prompt("carol", (("carol's document", 768), ("carol's question", 50)))
DAVE: Final = Prompt("dave", (SYSTEM, ("dave's question", 230)))
ERIN: Final = Prompt("erin", (("erin's document", 512), ("erin's question", 400)))
NOBODY: Final = Prompt("nobody", (("a prompt that nobody has computed", 640),))

EXPECTED: Final = {"alice": (1520, 16), "dave": (1008, 16), "carol": (800, 16), "nobody": (0, 0)}
"""By prompt: tokens that a node which computed none of them is told are cached, and tokens that the lookup pruned."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Account:
    """What the story came to."""

    faults: list[str] = field(default_factory=list)
    loaded_bytes: int = 0
    loaded_chunks: int = 0
    failed_chunks: int = 0
    right_bytes: int = 0
    shown_trace: str = ""

    def expect(self, true: bool, sentence: str) -> None:
        """Note a promise that was broken."""
        if not true:
            self.faults.append(sentence)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a prompt at one node, in a trace of its own."""

    id: str
    prompt: Prompt
    trace: str
    span: str

    def fields(self) -> dict[str, Any]:
        """As a call to an engine's process carries it."""
        return {
            "request": self.id,
            "prompt": self.prompt.name,
            "parts": self.prompt.parts,
            "trace": self.trace,
            "span": self.span,
        }


def request(node: Node, prompt: Prompt) -> Request:
    """A new request."""
    return Request(f"{prompt.name}@{node.name[-1]}", prompt, secrets.token_hex(16), secrets.token_hex(8))


def compute_and_save(node: Node, prompt: Prompt, say: Say, account: Account, *, start: int = 0) -> None:
    """The engine computes a prompt from `start` on and saves it."""
    made = request(node, prompt)
    count = len(prompt.hashes(model.BLOCK_TOKENS)) - start // model.BLOCK_TOKENS
    blocks = node.blocks(count)
    node.on_ranks("compute", **made.fields(), start=start, blocks=blocks)
    first = start // model.BLOCK_TOKENS
    for group, ids in enumerate(blocks):
        node.note(group, prompt, range(first, first + count), ids)
    results = node.on_ranks("save", **made.fields(), start=start, blocks=blocks)
    saved = sum(result["good"] for result in results)
    already = sum(result["already"] for result in results)
    size = sum(result["bytes"] for result in results)
    seconds = max(result["seconds"] for result in results)
    say(
        f"  {prompt.name}: {prompt.tokens:,} tokens computed from {start:,} on; {saved} chunks saved, {already} were "
        f"there already; {size / 1e6:.0f} MB at {size / 1e9 / seconds:.2f} GB/s"
    )
    for result in results:
        account.expect(not result["failed"], f"saving {prompt.name}: {result['failed']}")
        account.expect(not result["error"], f"saving {prompt.name}: {result['error']}")
    account.expect(
        saved + already == 2 * count * model.RANKS, f"{prompt.name}: {saved} + {already} chunks saved"
    )


def look_up(node: Node, prompt: Prompt, say: Say) -> tuple[Request, dict[str, Any]]:
    """Ask how much of the prompt need not be computed, and show the prune."""
    asked = request(node, prompt)
    found = node.scheduler.call("lookup", **asked.fields())
    hit, pruned = found["hit"], found["pruned"]
    # One sign stands for four blocks; the block that the prune took is shown as itself.
    bar = "█" * (hit // model.BLOCK_TOKENS // 4) + "░" * (pruned // model.BLOCK_TOKENS) if hit else "(miss)"
    note = f" ({pruned} pruned)" if pruned else ""
    say(f"  {prompt.name}: hit {hit:,} of {prompt.tokens:,} tokens{note} {bar}")
    return asked, found


def load(
    node: Node, asked: Request, found: dict[str, Any], say: Say, account: Account, *, start: int = 0
) -> list[dict[str, Any]]:
    """Load the plan on both ranks, note what must be where, and return the ranks' results."""
    plan = Plan.from_bytes(bytes.fromhex(found["plan"]))
    first = start // model.BLOCK_TOKENS
    blocks = node.blocks(len(plan.masks[0]) - first)
    results = node.on_ranks("load", **asked.fields(), plan=found["plan"], start=start, blocks=blocks)
    failed = {(item["group"], item["chunk"]) for result in results for item in result["failed"]}
    wanted = 0
    for group, mask in enumerate(plan.masks):
        for chunk in np.flatnonzero(mask[first:]) + first:
            wanted += 1
            block = blocks[group][chunk - first]
            if (group, int(chunk)) in failed:
                node.unsure[group].add(block)
            else:
                node.note(group, asked.prompt, [int(chunk)], [block])
    good = sum(result["good"] for result in results)
    size = sum(result["bytes"] for result in results)
    seconds = max(result["seconds"] for result in results)
    account.loaded_chunks += good
    account.loaded_bytes += size
    reported = sum(len(result["failed"]) for result in results)
    account.failed_chunks += reported
    account.expect(
        good + reported == wanted * model.RANKS,
        f"{asked.id}: {good} good + {reported} failed of {wanted} x 2 chunks",
    )
    say(
        f"  {asked.prompt.name}: {good} chunks, {size / 1e6:.0f} MB at {size / 1e9 / seconds:.2f} GB/s, "
        f"{reported} failed"
    )
    return results


def check(node: Node, say: Say, account: Account) -> None:
    """Every byte of every block of both ranks."""
    for rank, found in enumerate(node.check()):
        account.right_bytes += found["right_bytes"]
        account.expect(
            not found["wrong_blocks"], f"{node.name} rank {rank}: {found['wrong_blocks']} wrong blocks"
        )
        account.expect(
            not found["touched_blocks"], f"{node.name} rank {rank}: {found['touched_blocks']} foreign writes"
        )
        say(
            f"  rank {rank}: {found['right_bytes'] / 1e6:.0f} MB right, {found['wrong_blocks']} blocks wrong, "
            f"{found['touched_blocks']} blocks written that nobody asked for"
        )


def play(node_a: Node, node_b: Node, say: Say) -> Account:
    """The whole story; returns the account with every promise that was broken."""
    account = Account()
    say("Engine on A computes three prompts and saves them (two share a system prompt):")
    for prompt in (ALICE, BOB, CAROL):
        compute_and_save(node_a, prompt, say, account)

    say("Engine on B has computed nothing. Its lookups (EAGLE: the last matched block, ░, is dropped once):")
    asked = [look_up(node_b, prompt, say) for prompt in (ALICE, DAVE, CAROL, NOBODY)]
    _expect_hits(asked, EXPECTED, account)

    say("Engine on B loads them (mapped: the agent writes the engine's blocks):")
    for made, found in asked[:3]:
        results = load(node_b, made, found, say, account)
        account.expect(
            not any(result["failed"] for result in results), f"{made.id}: chunks failed with all nodes up"
        )
        account.shown_trace = account.shown_trace or f"{made.trace}/{made.span}/{made.id}"
    check(node_b, say, account)

    say("Engine on B computes what was missing and a prompt of its own; engine on A loads it (copy mode):")
    compute_and_save(node_b, DAVE, say, account, start=1008)
    compute_and_save(node_b, ERIN, say, account)
    for prompt in (DAVE, ERIN):
        made, found = look_up(node_a, prompt, say)
        load(node_a, made, found, say, account)
    check(node_a, say, account)
    lose_a_node(node_a, node_b, say, account)
    return account


def _expect_hits(
    asked: list[tuple[Request, dict[str, Any]]], expected: dict[str, tuple[int, int]], account: Account
) -> None:
    for made, found in asked:
        got = (found["hit"], found["pruned"])
        account.expect(
            got == expected[made.prompt.name],
            f"{made.id}: hit, pruned = {got}, not {expected[made.prompt.name]}",
        )


def lose_a_node(node_a: Node, node_b: Node, say: Say, account: Account) -> None:
    """The owner of some chunks dies between lookup and load."""
    say("Engine on B looks up a prompt whose beginning it has; then node A is killed, then B loads the rest:")
    made, found = look_up(node_b, BOB, say)
    start = SYSTEM[1]
    count = start // model.BLOCK_TOKENS
    blocks = node_b.blocks(count)
    node_b.on_ranks("compute", **made.fields(), start=0, blocks=blocks)
    for group, ids in enumerate(blocks):
        node_b.note(group, BOB, range(count), ids)
    node_a.agent.stop(signal.SIGKILL)
    results = load(node_b, made, found, say, account, start=start)
    failed = [item for result in results for item in result["failed"]]
    answer = node_b.scheduler.call("resume", request=made.id, plan=found["plan"], start=start, failed=failed)
    resume = answer["resume"]
    reasons = sorted({FailReason(item["reason"]).name.lower() for item in failed})
    first = min((item["chunk"] for item in failed), default=None)
    say(
        f"  {len(failed)} chunks reported failed ({', '.join(reasons)}), the first is chunk {first}; "
        f"the engine resumes at {resume:,} tokens instead of {found['hit']:,}"
    )
    account.expect(bool(failed), "node A was killed and no chunk was reported failed")
    account.expect(
        start <= resume < found["hit"], f"resume length {resume} outside {start} .. {found['hit']}"
    )
    account.expect(
        first is None or resume <= (first + 1) * model.BLOCK_TOKENS,
        f"resume length {resume} past a failed chunk",
    )
    check(node_b, say, account)
