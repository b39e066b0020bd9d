"""Where a pool's sockets are on a node, and the group that may use them (docs/adr/0010).

Promises: a pool that is made anew under an old name gets another folder and, as long as there are any, another group; a
group that was allotted once stays with its pool. Refuses to look: who already has a group is an argument.
"""

import hashlib
from collections.abc import Collection
from typing import Final

FIRST_GID: Final = 1_900_000_000
LAST_GID: Final = 1_900_065_535
"""Far above what distributions, user namespaces (from 100,000 on) and platforms hand out, and below 2^31, where
Kubernetes ends."""

LONGEST_ROOT: Final = 80
"""Bytes: with the pool's folder and `agent.sock` the path stays under 108, also below an engine's mount of the root."""


class NoGroupLeftError(RuntimeError):
    """Every group of the range belongs to a pool."""


def folder(root: str, uid: str) -> str:
    """The pool's folder, `<root>/<12 hex>`, from the pool's uid.

    Raises:
        ValueError: the root is not absolute or too long.
    """
    if not root.startswith("/") or len(root.encode()) > LONGEST_ROOT:
        raise ValueError(f"socket root {root!r}: an absolute path of at most {LONGEST_ROOT} bytes")
    return f"{root.rstrip('/')}/{hashlib.sha256(uid.encode()).hexdigest()[:12]}"


def allot_gid(uid: str, taken: Collection[int]) -> int:
    """A group for the pool with this uid: the same one as long as it is free, else the next one.

    Raises:
        NoGroupLeftError: there are 65,536 pools already.
    """
    size = LAST_GID - FIRST_GID + 1
    start = int.from_bytes(hashlib.sha256(f"gid {uid}".encode()).digest()[:8], "big") % size
    used = frozenset(taken)
    for step in range(size):
        gid = FIRST_GID + (start + step) % size
        if gid not in used:
            return gid
    raise NoGroupLeftError(
        f"all groups from {FIRST_GID} to {LAST_GID} belong to pools; delete one that is not used"
    )
