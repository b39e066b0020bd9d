"""What the agent may ask of a store, whichever store it is.

Promises: every call is bounded by the deadline it carries; a batch answers once per item and never leaves one
out; when `Loader.get` or `Loader.put` has returned, no byte of the ring is written or read for it any more.
Refuses: to interpret keys (opaque printable ASCII), to judge content (`OK` means that the store said so and that the
length is right; the chunk trailer is the caller's check), and to know Mooncake: nothing here imports it.

All deadlines are absolute times of the running event loop (`loop.time()`), in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ChunkStatus(StrEnum):
    """What became of one chunk of a batch. Anything but `OK` means: treat as not loaded, not saved."""

    OK = "ok"
    ABSENT = "absent"
    """The key is not there (-704): never saved, evicted, or lost with its segment."""
    NOT_READY = "not_ready"
    """The key is being written (-703), or held back after the death of a writer (see `Loader.blocked_until`)."""
    LEASED = "leased"
    """A remove was refused because a reader holds a lease (-706). Retry when it has lapsed."""
    LEASE_EXPIRED = "lease_expired"
    """The transfer outlived its lease (-707); the bytes may be anybody's."""
    FULL = "full"
    """No room for a put (-200)."""
    PEER_FAILED = "peer_failed"
    """The node that holds (or was to hold) the chunk did not answer (-800)."""
    MASTER_FAILED = "master_failed"
    """The master did not answer (-900, -901, -1010), or is known to be down."""
    BAD_SIZE = "bad_size"
    """The object has another number of bytes than were asked for."""
    CORRUPT = "corrupt"
    """The store's own checksum failed (-801)."""
    INVALID = "invalid"
    """The store refused the arguments (-600 and its kin; in a get that is `BAD_SIZE`)."""
    DEADLINE = "deadline"
    """Not answered in time. For get and put: the process that issued it has been killed and reaped."""
    WORKER_DIED = "worker_died"
    """The process that held the call died; it has been reaped."""
    NOT_ATTEMPTED = "not_attempted"
    """Never handed to the store (the loader is closed, or no process came up in time)."""
    INTERNAL = "internal"
    """Any other code; the number is in the log."""


class Transport(StrEnum):
    """Transport of the pool. There is no fallback between them: a pool that asks for RDMA fails without it."""

    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, slots=True)
