"""A plan on the engine's side: the lookup's answer as a value that travels in the engine's own step metadata.

It reads what the agent decided and decides nothing itself; above all it never prunes (PRUNE_ONCE): the agent's lookup
has done so, and `hit_length` is what the scheduler may count on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from typing_extensions import override

from kvpool_engine.errors import PlanError
from kvpool_engine.types import Geometry, MissReason
from kvpool_wire import agent_pb2 as pb

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Hit length and masks of one request. Immutable; equal plans have equal bytes."""

    message: pb.Plan
    """As it travels; not to be changed."""
    miss_reason: MissReason = MissReason.NONE
    """Known on the scheduler that looked up; it does not travel."""
    probed_keys: int = field(default=0)

    @classmethod
    def miss(cls, reason: MissReason) -> Self:
        """A plan without a hit."""
        return cls(pb.Plan(version=PLAN_VERSION), reason)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The plan that `to_bytes` wrote, on this rank or another.

        Raises:
            PlanError: the bytes are no plan, or one of a version that this build does not know.
        """
        try:
            message = pb.Plan.FromString(raw)
        except DecodeError as error:
            raise PlanError(f"{len(raw)} bytes that are no plan: {error}") from error
        if message.version != PLAN_VERSION:
            raise PlanError(f"plan of version {message.version}; this client knows {PLAN_VERSION} only")
        for index, group in enumerate(message.groups):
            if len(group.mask) != (group.blocks + 7) // 8:
                raise PlanError(f"group {index}: a mask of {len(group.mask)} bytes for {group.blocks} blocks")
        return cls(message)

    def to_bytes(self) -> bytes:
        """For the engine's step metadata."""
        return self.message.SerializeToString()

    @property
    def hit_length(self) -> int:
        """Tokens at the start of the prompt that need not be computed, pruned already."""
        return self.message.hit_length

    @property
    def pruned_tokens(self) -> int:
        """Tokens that the EAGLE prune took off the hit."""
        return max(0, self.message.hit_length_without_eagle - self.message.hit_length)

    @property
    def good_until(self) -> float:
        """Unix time in seconds until which the store's lease holds what was seen; a later load may find less."""
        return self.message.good_until_unix_ms / 1000

    @property
    def masks(self) -> tuple[NDArray[np.bool_], ...]:
        """Per group one entry per block that the hit covers: True where the block is to be loaded."""
        return tuple(
            np.unpackbits(np.frombuffer(group.mask, np.uint8), count=group.blocks, bitorder="little").astype(
                np.bool_
            )
            for group in self.message.groups
        )

    def chunks_from(
        self, start: int, geometry: Geometry, held: Sequence[bool]
    ) -> tuple[NDArray[np.int64], ...]:
        """Per group the indexes of the chunks that a load from `start` has to bring.

        Args:
            start: tokens that the engine already has; chunks that end at or before it are not loaded.
            geometry: block sizes of the identity.
            held: per group, whether this rank holds a shard of it.
        """
        if not self.message.groups:
            return tuple(np.empty(0, np.int64) for _ in held)  # a miss
        wanted: list[NDArray[np.int64]] = []
        for mask, size, holds in zip(self.masks, geometry.block_sizes, held, strict=True):
            chunks = np.flatnonzero(mask) if holds else np.empty(0, np.int64)
            wanted.append(chunks[chunks >= start // size])
        return tuple(wanted)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.message == other.message

    @override
    def __hash__(self) -> int:
        return hash(self.to_bytes())
