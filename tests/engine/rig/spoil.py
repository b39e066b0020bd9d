"""What a test puts between vLLM and the connector: digests, poison, a gate before loads, faults on purpose.

Test-only: the product has no such switch. KVPOOL_TEST_DOUBLE_PRUNE=1 (or the switch `double_prune`) puts the bug back
that the project exists for: the receiving side shortens the hit a second time, and the last block is never loaded.
"""

import hashlib
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvpool_engine.plan import Plan
from kvpool_engine.storages import HostStorage
from kvpool_engine.vllm.messages import LoadJob, SaveJob

if TYPE_CHECKING:
    from engine.rig.driver import Channel, Driver

POISON: Final = 0xEE
"""No computation leaves this byte everywhere; as float32 it is -3.7e28, so a block read unloaded ruins the answer."""


@dataclass(slots=True)
class Switches:
    """What goes wrong on purpose."""

    double_prune: bool = os.environ.get("KVPOOL_TEST_DOUBLE_PRUNE") == "1"
    zero_block: bool = False
    """The control: one loaded block of each request is zeroed after its load."""
    gate: bool = False
    """Say so before a load begins and wait."""
    slow_gather: float = 0.0
    """Seconds that reading one block for a save takes longer."""


class Probe:
    """Wraps the worker's side of the connector."""

    def __init__(self, driver: "Driver", channel: "Channel") -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._driver = driver
        self._channel = channel
        self._worker = get_kv_transfer_group().worker
        self._switches = Switches()
        self._saved: dict[str, list[str]] = {}
        self._loaded: list[tuple[str, str]] = []
        self._unloaded = 0
        self._first: dict[str, str] = {}
        self._wrap()

    def _wrap(self) -> None:
        worker = self._worker
        self._save, self._load, self._judge = worker.save, worker.load, worker._judge
        worker.save, worker.load, worker._judge = self.save, self.load, self.judge
        gather = HostStorage.gather

        def slow(storage: HostStorage, *where: Any) -> None:
            if self._switches.slow_gather:
                time.sleep(self._switches.slow_gather)  # noqa: TID251 - the fault itself
            gather(storage, *where)

        HostStorage.gather = slow  # type: ignore[method-assign, assignment]

    def switch(self, **switches: Any) -> None:
        """Set some switches."""
        self._switches = replace(self._switches, **switches)

    def clients(self) -> list[Any]:
        """Both clients of the connector, as far as they exist."""
        return [one for one in (self._worker._client, self._driver.connector.scheduler._client) if one]

    def counts(self) -> dict[str, int]:
        """What both sides have counted since the start."""
        return dict(self._driver.connector.scheduler.counts.total + self._worker.counts.total)

    def take(self) -> dict[str, Any]:
        """Digests since the last call, by the hash of the unit that closes the block."""
        taken = {
            "saved": self._saved,
            "loaded": self._loaded,
            "first": self._first,
            "unloaded": self._unloaded,
        }
        self._saved, self._loaded, self._first, self._unloaded = {}, [], {}, 0
        return taken

    # ------------------------------------------------------------------------------------------------ hooks

    def save(self, jobs: tuple[SaveJob, ...]) -> None:
        """Digest what is about to be saved."""
        for job in jobs:
            size = job.hash_size
            for place, block in enumerate(job.blocks, start=job.start // self._block_size):
                name = job.hashes[place * size : (place + 1) * size].hex()
                self._saved.setdefault(name, []).append(self._digest(block))
                self._first[name] = self._bytes(block)[:48].hex()
        self._save(jobs)

    def load(self, jobs: tuple[LoadJob, ...]) -> None:
        """Poison what is about to be loaded, and every other block that nobody owns."""
        if jobs:
            self.poison_free()
            for job in jobs:
                self._fill(job.blocks, POISON)
        if jobs and self._switches.gate:
            self._channel.send({"event": "load"})
            self._channel.wait()
        if self._switches.double_prune:
            jobs = tuple(self._pruned_again(job) for job in jobs)
        self._load(jobs)

    def judge(self, job: LoadJob, future: Any, outcome: Any) -> None:
        """Digest what has arrived."""
        self._judge(job, future, outcome)
        if job.request_id in outcome.failed:
            return
        message = Plan.from_bytes(job.plan).message if job.plan else None
        first = job.start // self._block_size
        good = [
            (place, block)
            for place, block in enumerate(job.blocks, start=first)
            if block not in outcome.invalid
        ]
        for place, block in good:
            if message is not None:
                size = message.hash_size
                name = message.hashes[place * size : (place + 1) * size].hex()
                self._loaded.append((name, self._digest(block)))
            self._unloaded += bool((np.frombuffer(self._bytes(block), np.uint8) == POISON).all())
        if self._switches.zero_block and good:
            self._fill([good[len(good) // 2][1]], 0)

    # ----------------------------------------------------------------------------------------------- memory

    @property
    def _block_size(self) -> int:
        return int(self._worker._block_size)

    def poison_free(self) -> None:
        """Fill every block that nobody owns and that vLLM's own prefix cache does not keep."""
        pool = self._driver.scheduler.kv_cache_manager.block_pool
        free = [
            block.block_id
            for block in pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
        ]
        self._fill(free, POISON)

    def outwait_saves(self, seconds: float = 5.0) -> None:
        """Hold this step up until the saves under way have read what they read, as a long forward pass would."""
        deadline = time.monotonic() + seconds
        while any(not running.future.done() for _, running in self._worker._saves.values()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)  # noqa: TID251 - the fault itself

    def _fill(self, blocks: Any, value: int) -> None:
        for cache in self._driver.caches:
            for block in blocks:
                cache[block].view(dtype=_uint8()).fill_(value)

    def _bytes(self, block: int) -> bytes:
        return b"".join(
            cache[block].contiguous().view(dtype=_uint8()).numpy().tobytes() for cache in self._driver.caches
        )

    def _digest(self, block: int) -> str:
        return hashlib.sha256(self._bytes(block)).hexdigest()[:24]

    def _pruned_again(self, job: LoadJob) -> LoadJob:
        """The original bug: whoever receives the plan believes that its hit was not pruned yet."""
        message = Plan.from_bytes(job.plan).message
        if message.hit_length - self._block_size <= job.start:
            return job
        message.hit_length -= self._block_size
        group = message.groups[0]
        group.blocks -= 1
        bits = np.unpackbits(np.frombuffer(group.mask, np.uint8), count=group.blocks, bitorder="little")
        group.mask = np.packbits(bits, bitorder="little").tobytes()
        return replace(job, plan=message.SerializeToString(), blocks=job.blocks[:-1])


def _uint8() -> Any:
    import torch

    return torch.uint8
