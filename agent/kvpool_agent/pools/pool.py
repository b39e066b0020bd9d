"""What a mapped pool is: the blocks of one rank, which this process reads and writes itself.

Promises: a copy touches the bytes of its own block and group and no other; copies run in several threads at once and
release the GIL; after `close` has returned no byte of the engine is touched any more (FENCED).
Refuses: to know which block may be touched when. Fences, busy blocks and verification are the transfers' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import GroupLayout, WorkerLayout


class PoolError(RuntimeError):
    """Engine memory that cannot be mapped, reached or copied; the message says what, where and how to mend it."""


@dataclass(frozen=True, slots=True)
class MoveItem:
    """One chunk on its way between a block and the ring.

    Attributes:
        group: index of the group.
        block: id of the block in the engine's pool.
        offset: byte of the ring where the chunk (payload, then the 64 bytes of trailer) begins.
    """

    group: int
    block: int
    offset: int


class MappedPool(Protocol):
    """Copies between blocks and chunks; all methods are synchronous, thread-safe and called from worker threads."""

    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        """Write a chunk's payload into a block.

        Args:
            group: index of a group that this rank holds.
            block: id of the block.
            payload: contiguous bytes, `GroupLayout.payload_bytes` of them, without the trailer.

        Raises:
            PoolError: wrong group, block or length (nothing was touched); the device failed; the pool is closed.
        """
        ...

    def gather(self, group: int, block: int, payload: memoryview) -> None:
        """Read a block into a chunk's payload; arguments and errors as of `scatter`."""
        ...

    def wait_ordering(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """Return when the engine's kernels have left the blocks that the next copies touch.

        Args:
            ordering: the engine's proof.
            give_up: asked again and again while the call waits; True ends it (BOUNDED: an event may never happen).

        Raises:
            PoolError: the proof is missing or cannot be used, or `give_up` said True first.
        """
        ...

    def close(self) -> None:
        """Wait for the copies under way, then unmap. Later calls raise; closing again does nothing."""
        ...


def check_copy(layout: WorkerLayout, group: int, block: int, payload: memoryview) -> GroupLayout:
    """The group's layout, if a copy of this block makes sense.

    Raises:
        PoolError: naming the argument that is wrong.
    """
    if not 0 <= group < len(layout.groups) or layout.groups[group].shard is None:
        raise PoolError(f"group {group} is none that this rank holds")
    found = layout.groups[group]
    if not 0 <= block < found.num_blocks or block == found.null_block:
        raise PoolError(
            f"block {block} of group {group}: blocks 0 to {found.num_blocks - 1} can be copied, the null block"
            f" {found.null_block} cannot"
        )
    if payload.nbytes != found.payload_bytes or not payload.c_contiguous:
        raise PoolError(
            f"a chunk of group {group} has {found.payload_bytes} contiguous bytes, got {payload.nbytes}"
        )
    return found


class Gate:
    """Lets copies in until it is closed; closing waits until the last one has left (FENCED)."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._inside = 0
        self._open = True

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Hold the gate open for one copy.

        Raises:
            PoolError: it is closed.
        """
        with self._changed:
            if not self._open:
                raise PoolError("the pool is closed: its engine has detached")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more and wait for those inside; True for the first caller."""
        with self._changed:
            first, self._open = self._open, False
            self._changed.wait_for(lambda: self._inside == 0)
            return first
