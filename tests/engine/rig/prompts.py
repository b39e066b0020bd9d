"""Prompts with random shared prefixes, and the judgement whether two runs of them gave the same answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.rig import checkpoint
from engine.rig.engines import BLOCK

Prompt = list[int]

TOLERANCE: Final = 1e-3
"""Of a logprob: chunks of another length round differently (about 1e-5 here); a wrong block is off by far more."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One prompt that was answered differently."""

    prompt: int
    step: int
    why: str


def shared_prefixes(count: int, seed: int, *, shortest: int = 100, longest: int = 400) -> list[Prompt]:
    """Prompts of `shortest` to `longest` tokens; most begin with a prefix that others begin with, too."""
    rng = random.Random(seed)
    prefixes = [tokens(rng, rng.randrange(40, longest - 60)) for _ in range(max(2, count // 8))]
    made: list[Prompt] = []
    for _ in range(count):
        prefix = rng.choice(prefixes)
        # Shared as a whole, in part, or not at all; never aligned to anything on purpose.
        kept = prefix[: rng.choice((len(prefix), rng.randrange(len(prefix)), 0))]
        length = rng.randrange(max(shortest, len(kept) + 1), longest + 1)
        made.append(kept + tokens(rng, length - len(kept)))
    return made


def tokens(rng: random.Random, count: int) -> Prompt:
    """Random tokens, none of them special."""
    return [rng.randrange(3, checkpoint.VOCAB) for _ in range(count)]


def stored_hit(length: int, *, eagle: bool) -> int:
    """Tokens that a lookup may answer for a prompt that is stored whole (PRUNE_ONCE: one block less with EAGLE)."""
    if eagle:
        return max(0, length // BLOCK * BLOCK - BLOCK)
    return (length - 1) // BLOCK * BLOCK


def differences(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[Difference]:
    """Prompts whose tokens or logprobs differ, but for choices that are a tie in the expected run."""
    assert len(expected) == len(found)
    wrong: list[Difference] = []
    for index, (want, have) in enumerate(zip(expected, found, strict=True)):
        if have.get("aborted"):
            continue
        if (difference := _first_difference(index, want, have)) is not None:
            wrong.append(difference)
    return wrong


def _first_difference(index: int, want: dict[str, Any], have: dict[str, Any]) -> Difference | None:
    if len(want["tokens"]) != len(have["tokens"]):
        return Difference(index, 0, f"{len(have['tokens'])} tokens, {len(want['tokens'])} expected")
    for step, (right, token) in enumerate(zip(want["tokens"], have["tokens"], strict=True)):
        told, seen = want["logprobs"][step], have["logprobs"][step]
        best = sorted(told.values(), reverse=True)
        if token != right:
            tie = best[0] - best[1] < 2 * TOLERANCE
            return None if tie else Difference(index, step, f"token {token}, {right} expected")
        gap = max(abs(told[name] - seen[name]) for name in told.keys() & seen.keys())
        if not gap <= TOLERANCE:  # not a number is a difference, too
            return Difference(index, step, f"logprobs differ by {gap}")
    return None


def largest_gap(expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> float:
    """The largest difference of a chosen token's logprob where the tokens agree."""
    gaps = [0.0]
    for want, have in zip(expected, found, strict=True):
        for step, token in enumerate(have.get("tokens", ())):
            if want["tokens"][step] != token:
                break
            gaps.append(abs(want["logprobs"][step][str(token)] - have["logprobs"][step][str(token)]))
    return max(gaps)
