"""What every test may rely on: deterministic properties, short socket folders, and no process left behind.

Nothing here starts a service or decides whether a test runs; helpers with a subject of their own live in `support/`.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples on every machine: a property that fails by luck only is a bug in the test.
hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, database=None, print_blob=True, max_examples=100
)
# For a person who looks for a counterexample: KVPOOL_PROPERTIES=search make test
hypothesis.settings.register_profile("search", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("KVPOOL_PROPERTIES", "default"))


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets (108 bytes), removed after the test."""
    folder = Path(tempfile.mkdtemp(prefix="kvp-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests() -> Iterator[None]:
    """CRASH_ONLY: whatever a test started is gone when the run ends; a leftover child fails the run."""
    before = _children()
    yield
    left = {pid: name for pid, name in _children().items() if pid not in before}
    if left:
        pytest.fail(f"child processes outlived their tests: {left}")


def _children() -> dict[int, str]:
    """Live child processes of this one, by process id, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        # Python's own tracker of shared memory lives as long as the interpreter, by design.
        if int(fields[1]) == os.getpid() and "resource_tracker" not in command:
            found[int(entry.name)] = command or f"(ended, not waited for: state {fields[0]})"
    return found
