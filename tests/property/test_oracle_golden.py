"""The oracle is trusted because it gives every golden vector's answer, and because its two load masks agree.

The vectors are the sample that lies beside the coordinator's unit tests and, where KVPOOL_GOLDEN names a file of the
golden format, all of that file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle
from support.strategies import any_case

SAMPLE = Path(__file__).parents[1] / "unit" / "agent" / "coordinator" / "golden_sample.jsonl"
FILES = [SAMPLE, *(Path(p) for p in [os.environ.get("KVPOOL_GOLDEN", "")] if p)]


def _case(row: dict[str, Any]) -> oracle.Case:
    groups = tuple(
        oracle.Group(
            kind=g["kind"],
            block=g["block_size"],
            window=g.get("sliding_window") or 0,
            chunk=g.get("chunk_size") or 0,
            eagle=g["eagle"],
            variant=str(g.get("variant", "")),
        )
        for g in row["groups"]
    )
    return oracle.Case(
        groups=groups,
        unit=row["hash_block_size"],
        scheduler_block=row["scheduler_block_size"],
        use_eagle=row["use_eagle"],
        partial=row["partial_hits"],
        retention=row["retention_interval"],
        num_hashes=row["num_hashes"],
        max_length=row["max_length"],
        exists=frozenset((g, u) for g, u in row["exists"]),
    )


def _answers(row: dict[str, Any]) -> dict[str, Any]:
    case = _case(row)
    hit, masks = oracle.lookup(case)
    aligned = case.max_length // case.align * case.align
    return {
        "hit_length": hit,
        "lookup_masks": masks,
        "load_masks": oracle.load_mask(case, hit),
        "hit_length_without_eagle": oracle.lookup(case, prune=False)[0],
        "aligned_length": aligned,
        "probe_masks": oracle.probe_mask(case, aligned),
        "store_masks": oracle.store_mask(
            case, aligned, start=row["store_start"], prompt=row["num_prompt_tokens"]
        ),
        "eagle_groups": oracle.eagle_groups(case),
        "unverified_load": [],
    }


def _follows_the_rule(case: oracle.Case, expect: dict[str, Any]) -> bool:
    """Where the reference loads what it never saw: the longest verified hit below its own takes its place."""
    hit, masks = oracle.plan(case)
    return (
        hit < expect["hit_length"]
        and oracle.verified(case, hit)
        and masks == oracle.load_mask(case, hit)
        and not any(
            oracle.verified(case, n) for n in range(hit + case.align, expect["hit_length"] + 1, case.align)
        )
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_oracle_gives_the_answer_of_every_golden_vector(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert rows
    for row in rows:
        expect = row["expect"]
        if expect["unverified_load"]:
            assert _follows_the_rule(_case(row), expect), row["id"]
            continue
        answers = _answers(row)
        assert {k: v for k, v in answers.items() if v != expect[k]} == {}, row["id"]
        assert oracle.plan(_case(row))[0] == expect["hit_length"], row["id"]


@given(any_case(), st.integers(0, 50))
def test_oracle_load_mask_is_what_a_search_without_prune_finds_in_a_full_store(
    case: oracle.Case, steps: int
) -> None:
    length = min(steps, case.chain // case.align) * case.align
    assert oracle.load_mask(case, length) == oracle.load_mask_by_search(case, length)
