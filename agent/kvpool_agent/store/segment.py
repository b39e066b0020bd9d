"""The node's own segment: memory that the agent creates and a worker process mounts.

Promises: the memory is sealed against resizing, so nobody who maps it can be hurt by a truncation; it outlives its
worker (the bytes do, the keys do not). Refuses to serve reads: who wants them maps the descriptor and verifies.
"""

from __future__ import annotations

import fcntl
import os

from kvpool_agent.store.config import StoreConfig
from kvpool_agent.store.protocol import SegmentInfo
from kvpool_agent.store.supervisor import State, Supervisor


def sealed_memory(name: str, size: int) -> int:
    """A memfd of `size` bytes that can neither shrink nor grow; returns its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class SegmentHolder:
    """Remembers where the present worker mounted the segment."""

    def __init__(self, config: StoreConfig, fd: int) -> None:
        self.fd = fd
        self._config = config
        self._facts: dict[str, object] | None = None
        self._supervisor: Supervisor | None = None

    def watch(self, supervisor: Supervisor) -> None:
        """Set the supervisor whose process mounts it."""
        self._supervisor = supervisor

    def mounted(self, facts: dict[str, object]) -> None:
        """A worker has mounted the segment."""
        self._facts = facts

    @property
    def info(self) -> SegmentInfo | None:
        """Where the segment is; None while no worker holds it."""
        supervisor, facts = self._supervisor, self._facts
        if supervisor is None or facts is None or supervisor.state is not State.UP:
            return None
        return SegmentInfo(
            fd=self.fd,
            name=str(facts["name"]),
            size=self._config.segment_size,
            base=int(str(facts["base"])),
            endpoint=str(facts["endpoint"]),
            generation=supervisor.generation,
        )

    def close(self) -> None:
        """Give the memory back; the worker must be gone."""
        os.close(self.fd)
