"""The arrows between packages: they hold today, and each contract fails when its arrow is broken.

Every break is made in a copy of the sources; the checkout is never touched.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
AGENT_LAYERS = (
    "Agent: every module in its layer; server, transfer, then coordinator, store and pools side by side"
)
PURE = "The coordinator is pure: no I/O, no torch, no Mooncake, no clock"
IMPURE = [
    "pathlib",
    "io",
    "sys",
    "logging",
    "argparse",
    "shutil",
    "tempfile",
    "os",
    "socket",
    "threading",
    "random",
]

BREAKS = [
    pytest.param(
        "agent/kvpool_agent/broken.py",
        "import kvpool_operator",
        "Operator, agent and engine never import each other",
        id="the agent imports the operator",
    ),
    pytest.param(
        "agent/kvpool_engine/broken.py",
        "import kvpool_agent.coordinator",
        "Operator, agent and engine never import each other",
        id="the engine imports the agent",
    ),
    pytest.param(
        "agent/kvpool_engine/broken.py",
        "import xxhash",
        "The engine's side installs without the agent's dependencies",
        id="the engine needs what only the agent installs",
    ),
    pytest.param(
        "agent/kvpool_wire/broken.py",
        "import kvpool_agent.coordinator",
        "What both sides agree on imports neither of them",
        id="the wire imports a side",
    ),
    pytest.param(
        "agent/kvpool_demo/broken.py",
        "import kvpool_agent.coordinator",
        "The demo knows the agent by its command line and its sockets, as a user does",
        id="the demo reaches into the agent",
    ),
    pytest.param(
        "agent/kvpool_demo/broken.py",
        "import kvpool_operator",
        "The demo knows the agent by its command line and its sockets, as a user does",
        id="the demo reaches into the operator",
    ),
    pytest.param(
        "operator/kvpool_operator/broken.py",
        "import torch",
        "The operator installs without torch and Mooncake",
        id="the operator imports torch",
    ),
    pytest.param(
        "operator/kvpool_operator/api/broken.py",
        "import kvpool_operator.reconcile",
        "Operator: main, handlers, reconcile, desired, api",
        id="the operator's models import its reconcile loop",
    ),
    pytest.param(
        "agent/kvpool_agent/coordinator/broken.py",
        "import kvpool_agent.store",
        AGENT_LAYERS,
        id="the coordinator imports the store",
    ),
    pytest.param(
        "agent/kvpool_agent/transfer/broken.py",
        "import kvpool_agent.server",
        AGENT_LAYERS,
        id="a transfer imports the server",
    ),
    pytest.param(
        "agent/kvpool_agent/telemetry/broken.py",
        "import kvpool_agent.server",
        AGENT_LAYERS,
        id="telemetry imports the server",
    ),
    pytest.param(
        "agent/kvpool_agent/telemetry/broken.py",
        "import kvpool_agent.config",
        AGENT_LAYERS,
        id="telemetry imports the configuration, which imports it",
    ),
    pytest.param(
        "agent/kvpool_agent/transfer/broken.py",
        "import kvpool_agent.config",
        AGENT_LAYERS,
        id="a transfer reads the configuration",
    ),
    pytest.param(
        "agent/kvpool_agent/store/broken.py",
        "import kvpool_agent.telemetry",
        AGENT_LAYERS,
        id="the store counts by itself",
    ),
    pytest.param(
        "agent/kvpool_agent/server/broken.py",
        "import kvpool_agent.golden",
        AGENT_LAYERS,
        id="the server imports a command",
    ),
    pytest.param("agent/kvpool_agent/broken.py", "", AGENT_LAYERS, id="a module is in no layer"),
    pytest.param(
        "agent/kvpool_agent/coordinator/broken.py",
        "import time",
        PURE,
        id="the coordinator reads a clock",
    ),
    pytest.param(
        "agent/kvpool_agent/coordinator/broken.py",
        "def late() -> None:\n    import torch",
        PURE,
        id="the coordinator imports torch inside a function",
    ),
    pytest.param(
        "agent/kvpool_agent/transfer/broken.py",
        "import mooncake.store",
        "Only the store's own module imports Mooncake",
        id="a transfer imports Mooncake",
    ),
    pytest.param(
        "agent/kvpool_agent/broken.py",
        "import kvpool_agent.store.mooncake",
        "Only the exec'd worker loads that module: the agent's process never holds Mooncake",
        id="the agent's process loads the Mooncake module",
    ),
    pytest.param(
        "agent/kvpool_agent/server/broken.py",
        "import cuda.bindings.driver",
        "Only the CUDA pool imports the CUDA driver",
        id="the server imports the CUDA driver",
    ),
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run every contract over the sources in `folder`."""
    paths = os.pathsep.join((str(folder / "operator"), str(folder / "agent")))
    return subprocess.run(
        [sys.executable, "-P", "-c", LINT, "--no-cache", str(ROOT / ".importlinter")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both source folders."""
    copy = tmp_path_factory.mktemp("contracts")
    for name in ("operator", "agent"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for layer in ("api", "reconcile"):  # stand-ins for as long as the operator lacks these layers
        package = copy / "operator/kvpool_operator" / layer
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    return copy


def test_the_contracts_hold(sources: Path) -> None:
    result = lint(sources)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("path", "code", "contract"), BREAKS)
def test_a_broken_arrow_fails_its_contract(sources: Path, path: str, code: str, contract: str) -> None:
    culprit = sources / path
    culprit.write_text(code + "\n")
    try:
        result = lint(sources)
    finally:
        culprit.unlink()
    assert result.returncode != 0, result.stdout
    assert f"{contract} BROKEN" in result.stdout, result.stdout + result.stderr


def test_each_way_out_of_the_coordinator_is_named_by_the_contract(sources: Path) -> None:
    culprit = sources / "agent/kvpool_agent/coordinator/broken.py"
    culprit.write_text("".join(f"import {name}\n" for name in IMPURE))
    try:
        result = lint(sources)
    finally:
        culprit.unlink()
    found = [
        name
        for name in IMPURE
        if f"kvpool_agent.coordinator is not allowed to import {name}" in result.stdout
    ]
    assert found == IMPURE, result.stdout


def test_a_lower_module_that_imports_a_higher_one_fails(sources: Path) -> None:
    culprit = sources / "agent/kvpool_agent/errors.py"
    text = culprit.read_text()
    culprit.write_text(f"{text}\nimport kvpool_agent.telemetry.logs\n")
    try:
        result = lint(sources)
    finally:
        culprit.write_text(text)
    assert f"{AGENT_LAYERS} BROKEN" in result.stdout, result.stdout


def test_every_contract_is_broken_once_here() -> None:
    lines = (ROOT / ".importlinter").read_text().splitlines()
    named = {line.partition("=")[2].strip() for line in lines if line.startswith("name =")}
    assert named == {case.values[2] for case in BREAKS}
