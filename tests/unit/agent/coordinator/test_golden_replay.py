"""Golden vectors: the sample beside this file always, the whole file where KVPOOL_GOLDEN names it; and the command."""

import json
import os
from pathlib import Path

import pytest

from kvpool_agent.golden import Outcome, main, read_cases, replay

SAMPLE = Path(__file__).parent / "golden_sample.jsonl"
LINES = SAMPLE.read_text().splitlines()


def golden_files() -> list[Path]:
    return [SAMPLE, *(Path(path) for path in [os.environ.get("KVPOOL_GOLDEN")] if path)]


@pytest.mark.parametrize("path", golden_files(), ids=lambda path: path.name)
def test_every_golden_vector_is_equal_or_right_by_rule(path: Path) -> None:
    wrong = {}
    for case in read_cases(path):
        outcome, problems = replay(case)
        if outcome is Outcome.WRONG:
            wrong[case.name] = problems
    assert wrong == {}


def test_the_command_counts_and_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(SAMPLE)]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"{len(LINES)} cases, {len(LINES) - 3} equal, 3 by rule, 0 wrong"
    )


def test_the_sample_holds_what_is_rare() -> None:
    cases = [json.loads(line) for line in LINES]
    assert sum(bool(case["expect"]["unverified_load"]) for case in cases) == 3
    assert sum(case["expect"]["hit_length"] % case["scheduler_block_size"] != 0 for case in cases) == 28
    assert {group["kind"] for case in cases for group in case["groups"]} == {
        "full_attention", "sliding_window", "chunked_local", "mamba"
    }  # fmt: skip


FIRST_HIT = next(case for case in map(json.loads, LINES) if case["expect"]["hit_length"] > 0)
RULE_CASE = next(case for case in map(json.loads, LINES) if case["expect"]["unverified_load"])


@pytest.mark.parametrize(
    "field",
    ["hit_length", "lookup_masks", "load_masks", "hit_length_without_eagle", "aligned_length", "probe_masks",
     "store_masks", "eagle_groups"],
)  # fmt: skip
def test_every_expected_field_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    case = FIRST_HIT | {"expect": FIRST_HIT["expect"] | {field: None}}
    if field == "hit_length":
        case["expect"][field] = 0
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(case) + "\n")
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "1 cases, 0 equal, 0 by rule, 1 wrong"
    assert f"{field}: expected" in out


def test_a_rule_case_is_judged_by_the_rule_not_by_vllms_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the missing chunk put back the case is an ordinary one, and vLLM's own hit is right."""
    repaired = RULE_CASE | {"exists": RULE_CASE["exists"] + [[0, 17]]}
    path = tmp_path / "rule.jsonl"
    path.write_text(json.dumps(RULE_CASE) + "\n\n" + json.dumps(repaired) + "\n")
    assert main([str(path), "--verbose"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{RULE_CASE['id']}: by rule"
    assert shown[-1] == "2 cases, 1 equal, 1 by rule, 0 wrong"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no case"),
        ("{", "one.jsonl:1: not JSON"),
        ("[]", "one.jsonl:1: not a JSON object"),
        (json.dumps(FIRST_HIT) + "\n{}", "one.jsonl:2: not a golden case: KeyError: 'groups'"),
        (json.dumps(FIRST_HIT | {"exists": [[0, 9999]]}), "not a golden case: IndexError"),
        (json.dumps(FIRST_HIT | {"exists": [[0, -1]]}), "exists names group 0, hash unit -1"),
        (json.dumps(FIRST_HIT | {"hash_block_size": 7}), "the coordinator refuses these groups"),
        (json.dumps(FIRST_HIT | {"expect": {}}), "expect has no field"),
    ],
    ids=[
        "empty",
        "not JSON",
        "no object",
        "no case",
        "unit too high",
        "unit negative",
        "refused",
        "nothing expected",
    ],
)
def test_a_bad_file_is_named_and_ends_in_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_read_ends_in_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hashes", 10**12),
        ("num_hashes", -1),
        ("max_length", -16),
        ("store_start", "0"),
        ("max_length", None),
    ],
)
def test_a_size_that_no_request_has_is_named_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    case = json.loads(SAMPLE.read_text().splitlines()[0])
    case[field] = value
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(case) + "\n")

    assert main([str(bad)]) == 2
    assert f"bad.jsonl:1: not a golden case: GoldenError: {field} is " in capsys.readouterr().err


def test_a_label_does_not_make_a_case_by_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(
        raw
        for raw in map(json.loads, SAMPLE.read_text().splitlines())
        if not raw["expect"]["unverified_load"] and raw["expect"]["hit_length"]
    )
    case["expect"]["unverified_load"] = [[0, 0]]
    case["expect"]["load_masks"][0] = []
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text(json.dumps(case) + "\n")

    assert main([str(labelled)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 cases, 0 equal, 0 by rule, 1 wrong"
