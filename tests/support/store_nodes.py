"""Stores of ours in tests: a ring whose every byte is accounted for, and a node of store, loader and ring."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool_agent.store.loader import MooncakeLoader
from kvpool_agent.store.mooncake_store import MooncakeStore
from kvpool_agent.store.protocol import ChunkStatus, GetItem
from kvpool_agent.store.segment import sealed_memory

RING = 32 << 20
PATTERN = b"\x5a"


@dataclass
class Ring:
    """A ring as the agent makes it, filled with a pattern, with checks on what changed."""

    size: int = RING
    fd: int = -1
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self.fd = sealed_memory("kvpool-ring", self.size)
        self.memory = mmap.mmap(self.fd, self.size)
        self.memory[:] = PATTERN * self.size

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)

    def at(self, item: GetItem) -> bytes:
        return self.memory[item.offset : item.offset + item.size]

    def snapshot(self) -> bytes:
        return self.memory[:]

    def untouched_outside(self, items: list[GetItem]) -> bool:
        position = 0
        for item in sorted(items, key=lambda one: one.offset):
            gap = item.offset - position
            if self.memory[position : item.offset] != PATTERN * gap:
                return False
            position = item.offset + item.size
        return self.memory[position:] == PATTERN * (self.size - position)


@dataclass
class Node:
    """One store of ours with one loader on one ring."""

    store: MooncakeStore
    loader: MooncakeLoader
    ring: Ring

    async def get(self, items: list[GetItem], seconds: float = 10.0) -> list[ChunkStatus]:
        return await self.loader.get(items, deadline=now() + seconds)


def now() -> float:
    return asyncio.get_running_loop().time()


def layout(objects: dict[bytes, bytes], *, gap: int = 64, start: int = 128) -> list[GetItem]:
    """Destinations in the ring with gaps between them, so that a neighbour that is hit shows."""
    items = []
    for key, data in objects.items():
        items.append(GetItem(key, start, len(data)))
        start += len(data) + gap
    return items


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll something that has no event."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 -- processes and masters have no asyncio.Event
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {what}") from None
