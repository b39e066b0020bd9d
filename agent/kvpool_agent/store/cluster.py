"""The objects that all nodes of the store in memory share. For tests; see `memory`.

Promises: what was put first stays, and what somebody reads, or has just asked for, is not removed. Refuses to evict.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvpool_agent.store.protocol import ChunkStatus


@dataclass(slots=True)
class MemoryCluster:
    """The objects that all nodes share.

    Attributes:
        objects: key to bytes.
        capacity: bytes; puts beyond it answer `FULL`. None is no limit.
        blocked: key to event loop time until which puts of it answer `NOT_READY`.
        lease_seconds: how long a lease lasts.
        leases: key to event loop time until which removes of it answer `LEASED`.
    """

    objects: dict[bytes, bytes] = field(default_factory=dict)
    capacity: int | None = None
    blocked: dict[bytes, float] = field(default_factory=dict)
    lease_seconds: float = 5.0
    leases: dict[bytes, float] = field(default_factory=dict)

    def used(self) -> int:
        """Bytes stored."""
        return sum(map(len, self.objects.values()))

    def lease(self, key: bytes) -> None:
        """Somebody reads the key, or asked for it: it cannot be removed for a while."""
        if key in self.objects:
            self.leases[key] = asyncio.get_running_loop().time() + self.lease_seconds

    def remove(self, key: bytes) -> ChunkStatus:
        """What a remove that is not forced answers."""
        if key not in self.objects:
            return ChunkStatus.ABSENT
        if self.leases.get(key, 0.0) > asyncio.get_running_loop().time():
            return ChunkStatus.LEASED
        del self.objects[key]
        self.leases.pop(key, None)
        return ChunkStatus.OK
