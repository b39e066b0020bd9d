"""The ring: staging memory of one worker session, cut into equal slots.

One slot holds the largest chunk of the session's layout with its trailer. Promises: no slot is given out twice; who
asks first is served first; a slot in quarantine is not given out before the process that might still write it is gone;
what cannot be given by the deadline is not given (BOUNDED). Refuses: to know what lies in a slot. Event loop only;
`view` may be used from any thread.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool_agent.transfer.errors import RingBroken

ALIGNMENT: Final = 64
"""Bytes: a cache line, so that two slots never share one."""


class RingMemory(Protocol):
    """Sealed shared memory that the agent created; `pools.memory.SealedMemory` in the agent."""

    @property
    def fd(self) -> int:
        """Descriptor of the memory file."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def view(self) -> memoryview:
        """The whole memory, writable."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    count: int
    granted: "asyncio.Future[list[int]]"


class Ring:
    """Slots of one session's staging memory."""

    def __init__(self, memory: RingMemory, *, chunk_bytes: int) -> None:
        """Cut `memory` into slots.

        Args:
            memory: the session's ring.
            chunk_bytes: the largest chunk with its trailer (`WorkerLayout.max_chunk_bytes`).

        Raises:
            ValueError: not even one chunk fits.
        """
        self._memory = memory
        self.slot_bytes: Final = -(-chunk_bytes // ALIGNMENT) * ALIGNMENT
        self.slots: Final = memory.size // self.slot_bytes if chunk_bytes > 0 else 0
        if self.slots < 1:
            raise ValueError(
                f"a ring of {memory.size} bytes holds no chunk of {chunk_bytes} bytes; make it at least "
                f"{self.slot_bytes} bytes, better 128 times that (segment.ringSize)"
            )
        self._free: deque[int] = deque(slot * self.slot_bytes for slot in range(self.slots))
        self._taken: set[int] = set()
        self._quarantined: set[int] = set()
        self._waiters: deque[_Waiter] = deque()
        self._broken: str | None = None

    @property
    def fd(self) -> int:
        """Descriptor of the memory file, for the store."""
        return self._memory.fd

    @property
    def size(self) -> int:
        """Bytes."""
        return self._memory.size

    @property
    def free_slots(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    @property
    def quarantined_slots(self) -> int:
        """Slots that a process of the store might still write."""
        return len(self._quarantined)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` bytes from `offset` on, writable."""
        return self._memory.view[offset : offset + nbytes]

    async def take(self, count: int, *, deadline: float) -> list[int]:
        """Offsets of `count` slots, first come, first served.

        Raises:
            ValueError: the ring has fewer slots.
            TimeoutError: not by the deadline.
            RingBroken: the ring is not used any more.
        """
        if not 0 < count <= self.slots:
            raise ValueError(f"{count} slots of a ring of {self.slots}")
        self._check_whole()
        waiter = _Waiter(count, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(waiter.granted)
        except BaseException:
            self._withdraw(waiter)
            raise

    def free(self, offsets: Iterable[int]) -> None:
        """Give slots back."""
        for offset in offsets:
            self._taken.remove(offset)
            self._free.append(offset)
        self._serve()

    def quarantine(self, offsets: Iterable[int]) -> None:
        """Keep slots back until `settle`: a process of the store might still write them.

        A failure code does not mean that the destination is quiet: a frozen peer may write it when it wakes.
        """
        for offset in offsets:
            self._taken.remove(offset)
            self._quarantined.add(offset)

    def settle(self) -> None:
        """Every process that was ever given work on this ring is gone: what is in quarantine is quiet now.

        Not by the loader's generation: a new process starts while the one before it may still be leaving.
        """
        self._free.extend(self._quarantined)
        self._quarantined.clear()
        self._serve()

    def retire(self, reason: str) -> None:
        """Never give out a slot again: a process that may still write the ring could not be reaped."""
        self._broken = reason
        while self._waiters:
            granted = self._waiters.popleft().granted
            if not granted.done():
                granted.set_exception(RingBroken(reason))

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RingBroken(self._broken)

    def _serve(self) -> None:
        if self._broken is not None:
            return
        while self._waiters and self._waiters[0].count <= len(self._free):
            waiter = self._waiters.popleft()
            offsets = [self._free.popleft() for _ in range(waiter.count)]
            self._taken.update(offsets)
            waiter.granted.set_result(offsets)

    def _withdraw(self, waiter: _Waiter) -> None:
        """The caller does not wait any more; what was granted meanwhile goes back."""
        granted = waiter.granted
        if not granted.done():
            self._waiters.remove(waiter)
            granted.cancel()
            self._serve()
        elif not granted.cancelled() and granted.exception() is None:
            self.free(granted.result())
