"""kvpool_wire runs inside other people's engines: it may import the standard library, protobuf and itself.

An allowlist, read from the syntax tree: import-linter forbids packages by name, and nobody can name all of them.
"""

import ast
import sys
from pathlib import Path

import pytest

WIRE = Path(__file__).resolve().parents[3] / "agent/kvpool_wire"
MODULES = sorted(WIRE.rglob("*.py"))  # the stub beside them is read by type checkers alone
ALLOWED = sys.stdlib_module_names | {"kvpool_wire", "google.protobuf"}


def imported(source: str) -> list[str]:
    """Absolute names of all that a module imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names.append("." * node.level + (node.module or ""))
            elif node.module == "google":  # a namespace: what is taken from it is the package
                names += [f"google.{alias.name}" for alias in node.names]
            else:
                names.append(str(node.module))
    return names


def foreign(source: str) -> list[str]:
    """Imports that are not allowed."""
    return [
        name
        for name in imported(source)
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED)
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_every_module_of_the_wire_imports_only_what_is_allowed(path: Path) -> None:
    assert foreign(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import psutil", ["psutil"]),
        ("import numpy as np, json", ["numpy"]),
        ("def late() -> None:\n    from xxhash import xxh3_64", ["xxhash"]),
        ("try:\n    import grpc.aio\nexcept ImportError:\n    pass", ["grpc.aio"]),
        ("from google.cloud import storage", ["google.cloud"]),
        ("from google import auth, protobuf", ["google.auth"]),
        ("import kvpool_agent.errors", ["kvpool_agent.errors"]),
        ("import kvpool_wirefence", ["kvpool_wirefence"]),
        (
            "import struct\nfrom google.protobuf.internal import enum_type_wrapper\nimport kvpool_wire.keys",
            [],
        ),
    ],
)
def test_a_foreign_import_is_found_wherever_it_stands(source: str, found: list[str]) -> None:
    assert foreign(source) == found
