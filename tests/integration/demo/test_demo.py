"""`kvpool demo` as a user runs it: the account, the exit code, and nothing left behind however it ends."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
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


def wait_for_program(demo: subprocess.Popen[str], mark: str, words: str) -> None:
    """Return when one of the demo's children runs a command with `words` in it; no event tells of an exec."""
    while not any(words in command for command in family(mark).values()):
        assert demo.poll() is None
        time.sleep(0.05)  # noqa: TID251 - an exec has no event


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


def belongings(mark: str) -> set[Path]:
    """The demo's folder, read off its children's command lines, and what its processes have of /dev/shm.

    Looked up by the mark, so that a demo beside this one, or anything else on the machine, plays no part.
    """
    found: set[Path] = set()
    for pid, command in family(mark).items():
        found |= {Path(folder) for folder in re.findall(r"/tmp/kvpool-\w+", command)}
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {Path(path) for path in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def read_until(demo: subprocess.Popen[str], words: str) -> None:
    assert demo.stdout is not None
    while words not in (line := demo.stdout.readline()):
        assert line, f"it ended before it said {words!r}"


def check_nothing_is_left(mark: str, belonging: set[Path]) -> None:
    assert family(mark) == {}
    assert any(path.name.startswith("kvpool-") for path in belonging), "its folder was seen while it lived"
    assert not [path for path in belonging if path.exists()]


def test_the_demo_tells_its_story_and_is_right() -> None:
    demo = start("story")
    read_until(demo, "computes three prompts")
    belonging = belongings("story")
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
    check_nothing_is_left("story", belonging)


def test_json_is_one_object() -> None:
    demo = start("json", "--json")
    text, _ = demo.communicate(timeout=150)

    account = json.loads(text)
    assert demo.returncode == 0, text
    assert account["ok"] is True
    assert account["faults"] == []
    assert account["failed_chunks"] > 0
    assert account["right_bytes"] > account["loaded_bytes"] > 0
    assert family("json") == {}


@pytest.mark.parametrize(
    ("signum", "moment"),
    [(signal.SIGINT, "kvpool_agent"), (signal.SIGTERM, "kvpool_demo.engine rank")],
    ids=["Ctrl-C while the agents start", "SIGTERM while the engines start"],
)
def test_an_interrupted_demo_leaves_nothing(signum: signal.Signals, moment: str) -> None:
    mark = f"signal {signum}"
    demo = start(mark)
    read_until(demo, "Starting")
    wait_for_program(demo, mark, moment)
    belonging = belongings(mark)

    demo.send_signal(signum)
    text, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130, text
    assert text.splitlines()[-1].startswith("demo: FAILED interrupted")
    check_nothing_is_left(mark, belonging)


def test_a_killed_demo_takes_its_processes_along() -> None:
    demo = start("killed")
    read_until(demo, "computes three prompts")
    started, belonging = family("killed"), belongings("killed")

    demo.kill()
    demo.communicate(timeout=60)

    wait_for_exit(started, seconds=20)
    assert family("killed") == {}
    assert len(started) >= 9, "a master, two agents and six engine processes at least"
    for folder in {path for path in belonging if path.is_relative_to("/tmp")}:
        shutil.rmtree(folder)  # the one thing that a SIGKILL cannot take along
    assert not [path for path in belonging if path.exists()]
