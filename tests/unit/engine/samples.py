"""A small engine: full attention and a sliding window with EAGLE, two layers, sixteen blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool_engine.plan import Plan
from kvpool_engine.shm import SealedStorage
from kvpool_engine.tensors import Declaration, declare
from kvpool_wire import agent_pb2 as pb

BLOCKS, TOKENS, CONTENT = 16, 4, 8
PAYLOAD = TOKENS * CONTENT * 2
"""Bytes of one block of one layer, which is one chunk here."""


def identity() -> pb.Identity:
    form = pb.TensorFormat(dtype="float16", axes=["token", "content"], shape=[TOKENS, CONTENT])
    full = pb.Group(
        kind=pb.FULL_ATTENTION,
        block_size=TOKENS,
        shards_per_stage=1,
        layers=[pb.Layer(name="full", tensors=[form])],
    )
    window = pb.Group(
        kind=pb.SLIDING_WINDOW,
        block_size=TOKENS,
        sliding_window=8,
        eagle=True,
        shards_per_stage=1,
        layers=[pb.Layer(name="window", tensors=[form])],
    )
    return pb.Identity(
        model="m",
        fingerprint="f",
        engine="e 1",
        hash_algorithm="sha256",
        hash_block_size=TOKENS,
        scheduler_block_size=TOKENS,
        use_eagle=True,
        groups=[full, window],
    )


@dataclass
class Engine:
    """One rank's memory."""

    storage: SealedStorage
    full: NDArray[Any]
    window: NDArray[Any]
    declaration: Declaration

    def blocks(self, group: int) -> NDArray[np.uint8]:
        """The blocks of a group as bytes: [block, byte]."""
        return (self.full, self.window)[group].view(np.uint8).reshape(BLOCKS, PAYLOAD)


def engine(*, shared: bool = True) -> Engine:
    storage = SealedStorage.create(2 * BLOCKS * PAYLOAD)
    full = storage.numpy((BLOCKS, TOKENS, CONTENT), np.float16)
    window = storage.numpy((BLOCKS, TOKENS, CONTENT), np.float16, offset=BLOCKS * PAYLOAD)
    declared = declare(
        identity(), {"full": full, "window": window}, null_blocks=[0, 0], shared=(storage,) if shared else ()
    )
    return Engine(storage, full, window, declared)


def plan(masks: list[list[int]], hit_length: int, *, pruned: int = 0) -> Plan:
    groups = [
        pb.GroupPlan(blocks=len(mask), mask=np.packbits(mask, bitorder="little").tobytes()) for mask in masks
    ]
    return Plan(
        pb.Plan(
            version=1,
            identity=b"i" * 16,
            hit_length=hit_length,
            hash_size=32,
            groups=groups,
            hit_length_without_eagle=hit_length + pruned,
            good_until_unix_ms=1500,
        )
    )


def hashes(units: int) -> list[bytes]:
    return [unit.to_bytes(32, "big") for unit in range(units)]
