"""The hybrid engine of `support.hybrid_engine`, attached by the client library: a scheduler and one rank per mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool_engine.aio import SchedulerClient, WorkerClient
from kvpool_engine.link import Backoff
from kvpool_engine.plan import Plan
from kvpool_engine.shm import SealedStorage
from kvpool_engine.tensors import Declaration, declare
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import ChunkFailure, Mode, TransferResult
from support import hybrid_engine as model

FAST = Backoff(first=0.02, longest=0.1, refused=0.2, attach_timeout=20.0)
LAYER_NAMES = [name for names in model.LAYERS.values() for name in names]
BEFORE = 0xA5


@dataclass
class Memory:
    """One rank's tensors, one per layer: [block, kv, token, head, content]."""

    shard: int
    storage: SealedStorage
    layers: dict[str, NDArray[Any]]
    declaration: Declaration

    @classmethod
    def create(cls, shard: int, *, shared: bool) -> Memory:
        size = model.BLOCKS * model.LAYER_BYTES
        storage = SealedStorage.create(len(LAYER_NAMES) * size)
        layers = {
            name: storage.numpy((model.BLOCKS, *model.SHAPE), np.float16, offset=place * size)
            for place, name in enumerate(LAYER_NAMES)
        }
        declaration = declare(
            model.identity(),
            layers,
            rank=shard,
            shards=[shard, shard],
            null_blocks=[0, 0],
            shared=(storage,) if shared else (),
        )
        memory = cls(shard, storage, layers, declaration)
        memory.scribble()
        return memory

    def read(self, group: int, block: int) -> bytes:
        return b"".join(self.layers[name][block].tobytes() for name in model.LAYERS[group])

    def scribble(self) -> None:
        """Forget all content."""
        self.storage.numpy((self.storage.size,), np.uint8)[:] = BEFORE

    def write(self, group: int, block: int, content: bytes) -> None:
        flat = np.frombuffer(content, np.float16).reshape(len(model.LAYERS[group]), *model.SHAPE)
        for name, one in zip(model.LAYERS[group], flat, strict=True):
            self.layers[name][block] = one


@dataclass
class LibraryEngine:
    """One engine on one agent."""

    scheduler: SchedulerClient
    ranks: list[WorkerClient]
    memories: list[Memory]

    async def lookup(self, prompt: str, units: int, **options: Any) -> Plan:
        return await self.scheduler.lookup(
            prompt, model.hashes(prompt, units), units * model.BLOCK, **options
        )

    async def save(self, prompt: str, units: int, blocks: Sequence[int]) -> list[TransferResult]:
        chain = model.hashes(prompt, units)
        for memory in self.memories:
            for unit, block in enumerate(blocks):
                for group in model.LAYERS:
                    memory.write(group, block, model.payload(chain[unit], group, memory.shard))
        end = units * model.BLOCK
        return [await (await rank.save(prompt, chain, 0, end, [blocks, blocks])) for rank in self.ranks]

    async def begin(self, prompt: str, plan: Plan, blocks: Sequence[int], **options: Any) -> list[Transfer]:
        return [await rank.load(prompt, plan, 0, [blocks, blocks], **options) for rank in self.ranks]

    def check(
        self,
        prompt: str,
        plan: Plan,
        blocks: Sequence[int],
        *,
        units: int,
        failed: Sequence[Iterable[ChunkFailure]] | None = None,
    ) -> None:
        """Every byte of every rank, see `check_memory`; `failed` per rank, none by default."""
        for memory, lost in zip(self.memories, failed or [()] * len(self.memories), strict=True):
            check_memory(memory, prompt, plan, blocks, units=units, failed=lost)


def check_memory(
    memory: Memory,
    prompt: str,
    plan: Plan,
    blocks: Sequence[int],
    *,
    units: int,
    failed: Iterable[ChunkFailure] = (),
) -> None:
    """Every byte of a rank: loaded blocks hold the prompt's content, all others what they held before.

    Chunks that failed count as not loaded: right for what was never begun, too strict for what was torn on the way.
    """
    chain = model.hashes(prompt, units)
    lost = {(one.group, one.chunk) for one in failed}
    for group, mask in enumerate(plan.masks):
        loaded = {
            blocks[chunk]: chunk for chunk in np.flatnonzero(mask).tolist() if (group, chunk) not in lost
        }
        for block in range(model.BLOCKS):
            found = memory.read(group, block)
            wanted = bytes([BEFORE]) * len(found)
            if block in loaded:
                wanted = model.payload(chain[loaded[block]], group, memory.shard)
            assert found == wanted, f"group {group} block {block} of shard {memory.shard}"


async def attach(stack: AsyncExitStack, folder: Path, name: str, modes: Sequence[Mode]) -> LibraryEngine:
    scheduler = SchedulerClient(folder, model.identity(), name, backoff=FAST)
    stack.push_async_callback(scheduler.close)
    engine = LibraryEngine(scheduler, [], [])
    for shard, mode in enumerate(modes):
        memory = Memory.create(shard, shared=mode is Mode.MAPPED)
        rank = WorkerClient(folder, model.identity(), name, memory.declaration, mode=mode, backoff=FAST)
        stack.push_async_callback(rank.close, deadline=1.0)
        engine.memories.append(memory)
        engine.ranks.append(rank)
        await rank.connect(20)
    await scheduler.connect(20)
    return engine
