"""Faults that the in-memory store can be told to show. For tests of the layers above.

Promises: a fault says where it strikes (operation, keys, how often) and nothing else changes.
Refuses to be random: which call is hit is decided by the test, so every failure is repeatable.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from kvpool_agent.store.protocol import ChunkStatus


class Operation(StrEnum):
    """Where a fault strikes."""

    GET = "get"
    PUT = "put"
    REMOVE = "remove"
    EXISTS = "exists"
    LOCATE = "locate"


class FaultKind(StrEnum):
    """What goes wrong."""

    STATUS = "status"
    """The items answer `Fault.status`; their ring bytes stay as they were."""
    CORRUPT = "corrupt"
    """Get: `OK`, but one byte in the middle is flipped."""
    FOREIGN = "foreign"
    """Get: `OK`, but with the whole bytes of `Fault.other_key`."""
    WRONG_SIZE = "wrong_size"
    """Get: the object is one byte shorter than asked for: `BAD_SIZE`, its bytes are in the ring."""
    TORN = "torn"
    """Get: `PEER_FAILED` with half of the bytes written."""
    HANG = "hang"
    """The call does not go on before `Fault.event` is set (never, if None): `DEADLINE`."""
    DELAY = "delay"
    """The call takes `Fault.seconds` longer."""
    LATE_WRITE = "late_write"
    """Get: hangs to the deadline; garbage lands in the ring after it, before the process is reaped (so before the
    call returns). With an `event`: only when that is set, after the call has returned, which a real store rules out."""
    DISPLACED = "displaced"
    """Put: `OK`, and nothing is there afterwards."""
    UNAVAILABLE = "unavailable"
    """The whole call: `StoreUnavailable` from the prober, `MASTER_FAILED` from the loader."""
    DIE = "die"
    """The loader's process dies: `WORKER_DIED` for the call, a new generation."""


@dataclass(slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what goes wrong.
        operation: where.
        keys: the keys that are hit; None hits every key. Whole-call kinds strike if any key of the call is hit.
        times: how many calls are hit; None is all. Counted down as it strikes.
        status: for `STATUS`.
        seconds: for `DELAY`.
        event: for `HANG` and `LATE_WRITE`.
        other_key: for `FOREIGN`.
        struck: set when the fault has struck for the first time; await it instead of sleeping.
    """

    kind: FaultKind
    operation: Operation = Operation.GET
    keys: frozenset[bytes] | None = None
    times: int | None = None
    status: ChunkStatus = ChunkStatus.ABSENT
    seconds: float = 0.0
    event: asyncio.Event | None = None
    other_key: bytes = b""
    struck: asyncio.Event = field(default_factory=asyncio.Event)

    def hits(self, key: bytes) -> bool:
        """Whether this key is meant."""
        return self.keys is None or key in self.keys
