"""A store in this process's memory, with faults on demand. For tests of the layers above; never for production.

Promises: the same protocol, statuses and guards as the real store, on a real memfd ring; every node of a
`MemoryCluster` sees the same objects; faults strike exactly where a test put them; every call is recorded.
A question for existence and a get take a lease, as the real store's do; while it lasts a key is not removed.
Refuses to model speed or eviction by itself: a test evicts by `MemoryCluster.objects.pop(key)`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.store.cluster import MemoryCluster
from kvpool_agent.store.errors import StoreDeadline, StoreMisuse, StoreUnavailable
from kvpool_agent.store.faults import Fault, FaultKind, Operation
from kvpool_agent.store.guards import check_items, check_keys
from kvpool_agent.store.protocol import (
    ChunkStatus,
    GetItem,
    PutItem,
    ReplicaLocation,
    RingLike,
    SegmentInfo,
    StoreHealth,
)

__all__ = ["Call", "MemoryCluster", "MemoryLoader", "MemoryProber", "MemoryStore"]

_FAKE_PID_BASE = (
    1 << 22
)  # above the kernel's largest pid, so that nobody can signal a real process by mistake


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the fake.

    Attributes:
        operation: what was called.
        keys: the keys asked for, in order.
    """

    operation: Operation
    keys: tuple[bytes, ...]


class _Faults:
    """Finds the faults that strike a call and counts them down."""

    def __init__(self) -> None:
        self.armed: list[Fault] = []

    def strike(self, operation: Operation, keys: Iterable[bytes]) -> list[Fault]:
        wanted = list(keys)
        hit = [
            fault
            for fault in self.armed
            if fault.operation is operation and fault.times != 0 and any(map(fault.hits, wanted))
        ]
        for fault in hit:
            if fault.times is not None:
                fault.times -= 1
            fault.struck.set()
        return hit


