"""The only module that imports Mooncake. It runs in worker processes.

Promises: no call reaches a client that was not set up or is being closed (Mooncake would crash the process); no null
or foreign address reaches it (it would report success, or crash); exactly the safe variants of its calls are used.
Refuses: forced removal, `prefer_alloc_in_same_node`, put sessions, snapshots, metadata servers. Each has been seen to
deliver wrong bytes as a success; none can be reached through this class.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpool_agent.store.errors import StoreError, StoreMisuse
from kvpool_agent.store.protocol import ReplicaLocation


class SetupFailedError(StoreError):
    """Mooncake did not come up. It says only -600, the reason is in its log (stderr of the worker)."""


class MooncakeClient:
    """One Mooncake client without a segment of its own.

    Thread-safe but for `close`, which waits for the calls inside.
    """

    def __init__(self, setup: Mapping[str, str | int]) -> None:
        """Set up the client; takes 4.3 s against a dead master, with the GIL held.

        Raises:
            SetupFailedError: Mooncake is not installed or refused.
        """
        try:
            from mooncake.store import (  # noqa: PLC0415 -- loading it brings the library up; only here
                MooncakeDistributedStore,
                ReplicateConfig,
            )
        except ImportError as error:
            raise SetupFailedError(
                f"cannot import Mooncake ({error}): install the extra agent-cpu, or agent on a host with libcuda"
            ) from error
        if not setup["master_server_addr"]:
            raise SetupFailedError("no master address: Mooncake would crash")
        self._store: Any = MooncakeDistributedStore()
        self._replication: Any = ReplicateConfig()
        code = self._store.setup(**setup)
        if code != 0:
            raise SetupFailedError(
                f"setup of {setup['local_hostname']} at master {setup['master_server_addr']} over {setup['protocol']} "
                f"failed ({code}): is the master up, and is there a device for this protocol?"
            )
        self._open = True
        self._inside = 0
        self._idle = threading.Condition()
        self._regions: list[tuple[int, int]] = []

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """Count callers, so that `close` never runs under one of them."""
        with self._idle:
            if not self._open:
                raise StoreMisuse("the Mooncake client is closed")
            self._inside += 1
        try:
            yield self._store
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()

    def register(self, address: int, size: int) -> None:
        """Make [address, address + size) usable for `get` and `put`."""
        with self._call() as store:
            code = store.register_buffer(address, size)
        if code != 0:
            raise SetupFailedError(
                f"registering {size} bytes failed ({code}): check the memlock limit and the device"
            )
        self._regions.append((address, size))

    def mount(self, path: str, size: int, *, protocol: str) -> list[str]:
        """Mount a file as a segment; returns the ids to unmount it by."""
        with self._call() as store:
            answer = store.mount_segment(path, size, 0, protocol, "")
        if answer.get("ret") != 0:
            raise SetupFailedError(f"mounting a segment of {size} bytes failed: {answer}")
        return [str(one) for one in answer["segment_ids"]]

    def unmount(self, segments: Sequence[str]) -> int:
        """Take the segments out of the pool; 0 if the master heard of it."""
        with self._call() as store:
            return int(store.unmount_segment(list(segments), 0))

    def exist(self, keys: list[str]) -> list[int]:
        """1 present, 0 absent, negative: a code. Takes a lease on every key found."""
        with self._call() as store:
            return self._complete(store.batch_is_exist(keys), keys)

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Bytes delivered, or a code, per key. Keys are distinct."""
        self._check(keys, addresses, sizes)
        with self._call() as store:
            return self._complete(store.batch_get_into(keys, addresses, sizes), keys)

    def put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """0, or a code, per key. Keys are distinct."""
        self._check(keys, addresses, sizes)
        with self._call() as store:
            return self._complete(store.batch_put_from(keys, addresses, sizes, self._replication), keys)

    def remove(self, keys: list[str]) -> list[int]:
        """0, or a code, per key; never by force, so a leased key stays (-706)."""
        with self._call() as store:
            return self._complete(store.batch_remove(keys), keys)

    def locate(self, keys: list[str]) -> list[ReplicaLocation | None]:
        """First complete memory replica of each key. A master that does not answer looks like "none has any"."""
        with self._call() as store:
            found: dict[str, list[Any]] = store.batch_get_replica_desc(keys)
        return [_first_in_memory(found.get(key, ())) for key in keys]

    def close(self) -> None:
        """Wait for the calls inside, then close. Idempotent."""
        with self._idle:
            if not self._open:
                return
            self._open = False
            self._idle.wait_for(lambda: self._inside == 0)
        self._store.close()

    def _check(self, keys: list[str], addresses: list[int], sizes: list[int]) -> None:
        """The last guard before Mooncake: distinct keys, and addresses inside what was registered."""
        if len(set(keys)) != len(keys):
            raise StoreMisuse("a key twice in one batch: Mooncake fills only one of the destinations")
        for address, size in zip(addresses, sizes, strict=True):
            if size <= 0 or not any(
                base <= address and address + size <= base + length for base, length in self._regions
            ):
                raise StoreMisuse(f"{size} bytes at {address:#x} lie outside the registered memory")

    @staticmethod
    def _complete(codes: Sequence[int], keys: Sequence[str]) -> list[int]:
        if len(codes) != len(keys):
            raise StoreError(f"Mooncake answered {len(codes)} of {len(keys)} keys")
        return list(codes)


def _first_in_memory(replicas: Sequence[Any]) -> ReplicaLocation | None:
    for replica in replicas:
        if replica.is_memory_replica() and str(replica.status).endswith("COMPLETE"):
            buffer = replica.get_memory_descriptor().buffer_descriptor
            return ReplicaLocation(
                str(buffer.transport_endpoint), int(buffer.buffer_address), int(buffer.size)
            )
    return None
