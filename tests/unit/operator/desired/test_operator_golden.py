"""Every child of five pools, compared with a file. A difference prints as a unified diff.

After a change that is meant: KVPOOL_GOLDEN=write make test ARGS="-k operator_golden", then read `git diff`.
"""

import difflib
import os
from pathlib import Path

import pytest
import yaml

from kvpool_operator.desired.children import children
from unit.operator.desired.cases import CASES

GOLDEN = Path(__file__).with_name("golden")


class Readable(yaml.SafeDumper):
    """Writes everything out, and texts of several lines as such, so that a diff shows the line that changed."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Readable.add_representer(str, _text)


def rendered(case: str) -> str:
    pool, facts = CASES[case]
    return yaml.dump_all(children(pool, facts).manifests, Dumper=Readable, sort_keys=False, width=110)


@pytest.mark.parametrize("case", CASES)
def test_the_children_are_those_of_the_golden_file(case: str) -> None:
    path, found = GOLDEN / f"{case}.yaml", rendered(case)
    if os.environ.get("KVPOOL_GOLDEN") == "write":
        path.write_text(found)
    wanted = path.read_text()
    diff = difflib.unified_diff(
        wanted.splitlines(), found.splitlines(), str(path.name), "rendered", lineterm=""
    )
    assert found == wanted, "\n" + "\n".join(diff)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_rendering_again_gives_the_same(case: str) -> None:
    assert rendered(case) == rendered(case)
