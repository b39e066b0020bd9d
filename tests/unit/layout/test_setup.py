"""What setup does about libraries that only the system can bring, and what it says about the build of torch at hand.

Libraries are installed as root and named otherwise; a CUDA build of torch is announced before it is fetched. The script
runs in a folder of its own with stand-ins for id, ldconfig, apt-get and the virtual environment's pip; nothing is
installed.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRESENT = ["libibverbs.so.1", "libnuma.so.1", "libcurl.so.4", "libstdc++.so.6"]


class Machine:
    """A folder with a copy of the script and a PATH that pretends which libraries are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.log = folder / "apt.log"
        (folder / "tools").mkdir()
        self.bin.mkdir()
        shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
        self.pip_log = folder / "pip.log"
        self.program("apt-get", f'echo "$@" >>"{self.log}"')

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def libraries(self, names: list[str]) -> None:
        self.program(
            "ldconfig", "\n".join(f"echo '	{name} (libc6,x86-64) => /lib/{name}'" for name in names)
        )

    def venv(self, would_install: str, *, dry_run_fails: bool = False) -> None:
        """A .venv whose pip notes its calls and says what a dry run would install."""
        path = self.folder / ".venv/bin/python"
        path.parent.mkdir(parents=True)
        answer = "exit 1" if dry_run_fails else f"echo '{would_install}'"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@" >>"{self.pip_log}"\n'
            f'case " $* " in *" --dry-run "*) {answer};; esac\n'
        )
        path.chmod(0o755)

    def installs(self) -> list[str]:
        """What pip was asked to install for real, in order."""
        calls = self.pip_log.read_text().splitlines()
        return [call.rpartition(" ")[2] for call in calls if "--dry-run" not in call]

    def setup(
        self, argument: str = "libraries", *, uid: int, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        self.program("id", f"echo {uid}")
        return subprocess.run(
            ["bash", str(self.folder / "tools" / "setup.sh"), argument],
            env={"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": "/nonexistent", **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    return Machine(folder)


def test_an_ordinary_account_is_told_the_packages_and_the_command(machine: Machine) -> None:
    machine.libraries(["libnuma.so.1", "libstdc++.so.6"])
    result = machine.setup(uid=1000)
    assert result.returncode == 1
    assert "lacks: libibverbs1 libcurl4" in result.stderr
    assert "apt-get update && apt-get install libibverbs1 libcurl4" in result.stderr
    assert not machine.log.exists()


def test_an_ordinary_account_with_the_libraries_goes_on(machine: Machine) -> None:
    machine.libraries(PRESENT)
    result = machine.setup(uid=1000)
    assert result.returncode == 0, result.stderr
    assert not machine.log.exists()


def test_root_installs_only_what_is_missing(machine: Machine) -> None:
    machine.libraries(["libibverbs.so.1", "libcurl.so.4", "libstdc++.so.6"])
    result = machine.setup(uid=0)
    assert result.returncode == 0, result.stderr
    assert machine.log.read_text().splitlines()[0].startswith("update")
    assert machine.log.read_text().splitlines()[1].split()[-1] == "libnuma1"


def test_a_wrong_argument_is_refused(machine: Machine) -> None:
    result = machine.setup("whatever", uid=1000)
    assert result.returncode == 1
    assert "whatever" in result.stderr


def test_a_cuda_build_of_torch_is_announced_before_it_is_fetched(machine: Machine) -> None:
    machine.libraries(PRESENT)
    machine.venv("Would install nvidia-cublas-13.1 nvidia-cudnn-cu13-9.1 torch-2.13.0 triton-3.7")
    result = machine.setup("everything", uid=1000)
    assert result.returncode == 0, result.stderr
    assert "CUDA build" in result.stderr
    assert "GB" in result.stderr
    for way in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "KVPOOL_TORCH"):
        assert way in result.stderr
    assert machine.installs() == ["torch==2.13.0", ".[agent-cpu,engine,operator,dev]"]


def test_nothing_is_said_about_a_cpu_build(machine: Machine) -> None:
    machine.libraries(PRESENT)
    machine.venv("Would install filelock-3.1 torch-2.13.0+cpu")
    result = machine.setup("everything", uid=1000)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_build_of_torch_can_be_named(machine: Machine) -> None:
    machine.libraries(PRESENT)
    machine.venv("Would install torch-2.13.0+cpu")
    result = machine.setup("everything", uid=1000, KVPOOL_TORCH="wheels/torch-2.13.0+cpu-cp311.whl")
    assert result.returncode == 0, result.stderr
    assert machine.installs()[0] == "wheels/torch-2.13.0+cpu-cp311.whl"


def test_a_torch_that_cannot_be_found_ends_setup_before_anything_is_installed(machine: Machine) -> None:
    machine.libraries(PRESENT)
    machine.venv("", dry_run_fails=True)
    result = machine.setup("everything", uid=1000)
    assert result.returncode == 1
    assert "KVPOOL_TORCH" in result.stderr
    assert machine.installs() == []
    assert not (machine.folder / ".venv/.kvpool-stamp").exists()
