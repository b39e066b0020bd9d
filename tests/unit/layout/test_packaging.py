"""What the distribution promises about its extras, its folders and its pinned versions."""

import ast
import operator
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [ROOT / "operator", ROOT / "agent"]
PACKAGES = sorted(folder.name for top in SOURCES for folder in top.glob("kvpool_*"))
MAX_LINES: Final = 400


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    """Package -> version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in split}


def requirements(project: dict[str, Any], extra: str) -> dict[str, Requirement]:
    """Everything that `extra` asks for by name, with the extras of this distribution that it names resolved."""
    found: dict[str, Requirement] = {}
    for text in project["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            for inner in requirement.extras:
                found |= requirements(project, inner)
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found


def mooncake_builds(names: dict[str, Requirement]) -> set[str]:
    return {name for name in names if name.startswith("mooncake")}


def test_the_standard_library_keeps_its_operator_module() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "agent" / "__init__.py").exists()
    assert not Path(str(operator.__file__)).is_relative_to(ROOT)


def test_the_distribution_alone_asks_for_nothing(project: dict[str, Any]) -> None:
    assert project["dependencies"] == []


def test_the_operator_asks_for_neither_torch_nor_mooncake(project: dict[str, Any]) -> None:
    names = requirements(project, "operator")
    assert names, "the extra is empty"
    assert "torch" not in names
    assert not mooncake_builds(names)


def test_the_two_agent_extras_differ_in_the_build_and_its_driver_alone(project: dict[str, Any]) -> None:
    cuda, cpu = requirements(project, "agent"), requirements(project, "agent-cpu")
    assert mooncake_builds(cuda) == {"mooncake-transfer-engine"}
    assert mooncake_builds(cpu) == {"mooncake-transfer-engine-non-cuda"}
    assert set(cuda) - mooncake_builds(cuda) - {"cuda-bindings"} == set(cpu) - mooncake_builds(cpu)


def test_no_other_extra_brings_mooncake(project: dict[str, Any]) -> None:
    bringing = {
        extra for extra in project["optional-dependencies"] if mooncake_builds(requirements(project, extra))
    }
    assert bringing == {"agent", "agent-cpu"}, "both builds install the one module `mooncake`"


def test_the_engine_asks_for_nothing_that_only_the_agent_needs(project: dict[str, Any]) -> None:
    assert set(requirements(project, "engine")) == {
        "grpcio",
        "numpy",
        "opentelemetry-api",
        "protobuf",
        "typing-extensions",
    }


@pytest.mark.parametrize("extra", ["agent", "agent-cpu", "engine"])
@pytest.mark.parametrize(
    ("version", "allowed"),
    [
        ("5.29.5", False),
        ("5.29.6", True),
        ("6.29.0", True),
        ("6.30.2", False),
        ("6.32.9", False),
        ("6.33.0", True),
    ],
)
def test_protobuf_stays_in_the_range_that_vllm_allows(
    project: dict[str, Any], extra: str, version: str, allowed: bool
) -> None:
    assert requirements(project, extra)["protobuf"].specifier.contains(version) is allowed


@pytest.mark.parametrize("extra", ["agent-cpu", "engine", "operator", "dev"])
def test_every_requirement_is_pinned_inside_its_range(
    project: dict[str, Any], pins: dict[str, str], extra: str
) -> None:
    for name, requirement in requirements(project, extra).items():
        assert name in pins, f"{name} of extra {extra} is not in constraints.txt; run tools/freeze.sh"
        assert requirement.specifier.contains(pins[name], prereleases=True), (
            f"{requirement} against {pins[name]}"
        )


def test_pins_hold_on_any_machine(pins: dict[str, str]) -> None:
    for name, version in pins.items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), f"{name}=={version} names a build or a path"


def test_every_package_is_typed_and_opens_with_its_promise() -> None:
    assert PACKAGES == ["kvpool_agent", "kvpool_demo", "kvpool_engine", "kvpool_operator", "kvpool_wire"]
    for package in (folder for top in SOURCES for folder in top.glob("kvpool_*")):
        assert (package / "py.typed").is_file(), f"{package.name} has no py.typed"
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), (
            f"{package.name} says nothing"
        )


def test_every_module_opens_with_its_promise_and_stays_readable() -> None:
    for path in (path for top in SOURCES for path in top.rglob("*.py")):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} does not say what it promises"
        assert text.count("\n") <= MAX_LINES, f"{path.relative_to(ROOT)} has more than {MAX_LINES} lines"


def test_importing_the_operator_imports_nothing_heavy() -> None:
    code = "import sys, kvpool_operator; print([m for m in ('torch', 'mooncake', 'grpc', 'numpy') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_subcommand_can_be_loaded() -> None:
    commands = {entry.name: entry for entry in entry_points(group="kvpool.commands")}
    assert set(commands) == {"agent", "demo"}
    assert all(callable(entry.load()) for entry in commands.values())
