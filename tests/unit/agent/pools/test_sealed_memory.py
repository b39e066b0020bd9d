"""Sealed memory files: nobody can pull them from under a mapping, and nothing is left of them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import PoolError

RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name}")


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_created_file_has_its_size_for_ever() -> None:
    memory = SealedMemory.create("sealed", 5000)
    assert (memory.size, len(memory.view), memory.view.readonly) == (5000, 5000, False)
    assert not any(memory.view)
    for size in (0, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()


def test_crash_only_closing_frees_descriptor_and_mapping() -> None:
    before = open_files()
    memory = SealedMemory.create("freed", 4096)
    assert mappings("freed") == 1
    memory.close()
    memory.close()
    assert memory.closed
    assert (open_files(), mappings("freed")) == (before, 0)
    with pytest.raises(PoolError, match="closed"):
        memory.view  # noqa: B018 -- the property raises
    with pytest.raises(PoolError, match="closed"):
        memory.fd  # noqa: B018 -- the property raises


def test_closing_under_a_view_is_refused_and_can_be_repeated() -> None:
    memory = SealedMemory.create("held", 4096)
    part = memory.view[10:20]
    with pytest.raises(PoolError, match="still held"):
        memory.close()
    memory.view[10] = 7
    assert part[0] == 7
    part.release()
    memory.close()
    assert mappings("held") == 0


def test_both_sides_see_the_same_bytes() -> None:
    engine = SealedMemory.create("shared", 4096)
    agent = SealedMemory.map_foreign(engine.fd, 100)
    assert agent.fd != engine.fd
    agent.view[:4] = b"kvkv"
    assert bytes(engine.view[:4]) == b"kvkv"
    engine.close()
    assert bytes(agent.view[:4]) == b"kvkv"
    agent.close()


@pytest.mark.parametrize(
    ("seals", "size", "message"),
    [
        (0, 4096, "not sealed against resizing"),
        (fcntl.F_SEAL_SHRINK, 4096, "not sealed against resizing"),
        (fcntl.F_SEAL_GROW, 4096, "not sealed against resizing"),
        (RESIZE | fcntl.F_SEAL_WRITE, 4096, "sealed against writing"),
        (RESIZE | 0x10, 4096, "sealed against writing"),
        (RESIZE, 4097, "has 4096 bytes"),
        (RESIZE, 0, "declared with 0"),
    ],
)
def test_a_foreign_file_that_could_kill_or_fail_us_is_refused(seals: int, size: int, message: str) -> None:
    fd = memfd(4096, seals)
    before = open_files()
    with pytest.raises(PoolError, match=message):
        SealedMemory.map_foreign(fd, size)
    assert open_files() == before
    os.close(fd)


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, 4096)
    reading, writing = os.pipe()
    for fd in (plain, reading, 1_000_000):
        with pytest.raises(PoolError, match=r"no memory file|not sealed"):
            SealedMemory.map_foreign(fd, 4096)
    for fd in (plain, reading, writing):
        os.close(fd)


def test_a_descriptor_that_is_read_only_is_refused() -> None:
    fd = memfd(4096, RESIZE)
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = open_files()
    with pytest.raises(PoolError, match="cannot map"):
        SealedMemory.map_foreign(reading, 4096)
    assert open_files() == before
    os.close(reading)
    os.close(fd)


def test_sizes_that_the_kernel_refuses_are_named() -> None:
    before = open_files()
    with pytest.raises(PoolError, match="at least 1"):
        SealedMemory.create("empty", 0)
    with pytest.raises(PoolError, match="cannot"):
        SealedMemory.create("vast", 1 << 62)
    with pytest.raises(PoolError, match="cannot make"):
        SealedMemory.create("x" * 300, 4096)
    assert open_files() == before


def test_crash_only_a_child_inherits_no_memory_file() -> None:
    memory = SealedMemory.create("cloexec", 4096)
    listing = """
import os
for number in os.listdir("/proc/self/fd"):
    path = f"/proc/self/fd/{number}"
    print(os.readlink(path) if os.path.lexists(path) else "")
"""
    found = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, timeout=20, check=True
    )
    assert "cloexec" not in found.stdout
    memory.close()
