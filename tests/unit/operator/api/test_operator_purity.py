"""`api` and `desired` decide and never do: no client, no clock, no randomness, no I/O, and no arrow upwards."""

import ast
from pathlib import Path

import pytest

OPERATOR = Path(__file__).resolve().parents[4] / "operator/kvpool_operator"
MODULES = sorted([*OPERATOR.glob("api/*.py"), *OPERATOR.glob("desired/*.py")])
ALLOWED = {
    *(
        "annotated_types",
        "collections",
        "dataclasses",
        "enum",
        "hashlib",
        "json",
        "math",
        "pydantic",
        "re",
        "types",
    ),
    *("typing", "yaml", "kvpool_operator"),
}


def imported(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: f"{module.parent.name}/{module.name}")
def test_a_module_imports_only_what_decides(module: Path) -> None:
    assert {name.partition(".")[0] for name in imported(module)} <= ALLOWED
    inner = {name.split(".")[1] for name in imported(module) if name.startswith("kvpool_operator.")}
    assert inner <= ({"api"} if module.parent.name == "api" else {"api", "desired"})


@pytest.mark.parametrize("module", MODULES, ids=lambda module: f"{module.parent.name}/{module.name}")
def test_a_module_opens_nothing(module: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}
