"""`kvpool demo` as a user runs it: the account, the exit code, and nothing left behind however it ends."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

MARK = "KVPOOL_DEMO_TEST"


def start(mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvpool_wire.cli", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, MARK: mark},
        text=True,
    )


def family(mark: str) -> dict[int, str]:
    """Processes that carry the mark in their environment: the demo and all that it started."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_for_exit(pids: dict[int, str], seconds: float) -> None:
    """Block on the processes' own descriptors; a process that is gone already has none."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)


@pytest.fixture
def leftovers() -> Iterator[None]:
    """Neither a folder with sockets nor shared memory may stay."""
    before = set(Path("/tmp").glob("kvpool-*")) | set(Path("/dev/shm").iterdir())
    yield
    assert set(Path("/tmp").glob("kvpool-*")) | set(Path("/dev/shm").iterdir()) <= before


def test_the_demo_tells_its_story_and_is_right(leftovers: None) -> None:
    demo = start("story")
    text, _ = demo.communicate(timeout=150)

    lines = text.splitlines()
    assert demo.returncode == 0, text
    assert lines[-1].startswith("demo: ok "), text
    assert "alice: hit 1,520 of 1,543 tokens (16 pruned)" in text
    assert re.search(
        r"\d+ chunks reported failed \(.*\), .*; the engine resumes at 1,\d+ tokens instead of 1,392", text
    )
    assert " 0 blocks wrong, 0 blocks written that nobody asked for" in text
    assert "└─ kvpool.load" in text
    assert family("story") == {}


def test_json_is_one_object(leftovers: None) -> None:
    demo = start("json", "--json")
    text, _ = demo.communicate(timeout=150)

    account = json.loads(text)
    assert demo.returncode == 0, text
    assert account["ok"] is True
    assert account["faults"] == []
    assert account["failed_chunks"] > 0
    assert account["right_bytes"] > account["loaded_bytes"] > 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(leftovers: None, signum: signal.Signals) -> None:
    demo = start(f"signal {signum}")
    assert demo.stdout is not None
    while "computes three prompts" not in demo.stdout.readline():
        assert demo.poll() is None

    demo.send_signal(signum)
    text, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130, text
    assert text.splitlines()[-1].startswith("demo: FAILED interrupted")
    assert family(f"signal {signum}") == {}


def test_a_killed_demo_takes_its_processes_along() -> None:
    before = set(Path("/tmp").glob("kvpool-*"))
    demo = start("killed")
    assert demo.stdout is not None
    while "computes three prompts" not in demo.stdout.readline():
        assert demo.poll() is None
    started = family("killed")

    demo.kill()
    demo.communicate(timeout=60)

    wait_for_exit(started, seconds=20)
    for folder in set(Path("/tmp").glob("kvpool-*")) - before:
        shutil.rmtree(folder)  # the one thing that a SIGKILL cannot take along
    assert family("killed") == {}
    assert len(started) >= 9, "a master, two agents and six engine processes at least"
