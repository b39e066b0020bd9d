"""A small hybrid engine: full attention plus a sliding window, EAGLE on the first, two ranks; content by key and place.

Its memory is one sealed file per rank; `expected` says what a block has to hold, without any of the product's code.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool_wire import agent_pb2 as pb

BLOCK = 16
LAYERS = {0: ("full.0", "full.1"), 1: ("window.0", "window.1", "window.2")}
SHAPE = (2, BLOCK, 2, 8)  # kv, token, head, content; float16 of one shard
LAYER_BYTES = 2 * int(np.prod(SHAPE))
WINDOW = 40
BLOCKS = 64


def identity(model: str = "hybrid") -> pb.Identity:
    """What every session of the engine says."""
    form = pb.TensorFormat(dtype="float16", axes=["kv", "token", "head", "content"], shape=SHAPE)
    groups = [
        pb.Group(kind=pb.FULL_ATTENTION, block_size=BLOCK, eagle=True, shards_per_stage=2),
        pb.Group(kind=pb.SLIDING_WINDOW, block_size=BLOCK, sliding_window=WINDOW, shards_per_stage=2),
    ]
    for index, group in enumerate(groups):
        group.layers.extend(pb.Layer(name=name, tensors=[form]) for name in LAYERS[index])
    return pb.Identity(
        model=model,
        fingerprint="f1",
        engine="test 1",
        hash_algorithm="sha256",
        hash_seed=b"0" * 32,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        use_eagle=True,
        groups=groups,
    )


def hashes(name: str, units: int) -> list[bytes]:
    """A request's hash chain."""
    chain, last = [], b"seed"
    for unit in range(units):
        last = hashlib.sha256(last + name.encode() + unit.to_bytes(4, "big")).digest()
        chain.append(last)
    return chain


def payload(unit_hash: bytes, group: int, shard: int) -> bytes:
    """A chunk's content: decided by its key and place alone."""
    size = len(LAYERS[group]) * LAYER_BYTES
    return hashlib.shake_128(unit_hash + bytes([group, shard])).digest(size)


def sealed(size: int) -> int:
    """A sealed memory file."""
    fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@dataclass
class Rank:
    """One rank's memory: per group [layers, blocks, block bytes], groups one after the other."""

    shard: int
    mode: pb.Mode.ValueType = pb.MAPPED
    fd: int = field(init=False)
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        size = sum(len(names) for names in LAYERS.values()) * BLOCKS * LAYER_BYTES
        self.fd = sealed(size)
        self.memory = mmap.mmap(self.fd, size)
        self.scribble(b"\xa5")

    def scribble(self, byte: bytes) -> None:
        """Fill everything with one byte."""
        self.memory[:] = byte * len(self.memory)

    def group(self, index: int) -> NDArray[np.uint8]:
        """Shape (layers, blocks, bytes of one layer's block), a view."""
        whole = np.frombuffer(self.memory, np.uint8)
        first = sum(len(LAYERS[one]) for one in range(index)) * BLOCKS * LAYER_BYTES
        size = len(LAYERS[index]) * BLOCKS * LAYER_BYTES
        return whole[first : first + size].reshape(len(LAYERS[index]), BLOCKS, LAYER_BYTES)

    def read(self, index: int, block: int) -> bytes:
        """A block's payload, layer by layer."""
        return self.group(index)[:, block].tobytes()

    def write(self, index: int, block: int, content: bytes) -> None:
        """The other way round."""
        self.group(index)[:, block] = np.frombuffer(content, np.uint8).reshape(len(LAYERS[index]), -1)

    def worker(self) -> pb.Worker:
        """What the rank declares."""
        declared = pb.Worker(
            rank=self.shard,
            shards=[self.shard, self.shard],
            storages=[pb.Storage(size=len(self.memory), device=pb.CPU)],
            num_blocks=[BLOCKS, BLOCKS],
            null_blocks=[0, 0],
            mode=self.mode,
        )
        offset = 0
        strides = [LAYER_BYTES]
        for extent in SHAPE:
            strides.append(strides[-1] // extent)
        for index, names in LAYERS.items():
            for name in names:
                declared.tensors.add(
                    group=index,
                    layer=name,
                    offset=offset,
                    shape=(BLOCKS, *SHAPE),
                    strides=strides,
                    block_axis=0,
                )
                offset += BLOCKS * LAYER_BYTES
        return declared

    def copy(self, ring: mmap.mmap, wanted: pb.CopyWanted) -> None:
        """Copy mode: do what the agent asks."""
        for item in wanted.items:
            size = len(LAYERS[item.group]) * LAYER_BYTES
            if wanted.kind == pb.LOAD:
                self.write(item.group, item.block, ring[item.offset : item.offset + size])
            else:
                ring[item.offset : item.offset + size] = self.read(item.group, item.block)

    def close(self) -> None:
        """Give the memory back."""
        self.memory.close()
        os.close(self.fd)


def attach_request(engine: str, *, rank: Rank | None = None, model: str = "hybrid") -> pb.AttachRequest:
    """A scheduler's Attach, or a rank's."""
    request = pb.AttachRequest(
        protocols=[1], engine_id=engine, identity=identity(model), client_version="test"
    )
    if rank is None:
        request.scheduler.SetInParent()
    else:
        request.worker.CopyFrom(rank.worker())
    return request


def ids(blocks: list[int]) -> pb.BlockIds:
    """Packed block ids."""
    return pb.BlockIds(ids=np.array(blocks, "<i4").tobytes())