class GetItem:
    """One chunk to fetch: `size` bytes of `key` to `offset` of the ring. `size` is the exact size of the object."""

    key: bytes
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PutItem:
    """One chunk to store: `size` bytes at `offset` of the ring become the object `key`."""

    key: bytes
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ReplicaLocation:
    """Where a chunk's bytes are. `endpoint` and `address` mean something only together.

    Attributes:
        endpoint: "host:port" of the transfer engine of the process that mounted the segment.
        address: address of the first byte in that process.
        size: bytes.
    """

    endpoint: str
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The node's own segment, as mounted now.

    Attributes:
        fd: the memfd behind it, open in the agent (sealed against resizing).
        name: by which the master knows it (drain jobs, `get_segments_detail`); new with every mount.
        size: bytes.
        base: address of byte 0 in the segment worker; a replica at `endpoint` lies at `address - base` of the memfd.
        endpoint: transfer engine endpoint of the segment worker.
        generation: grows with every mount. Bytes of an older generation are nobody's.
    """

    fd: int
    name: str
    size: int
    base: int
    endpoint: str
    generation: int

    def offset_of(self, location: ReplicaLocation) -> int | None:
        """Offset of a replica in this segment's memfd, or None if it lies elsewhere."""
        offset = location.address - self.base
        inside = offset >= 0 and offset + location.size <= self.size
        return offset if location.endpoint == self.endpoint and inside else None


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What is known of the store now. Figures that could not be read are None, never 0.

    Attributes:
        last_success_age: seconds since the master last answered a request of ours; None if never.
        master_reachable: whether the last probe of the master was answered.
        segment_mounted_bytes: bytes of the own segment that are mounted; 0 while it is not.
        pids: worker name to pid, of those that are up.
        restarts: worker name to number of times it has been replaced since the start.
        last_error: the last error of a worker, or "".
    """

    last_success_age: float | None
    master_reachable: bool
    segment_mounted_bytes: int
    pids: Mapping[str, int]
    restarts: Mapping[str, int]
    last_error: str = ""


class RingLike(Protocol):
    """Shared memory of one worker session: a sealed memfd that the agent created."""

    @property
    def fd(self) -> int:
        """Descriptor of the memfd; the store never closes it."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class Loader(Protocol):
    """Gets and puts through one ring. One per worker session."""

    async def get(self, items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
        """Fetch chunks into the ring.

        Returns:
            One status per item, in order. `OK` only if the store delivered exactly `size` bytes. On return nothing
            of this call is still in flight: the ring is quiet (FENCED), whatever the statuses are. Bytes of items
            that are not `OK` are undefined, bytes outside the items are untouched.

        Raises:
            StoreMisuse: an item lies outside the ring, is empty, overlaps another, or has no usable key.
            FenceUnconfirmed: the process could not be reaped; the ring must not be used again.
        """
        ...

    async def put(self, items: Sequence[PutItem], *, deadline: float) -> list[ChunkStatus]:
        """Store chunks from the ring.

        `OK` does not mean that these bytes are there: the store answers so too when the key exists with other
        bytes, when another writer has it open, and when the chunk was evicted at once. Ask `Prober.exists_keys`.

        Returns:
            One status per item, in order; on return the ring is no longer read for this call.

        Raises:
            StoreMisuse, FenceUnconfirmed: as for `get`.
        """
        ...

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """Remove keys, never by force: `OK`, `ABSENT`, or `LEASED` while a reader holds a lease."""
        ...

    async def replace(self) -> None:
        """Kill the process and start another on the same ring; returns when the old one is reaped.

        Calls in flight answer `WORKER_DIED`. The new process comes up in the background.

        Raises:
            FenceUnconfirmed: the old process could not be reaped in time.
        """
        ...

    async def close(self) -> None:
        """Kill the process for good and wait until it is reaped. Idempotent."""
        ...

    def blocked_until(self, key: bytes) -> float | None:
        """When a put of this key may be tried again (`loop.time()`), None if now.

        A writer that died in mid-put blocks its keys until the master drops them; meanwhile `put` answers
        `NOT_READY` without asking.
        """
        ...

    @property
    def generation(self) -> int:
        """Grows by one with every process that served this ring."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the present process, None while there is none."""
        ...


class Prober(Protocol):
    """Asks what is there, and removes what must not be. Asking for existence takes a lease on every key found."""

    async def exists(
        self, prefixes: Sequence[bytes], hashes: bytes, hash_size: int, *, deadline: float
    ) -> NDArray[np.uint8]:
        """Ask for all keys `prefix + hash.hex()`.

        Args:
            prefixes: key prefixes, one per (group, shard).
            hashes: n packed hashes of `hash_size` bytes each.
            hash_size: bytes of one hash.
            deadline: event loop time.

        Returns:
            Shape (len(prefixes), n): 1 present, 0 not.

        Raises:
            StoreUnavailable: the master or the worker is not there.
            StoreDeadline: no answer in time.
            StoreMisuse: `hashes` is not a whole number of hashes.
        """
        ...

    async def exists_keys(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """`OK` or `ABSENT` per whole key, or what went wrong with it. Raises as `exists` does."""
        ...

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """Remove keys, never by force: `OK`, `ABSENT`, or `LEASED` while a lease lasts. Raises as `exists` does."""
        ...

    async def locate(self, keys: Sequence[bytes], *, deadline: float) -> list[ReplicaLocation | None]:
        """The first complete memory replica of each key, None where there is none. Raises as `exists` does."""
        ...


class Store(Protocol):
    """A store: one prober, one own segment (or none), one loader per worker session."""

    @property
    def prober(self) -> Prober:
        """The prober; usable between `start` and `stop`."""
        ...

    @property
    def segment(self) -> SegmentInfo | None:
        """The own segment while it is mounted."""
        ...

    async def start(self) -> None:
        """Bring the workers up in the background; returns at once even when the master is down."""
        ...

    async def wait_ready(self, *, deadline: float) -> bool:
        """Whether prober, segment and the loaders open now are all up before the deadline."""
        ...

    async def stop(self, *, deadline: float) -> None:
        """Close loaders, unmount the segment cleanly if there is time before `deadline`, reap every process."""
        ...

    async def open_loader(self, ring: RingLike) -> Loader:
        """A loader on this ring. Succeeds while the master is down (its calls then answer `MASTER_FAILED`)."""
        ...

    def health(self) -> StoreHealth:
        """What is known now; asks nobody."""
        ...