async def _wait(faults: Sequence[Fault], deadline: float) -> bool:
    """Live through delays and hangs; False if the deadline came first."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(deadline):
            for fault in faults:
                if fault.kind is FaultKind.DELAY:
                    await asyncio.sleep(fault.seconds)
                elif fault.kind is FaultKind.HANG:
                    await (fault.event or asyncio.Event()).wait()
                elif fault.kind is FaultKind.LATE_WRITE:
                    await asyncio.Event().wait()
    except TimeoutError:
        return False
    return loop.time() < deadline


class MemoryLoader:
    """`Loader` of the fake."""

    def __init__(self, store: MemoryStore, ring: RingLike, number: int) -> None:
        self._store = store
        self._ring = ring
        self._number = number
        self._generation = 1
        self._closed = False
        self._late: set[asyncio.Task[None]] = set()

    @property
    def generation(self) -> int:
        """Grows whenever a call overran its deadline, died, or `replace` was called."""
        return self._generation

    @property
    def pid(self) -> int | None:
        """A number that is no process."""
        return None if self._closed else _FAKE_PID_BASE + self._number * 1000 + self._generation

    async def get(self, items: Sequence[GetItem], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.get`."""
        check_items(items, ring_size=self._ring.size)
        self._store.record(Operation.GET, [item.key for item in items])
        faults = self._store.faults.strike(Operation.GET, (item.key for item in items))
        early = await self._whole_call(faults, deadline, items)
        if early is not None:
            return [early] * len(items)
        return [self._get_one(item, faults) for item in items]

    async def put(self, items: Sequence[PutItem], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.put`."""
        check_items(items, ring_size=self._ring.size)
        self._store.record(Operation.PUT, [item.key for item in items])
        faults = self._store.faults.strike(Operation.PUT, (item.key for item in items))
        early = await self._whole_call(faults, deadline, ())
        if early is not None:
            if early in (ChunkStatus.DEADLINE, ChunkStatus.WORKER_DIED):
                until = asyncio.get_running_loop().time() + self._store.put_discard_timeout
                self._store.cluster.blocked.update({item.key: until for item in items})
            return [early] * len(items)
        return [self._put_one(item, faults) for item in items]

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Loader.remove`."""
        check_keys(keys)
        self._store.record(Operation.REMOVE, keys)
        faults = self._store.faults.strike(Operation.REMOVE, keys)
        early = await self._whole_call(faults, deadline, ())
        if early is not None:
            return [early] * len(keys)
        return [self._remove_one(key, faults) for key in keys]

    async def replace(self) -> None:
        """See `Loader.replace`."""
        self._generation += 1

    async def close(self) -> None:
        """See `Loader.close`."""
        self._closed = True
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    def blocked_until(self, key: bytes) -> float | None:
        """See `Loader.blocked_until`."""
        until = self._store.cluster.blocked.get(key)
        return until if until is not None and until > asyncio.get_running_loop().time() else None

    async def _whole_call(
        self, faults: Sequence[Fault], deadline: float, items: Sequence[GetItem]
    ) -> ChunkStatus | None:
        """Faults that decide for the whole call; None if the items are to be looked at."""
        if self._closed:
            return ChunkStatus.NOT_ATTEMPTED
        kinds = {fault.kind for fault in faults}
        if FaultKind.UNAVAILABLE in kinds:
            return ChunkStatus.MASTER_FAILED
        if not await _wait(faults, deadline):
            self._write_late(faults, items)
            self._generation += 1
            return ChunkStatus.DEADLINE
        if FaultKind.DIE in kinds:
            self._generation += 1
            return ChunkStatus.WORKER_DIED
        return None

    def _write_late(self, faults: Sequence[Fault], items: Sequence[GetItem]) -> None:
        for fault in faults:
            if fault.kind is not FaultKind.LATE_WRITE:
                continue
            hit = [item for item in items if fault.hits(item.key)]
            if fault.event is None:
                self._garbage(hit)
            else:
                self._late.add(asyncio.create_task(self._garbage_on(fault.event, hit)))

    async def _garbage_on(self, event: asyncio.Event, items: Sequence[GetItem]) -> None:
        await event.wait()
        self._garbage(items)

    def _garbage(self, items: Sequence[GetItem]) -> None:
        for item in items:
            os.pwrite(self._ring.fd, b"\xa5" * item.size, item.offset)

    def _get_one(self, item: GetItem, faults: Sequence[Fault]) -> ChunkStatus:
        self._store.cluster.lease(item.key)
        data = self._store.cluster.objects.get(item.key)
        status = None
        for fault in (fault for fault in faults if fault.hits(item.key)):
            if fault.kind is FaultKind.STATUS:
                return fault.status
            if fault.kind is FaultKind.FOREIGN:
                data = self._store.cluster.objects.get(fault.other_key)
            elif data is None:
                continue
            elif fault.kind is FaultKind.CORRUPT:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
            elif fault.kind is FaultKind.WRONG_SIZE:
                data = data[:-1]
            elif fault.kind is FaultKind.TORN:
                data, status = data[: len(data) // 2], ChunkStatus.PEER_FAILED
        if data is None:
            return ChunkStatus.ABSENT
        if len(data) > item.size:
            return ChunkStatus.BAD_SIZE  # as Mooncake: a destination that is too short stays untouched
        os.pwrite(self._ring.fd, data, item.offset)
        return status or (ChunkStatus.OK if len(data) == item.size else ChunkStatus.BAD_SIZE)

    def _put_one(self, item: PutItem, faults: Sequence[Fault]) -> ChunkStatus:
        cluster = self._store.cluster
        hit = [fault for fault in faults if fault.hits(item.key)]
        for fault in hit:
            if fault.kind is FaultKind.STATUS:
                return fault.status
        if self.blocked_until(item.key) is not None:
            return ChunkStatus.NOT_READY
        if item.key in cluster.objects or any(fault.kind is FaultKind.DISPLACED for fault in hit):
            return ChunkStatus.OK  # the first bytes stay
        if cluster.capacity is not None and cluster.used() + item.size > cluster.capacity:
            return ChunkStatus.FULL
        cluster.objects[item.key] = os.pread(self._ring.fd, item.size, item.offset)
        return ChunkStatus.OK

    def _remove_one(self, key: bytes, faults: Sequence[Fault]) -> ChunkStatus:
        for fault in faults:
            if fault.kind is FaultKind.STATUS and fault.hits(key):
                return fault.status
        return self._store.cluster.remove(key)


class MemoryProber:
    """`Prober` of the fake."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def exists(
        self, prefixes: Sequence[bytes], hashes: bytes, hash_size: int, *, deadline: float
    ) -> NDArray[np.uint8]:
        """See `Prober.exists`."""
        if hash_size <= 0 or len(hashes) % hash_size:
            raise StoreMisuse(f"{len(hashes)} bytes are no whole number of hashes of {hash_size} bytes")
        units = [
            hashes[start : start + hash_size].hex().encode() for start in range(0, len(hashes), hash_size)
        ]
        keys = [prefix + unit for prefix in prefixes for unit in units]
        statuses = await self._ask(Operation.EXISTS, keys, deadline)
        flat = np.fromiter((status is ChunkStatus.OK for status in statuses), dtype=np.uint8, count=len(keys))
        return flat.reshape(len(prefixes), len(units))

    async def exists_keys(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Prober.exists_keys`."""
        check_keys(keys)
        return await self._ask(Operation.EXISTS, keys, deadline)

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """See `Prober.remove`."""
        check_keys(keys)
        return await self._ask(Operation.REMOVE, keys, deadline)

    async def locate(self, keys: Sequence[bytes], *, deadline: float) -> list[ReplicaLocation | None]:
        """See `Prober.locate`. Objects of the fake lie at endpoint "memory", address 0."""
        statuses = await self._ask(Operation.LOCATE, keys, deadline)
        objects = self._store.cluster.objects
        return [
            ReplicaLocation("memory", 0, len(objects[key])) if status is ChunkStatus.OK else None
            for key, status in zip(keys, statuses, strict=True)
        ]

    async def _ask(self, operation: Operation, keys: Sequence[bytes], deadline: float) -> list[ChunkStatus]:
        self._store.record(operation, keys)
        faults = self._store.faults.strike(operation, keys)
        if any(fault.kind is FaultKind.UNAVAILABLE for fault in faults):
            raise StoreUnavailable("the in-memory store was told to be unavailable")
        if not await _wait(faults, deadline):
            raise StoreDeadline(f"{operation} of {len(keys)} keys: no answer by the deadline")
        return [self._ask_one(operation, key, faults) for key in keys]

    def _ask_one(self, operation: Operation, key: bytes, faults: Sequence[Fault]) -> ChunkStatus:
        for fault in faults:
            if fault.kind is FaultKind.STATUS and fault.hits(key):
                return fault.status
        if operation is Operation.REMOVE:
            return self._store.cluster.remove(key)
        self._store.cluster.lease(key)
        return ChunkStatus.OK if key in self._store.cluster.objects else ChunkStatus.ABSENT


class MemoryStore:
    """`Store` of the fake: one per node, sharing a `MemoryCluster`.

    Attributes:
        cluster: the objects.
        faults: see `inject`.
        calls: every call in order of arrival.
        put_discard_timeout: seconds for which the keys of a put that hung or died stay blocked.
    """

    def __init__(self, cluster: MemoryCluster | None = None, *, put_discard_timeout: float = 30.0) -> None:
        self.cluster = cluster or MemoryCluster()
        self.faults = _Faults()
        self.calls: list[Call] = []
        self.put_discard_timeout = put_discard_timeout
        self._prober = MemoryProber(self)
        self._loaders: list[MemoryLoader] = []

    @property
    def prober(self) -> MemoryProber:
        """See `Store.prober`."""
        return self._prober

    @property
    def segment(self) -> SegmentInfo | None:
        """The fake has no segment, so nothing of it can be read directly."""
        return None

    def inject(self, fault: Fault) -> Fault:
        """Arm a fault; faults strike in the order in which they were armed."""
        self.faults.armed.append(fault)
        return fault

    def clear_faults(self) -> None:
        """Disarm all faults."""
        self.faults.armed.clear()

    def record(self, operation: Operation, keys: Sequence[bytes]) -> None:
        """Note a call."""
        self.calls.append(Call(operation, tuple(keys)))

    async def start(self) -> None:
        """See `Store.start`."""

    async def wait_ready(self, *, deadline: float) -> bool:
        """See `Store.wait_ready`; True at once."""
        return asyncio.get_running_loop().time() <= deadline

    async def stop(self, *, deadline: float) -> None:
        """See `Store.stop`."""
        async with asyncio.timeout_at(deadline):
            for loader in self._loaders:
                await loader.close()

    async def open_loader(self, ring: RingLike) -> MemoryLoader:
        """See `Store.open_loader`."""
        loader = MemoryLoader(self, ring, len(self._loaders))
        self._loaders.append(loader)
        return loader

    def health(self) -> StoreHealth:
        """See `Store.health`; reachable unless an `UNAVAILABLE` fault is armed."""
        down = any(fault.kind is FaultKind.UNAVAILABLE and fault.times != 0 for fault in self.faults.armed)
        pids = {
            f"loader-{index}": pid for index, one in enumerate(self._loaders) if (pid := one.pid) is not None
        }
        return StoreHealth(
            last_success_age=None if down else 0.0,
            master_reachable=not down,
            segment_mounted_bytes=0,
            pids=pids,
            restarts={},
        )
