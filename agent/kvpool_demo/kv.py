"""One rank's KV pool: torch tensors, what a forward pass would leave in them, and a check of every byte.

The check knows what must be where from keys and positions alone (`content.block_bytes`), never from the writer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool_demo.content import POISON, block_bytes
from kvpool_demo.model import BLOCK_SHAPE, BLOCKS, FULL, NULL_BLOCK
from kvpool_engine.shm import SealedStorage
from kvpool_engine.tensors import Declaration, declare
from kvpool_engine.types import Mode
from kvpool_wire import agent_pb2 as pb

_BLOCK_BYTES = 2 * int(np.prod(BLOCK_SHAPE))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found, in blocks of one layer each, and bytes.

    Attributes:
        right_bytes: bytes that are there and right.
        wrong_blocks: blocks of a layer that must hold known bytes and do not.
        touched_blocks: blocks of a layer that nobody was to write, and somebody did.
    """

    right_bytes: int
    wrong_blocks: int
    touched_blocks: int


class RankPool:
    """The paged KV tensors of one rank: full attention as [kv, block, ...], the window's layers as [block, kv, ...]."""

    def __init__(self, identity: pb.Identity, *, rank: int, mode: Mode) -> None:
        self._identity = identity
        self._rank = rank
        layers = [(group, layer.name) for group, spec in enumerate(identity.groups) for layer in spec.layers]
        layer_bytes = _BLOCK_BYTES * BLOCKS
        storage = SealedStorage.create(layer_bytes * len(layers)) if mode is Mode.MAPPED else None
        self._tensors: dict[str, torch.Tensor] = {}
        self._axes: dict[str, int] = {}
        for index, (group, name) in enumerate(layers):
            axis = 1 if group == FULL else 0
            shape = (*BLOCK_SHAPE[:axis], BLOCKS, *BLOCK_SHAPE[axis:])
            if storage is not None:
                self._tensors[name] = storage.torch(shape, torch.bfloat16, offset=index * layer_bytes)
            else:
                self._tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
            self._axes[name] = axis
        self.declaration: Declaration = declare(
            identity,
            self._tensors,
            rank=rank,
            shards=[rank] * len(identity.groups),
            block_axis=self._axes,
            null_blocks=[NULL_BLOCK] * len(identity.groups),
            shared=[storage] if storage is not None else [],
        )
        self.poison()

    def _blocks_of(self, layer: str) -> NDArray[np.uint8]:
        """The layer's memory as (block, ...) bytes; a view, block first whatever the layout is."""
        raw = self._tensors[layer].view(torch.uint8).numpy()
        return np.moveaxis(raw, self._axes[layer], 0)

    def _expected(self, layer: str, unit_hash: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return block_bytes(unit_hash, layer=layer, part=0, rank=self._rank, size=_BLOCK_BYTES).reshape(shape)

    def poison(self) -> None:
        """Fill every block with a byte that no computation leaves."""
        for layer in self._tensors:
            self._blocks_of(layer)[...] = POISON

    def compute(self, group: int, units: Sequence[bytes], blocks: Sequence[int]) -> None:
        """What a forward pass would do: block i of the group gets the KV that `units[i]` closes."""
        for layer in self._identity.groups[group].layers:
            memory = self._blocks_of(layer.name)
            for unit_hash, block in zip(units, blocks, strict=True):
                memory[block] = self._expected(layer.name, unit_hash, memory.shape[1:])

    def check(self, held: Sequence[dict[int, bytes]], unsure: Sequence[Iterable[int]]) -> Verdict:
        """Compare every byte of every block of every layer.

        Args:
            held: per group, block id to the hash of the unit that closes what it must hold.
            unsure: per group, blocks whose chunk was reported failed: nobody may read them, so they are not judged.
        """
        right = wrong = touched = 0
        for group, spec in enumerate(self._identity.groups):
            open_blocks = set(unsure[group])
            for layer in spec.layers:
                memory = self._blocks_of(layer.name)
                untouched = (memory.reshape(BLOCKS, -1) == POISON).all(axis=1)
                for block in range(BLOCKS):
                    if (unit_hash := held[group].get(block)) is not None:
                        equal = np.array_equal(
                            memory[block], self._expected(layer.name, unit_hash, memory.shape[1:])
                        )
                        right += _BLOCK_BYTES * equal
                        wrong += not equal
                    elif block not in open_blocks:
                        touched += not untouched[block]
        return Verdict(right, wrong, touched)
