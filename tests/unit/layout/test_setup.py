"""What setup does about libraries that only the system can bring: install them as root, name them otherwise.

The script runs in a folder of its own with stand-ins for id, ldconfig and apt-get; nothing is installed.
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
        self.program("apt-get", f'echo "$@" >>"{self.log}"')

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def libraries(self, names: list[str]) -> None:
        self.program(
            "ldconfig", "\n".join(f"echo '	{name} (libc6,x86-64) => /lib/{name}'" for name in names)
        )

    def setup(self, argument: str = "libraries", *, uid: int) -> subprocess.CompletedProcess[str]:
        self.program("id", f"echo {uid}")
        return subprocess.run(
            ["bash", str(self.folder / "tools" / "setup.sh"), argument],
            env={"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": "/nonexistent"},
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
