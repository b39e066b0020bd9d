"""What a worker has to find out about itself from the kernel, since Mooncake does not tell.

Promises: an answer only where it is plain; 0 otherwise, which switches direct reads off and nothing else.
Refuses to look at other processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_LISTENING: Final = "0A"


def mapping_of(inode: int) -> int:
    """Address at which this process maps the memfd with this inode, 0 if it does so never or more than once."""
    with Path("/proc/self/maps").open(encoding="ascii", errors="replace") as maps:
        starts = [int(line.split("-", 1)[0], 16) for line in maps if line.split()[4] == str(inode)]
    return starts[0] if len(starts) == 1 else 0


def handshake_port() -> int:
    """Port of this process's Mooncake handshake, the one by which the master names its replicas.

    Mooncake chooses it and tells nobody: it is the only port on which this process listens for IPv4.
    """
    own: set[str] = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            own.add(os.readlink(entry.path))  # noqa: PTH115 -- no path but a name such as socket:[1]
        except FileNotFoundError:
            continue  # the descriptor of the directory itself
    with Path("/proc/self/net/tcp").open(encoding="ascii") as table:
        rows = [line.split() for line in list(table)[1:]]
    ports = {
        int(row[1].split(":")[1], 16) for row in rows if row[3] == _LISTENING and f"socket:[{row[9]}]" in own
    }
    return ports.pop() if len(ports) == 1 else 0
