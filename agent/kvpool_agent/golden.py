"""Replays a file of golden vectors: what vLLM 0.32's coordinator answers, one JSON case a line.

Promises that the last line printed is `N cases, N equal, N by rule, N wrong`, exit code 1 if any case is wrong and 2 if
the file cannot be read or a line is no case. "By rule" are the cases in which vLLM's own load mask names a chunk that
its lookup never saw; there the longest hit for which every loaded chunk was seen is right, found here by trying every
length. It never repairs a bad line and never skips one. Reading and printing happen in `read_cases` and `main`;
`replay` is pure. Run: `python -m kvpool_agent.golden FILE [--verbose]`.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvpool_agent.coordinator.coordinator import KVCoordinator
from kvpool_agent.coordinator.masks import BoolArray
from kvpool_agent.coordinator.plan import Plan, PlanError
from kvpool_agent.coordinator.specs import GroupKind, GroupSpec, SpecError
from kvpool_wire import limits

MAX_TOKENS: Final = 1 << 32
"""Longest prompt that a case may have, in tokens."""


class GoldenError(ValueError):
    """The file, or a line of it, is not of the golden format."""


class Outcome(StrEnum):
    """What became of one case."""

    EQUAL = "equal"
    BY_RULE = "by rule"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Case:
    """One golden vector: the input, taken apart, and what is expected of it."""

    name: str
    coordinator: KVCoordinator
    hashes: range
    max_length: int
    exists: tuple[BoolArray, ...]
    store_start: int
    num_prompt_tokens: int | None
    expect: Mapping[str, Any]


def parse_group(raw: Mapping[str, Any]) -> GroupSpec:
    """Return the spec of one group of a case."""
    variant = raw.get("variant")
    return GroupSpec(
        kind=GroupKind(raw["kind"]),
        block_size=raw["block_size"],
        sliding_window=raw.get("sliding_window"),
        chunk_size=raw.get("chunk_size"),
        eagle=bool(raw.get("eagle", False)),
        variant="" if variant is None else json.dumps(variant),
    )


def parse_case(raw: Mapping[str, Any], where: str) -> Case:
    """Return the case that a JSON object describes.

    Raises:
        GoldenError: a field is missing or of another type, or a presence pair is outside the case.
    """
    try:
        groups = [parse_group(group) for group in raw["groups"]]
        coordinator = KVCoordinator(
            groups,
            hash_block_size=raw["hash_block_size"],
            scheduler_block_size=raw["scheduler_block_size"],
            use_eagle=raw["use_eagle"],
            retention_interval=raw["retention_interval"],
            partial_hits=raw["partial_hits"],
        )
        _check_sizes(raw)
        exists = tuple(np.zeros(raw["num_hashes"], dtype=np.bool_) for _ in groups)
        for group, unit in raw["exists"]:
            if group < 0 or unit < 0:
                raise GoldenError(f"exists names group {group}, hash unit {unit}")
            exists[group][unit] = True
        return Case(
            name=str(raw.get("id", where)),
            coordinator=coordinator,
            hashes=range(raw["num_hashes"]),
            max_length=raw["max_length"],
            exists=exists,
            store_start=raw["store_start"],
            num_prompt_tokens=raw["num_prompt_tokens"],
            expect=raw["expect"],
        )
    except SpecError as error:
        raise GoldenError(f"{where}: the coordinator refuses these groups: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise GoldenError(f"{where}: not a golden case: {type(error).__name__}: {error}") from error


def _check_sizes(raw: Mapping[str, Any]) -> None:
    """Refuse sizes that no request has, before anything is allocated for them."""
    for field, least, most in (
        ("num_hashes", 0, limits.MAX_HASH_UNITS),
        ("max_length", 0, MAX_TOKENS),
        ("store_start", 0, MAX_TOKENS),
        ("num_prompt_tokens", 0, MAX_TOKENS),
    ):
        value = raw[field]
        if value is None and field == "num_prompt_tokens":
            continue
        if not isinstance(value, int) or not least <= value <= most:
            raise GoldenError(f"{field} is {value!r}; a whole number from {least} to {most} is one")


def read_cases(path: Path) -> Iterator[Case]:
    """Yield the cases of a file.

    Raises:
        GoldenError: the file cannot be read, is empty, or a line is not a case.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenError(f"{path}: cannot be read: {error}") from error
    if not any(line.strip() for line in lines):
        raise GoldenError(f"{path}: holds no case; the golden format has one JSON object a line")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            raise GoldenError(f"{where}: not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise GoldenError(f"{where}: not a JSON object")
        yield parse_case(raw, where)


def _plain(masks: Sequence[BoolArray | None]) -> list[list[int] | None]:
    return [None if mask is None else mask.astype(int).tolist() for mask in masks]


def replay(case: Case) -> tuple[Outcome, list[str]]:
    """Return what became of a case, and how the answers differ from what is expected. Reads and prints nothing.

    Raises:
        GoldenError: `expect` lacks a field.
    """
    try:
        # The label alone proves nothing: where every chunk was seen, the case is an ordinary one.
        rule_case = bool(case.expect["unverified_load"]) and not _all_seen(case, case.expect["hit_length"])
        problems = _compare_unpruned_parts(case)
        problems += _check_by_rule(case) if rule_case else _compare_lookup(case)
    except KeyError as error:
        raise GoldenError(f"{case.name}: expect has no field {error}") from error
    except PlanError as error:
        return Outcome.WRONG, [str(error)]
    if problems:
        return Outcome.WRONG, problems
    return (Outcome.BY_RULE if rule_case else Outcome.EQUAL), []


def _differences(expect: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: expected {expect[name]}, got {value}"
        for name, value in got.items()
        if expect[name] != value
    ]


def _compare_unpruned_parts(case: Case) -> list[str]:
    """Compare what does not depend on the lookup's prune."""
    coordinator, expect = case.coordinator, case.expect
    aligned = coordinator.sizes.align_down(case.max_length)
    store = coordinator.store_mask(aligned, start=case.store_start, num_prompt_tokens=case.num_prompt_tokens)
    unpruned = coordinator.find_longest_cache_hit(
        case.hashes, case.max_length, case.exists, apply_eagle=False
    )
    got = {
        "aligned_length": aligned,
        "eagle_groups": list(coordinator.eagle_groups),
        "probe_masks": _plain(coordinator.probe_mask(aligned)),
        "store_masks": _plain(store),
        "hit_length_without_eagle": unpruned[1],
    }
    return _differences(expect, got)


def _compare_lookup(case: Case) -> list[str]:
    """Compare the lookup and its load mask, and see that the plan, asked at once and in steps, says the same."""
    coordinator, expect = case.coordinator, case.expect
    masks, hit = coordinator.find_longest_cache_hit(case.hashes, case.max_length, case.exists)
    got = {
        "hit_length": hit,
        "lookup_masks": _plain(masks),
        "load_masks": _plain(coordinator.load_mask(case.hashes, expect["hit_length"])),
    }
    problems = _differences(expect, got)
    plan = coordinator.plan(case.hashes, case.max_length, case.exists)
    if plan.hit_length != expect["hit_length"]:
        problems.append(f"plan: expected a hit of {expect['hit_length']}, got {plan.hit_length}")
    return problems + _check_plan(case, plan)


def _check_by_rule(case: Case) -> list[str]:
    """See that the plan has the longest hit, not above vLLM's, whose every loaded chunk was seen present."""
    plan = case.coordinator.plan(case.hashes, case.max_length, case.exists)
    best = next(
        length
        for length in range(case.expect["hit_length"], -1, -1)
        if length % case.coordinator.alignment == 0 and _all_seen(case, length)
    )
    problems = (
        [] if plan.hit_length == best else [f"by rule: expected a hit of {best}, got {plan.hit_length}"]
    )
    return problems + _check_plan(case, plan)


def _all_seen(case: Case, length: int) -> bool:
    """Whether every chunk that the load mask of `length` names was present, chunk by chunk."""
    hash_block = case.coordinator.sizes.hash_block
    masks = case.coordinator.load_mask(case.hashes, length)
    for spec, mask, exists in zip(case.coordinator.groups, masks, case.exists, strict=True):
        stride = spec.block_size // hash_block
        if mask.size != -(-length // spec.block_size):
            return False
        for chunk in np.flatnonzero(mask).tolist():
            last = (chunk + 1) * stride - 1
            first = min(last, length // hash_block - 1)
            keys = exists[first : first + 1] if spec.kind is GroupKind.MAMBA else exists[first : last + 1]
            if not keys.any():
                return False
    return True


def _check_plan(case: Case, plan: Plan) -> list[str]:
    """See that the plan holds its invariants and that the staged lookup ends in the same plan."""
    case.coordinator.check_plan(case.hashes, plan)
    problems = []
    for index, (group, exists) in enumerate(zip(plan.groups, case.exists, strict=True)):
        if not exists[group.key_units[group.mask]].all():
            problems.append(f"plan: group {index} loads a key that was not seen")
    steps = case.coordinator.lookup(case.hashes, case.max_length)
    while (probes := steps.next_probes()) is not None:
        steps.feed([exists[units] for exists, units in zip(case.exists, probes, strict=True)])
    if steps.result() != plan:
        problems.append("staged lookup: another plan than over the complete presence")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a file and print the account; return the exit code."""
    parser = argparse.ArgumentParser(prog="kvpool_agent.golden", description="Replay golden vectors.")
    parser.add_argument("file", type=Path, help="golden vectors, one JSON object a line")
    parser.add_argument("--verbose", action="store_true", help="print every case, not only the wrong ones")
    options = parser.parse_args(arguments)
    counts: Counter[Outcome] = Counter()
    try:
        for case in read_cases(options.file):
            outcome, problems = replay(case)
            counts[outcome] += 1
            if options.verbose or problems:
                print(f"{case.name}: {outcome}")
            for problem in problems:
                print(f"  {problem}")
    except GoldenError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2
    print(
        f"{counts.total()} cases, {counts[Outcome.EQUAL]} equal, {counts[Outcome.BY_RULE]} by rule, "
        f"{counts[Outcome.WRONG]} wrong"
    )
    return 1 if counts[Outcome.WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
