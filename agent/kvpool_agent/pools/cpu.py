"""A mapped pool in shared memory: blocks of a CPU engine that were placed on sealed memory files.

Promises what `pool.MappedPool` does; each copy is one NumPy assignment per part of the layout, without the GIL.
Refuses: storages that are not sealed files of the declared size, and layouts without parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvpool_agent.pools.memory import SealedMemory
from kvpool_agent.pools.pool import Gate, PoolError, check_copy
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.layout import WorkerLayout
from kvpool_wire.strides import Part

_Array = NDArray[np.unsignedinteger]


class MappedCpuPool:
    """`MappedPool` over memory files."""

    def __init__(self, layout: WorkerLayout, storages: Sequence[SealedMemory]) -> None:
        """Take over `storages`, one per storage of the layout, in its order.

        Raises:
            PoolError: they are not what the layout declares; the caller still owns them.
        """
        if not layout.storages:
            raise PoolError("the worker declared no storages: there is nothing to map, use copy mode")
        if len(storages) != len(layout.storages):
            raise PoolError(
                f"{len(storages)} memory files for {len(layout.storages)} storages; one each is needed"
            )
        for index, (memory, declared) in enumerate(zip(storages, layout.storages, strict=True)):
            if declared.device != pb.CPU:
                raise PoolError(f"storage {index} is not on the CPU")
            if memory.size < declared.size:
                raise PoolError(f"storage {index} has {memory.size} bytes, declared were {declared.size}")
        self._layout = layout
        self._storages = tuple(storages)
        self._gate = Gate()
        # By group and part, the block axis first: indexing by a block is all that a copy has to work out.
        self._blocks: tuple[tuple[_Array, ...], ...] = tuple(
            tuple(_all_blocks(part, group.num_blocks, storages[part.storage].view) for part in group.parts)
            for group in layout.groups
        )

    @classmethod
    def open(cls, layout: WorkerLayout, fds: Sequence[int]) -> Self:
        """Map one descriptor per storage; the caller keeps and closes its descriptors.

        Raises:
            PoolError: a file is not sealed, too short, or not what the layout declares; nothing stays mapped.
        """
        if len(fds) != len(layout.storages):
            raise PoolError(f"{len(fds)} descriptors for {len(layout.storages)} storages; one each is needed")
        mapped: list[SealedMemory] = []
        try:
            for index, (fd, declared) in enumerate(zip(fds, layout.storages, strict=True)):
                try:
                    mapped.append(SealedMemory.map_foreign(fd, declared.size))
                except PoolError as error:
                    raise PoolError(f"storage {index}: {error}") from error
            return cls(layout, mapped)
        except PoolError:
            for memory in mapped:
                memory.close()
            raise

    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool.scatter`."""
        parts = check_copy(self._layout, group, block, payload).parts
        with self._gate.inside():
            _scatter(parts, self._blocks[group], block, payload)

    def gather(self, group: int, block: int, payload: memoryview) -> None:
        """See `MappedPool.gather`."""
        parts = check_copy(self._layout, group, block, payload).parts
        if payload.readonly:
            raise PoolError("gather needs a writable payload")
        with self._gate.inside():
            _gather(parts, self._blocks[group], block, payload)

    def wait_ordering(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """A CPU engine's computation is over when it calls; only a proof of another kind is an error."""
        del give_up
        if ordering.WhichOneof("proof") == "cuda_event":
            raise PoolError("a CUDA event orders nothing in CPU memory; send `synchronised` instead")

    def close(self) -> None:
        """See `MappedPool.close`."""
        if self._gate.close():
            self._blocks = ()  # arrays hold the mapping
            for memory in self._storages:
                memory.close()


# Functions of their own, so that no name holds an array, and with it the mapping, once the gate has been left.
def _scatter(parts: Sequence[Part], blocks: Sequence[_Array], block: int, payload: memoryview) -> None:
    for part, in_pool in zip(parts, blocks, strict=True):
        in_pool[block, ...] = _in_chunk(part, in_pool.dtype, payload)


def _gather(parts: Sequence[Part], blocks: Sequence[_Array], block: int, payload: memoryview) -> None:
    for part, in_pool in zip(parts, blocks, strict=True):
        _in_chunk(part, in_pool.dtype, payload)[...] = in_pool[block]


def _all_blocks(part: Part, num_blocks: int, storage: memoryview) -> _Array:
    shape, strides = (num_blocks, *part.shape), (part.block_stride, *part.strides)
    return np.ndarray(shape, np.dtype(f"u{part.itemsize}"), storage, part.offset, strides)


def _in_chunk(part: Part, dtype: np.dtype[np.unsignedinteger], payload: memoryview) -> _Array:
    return np.ndarray(part.shape, dtype, payload, part.chunk_offset, part.chunk_strides)
