"""What tests ask the kernel about processes, by pid."""

from __future__ import annotations

import subprocess
from pathlib import Path


def gone(pid: int | None) -> bool:
    """Whether this was a process and is reaped."""
    return pid is not None and not Path(f"/proc/{pid}").exists()


def ended(pid: int) -> bool:
    """Gone, or a zombie of somebody who reaps late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def executable(pid: int) -> Path:
    """The program that it runs."""
    return Path(f"/proc/{pid}/exe").resolve()


def command(pid: int) -> list[str]:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def children(pid: int) -> list[str]:
    """Pids of its children."""
    return [one for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


def maps_of(pid: int | str) -> str:
    """Its mappings."""
    return Path(f"/proc/{pid}/maps").read_text()


def mapping(pid: int | None, name: str) -> int:
    """Address of its first mapping whose line has `name`."""
    return next(int(line.split("-")[0], 16) for line in maps_of(str(pid)).splitlines() if name in line)


def niceness(pid: int | None) -> list[int]:
    """Nice values of its threads."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [int(fields[16]) for fields in stats]


def handshake_port(pid: int | None) -> int:
    """The one port on which it listens for IPv4."""
    links = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = {
        int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links
    }
    return port


def status_of(arguments: list[str]) -> int:
    """Exit status of a short command."""
    return subprocess.run(arguments, check=False, capture_output=True, timeout=20).returncode
