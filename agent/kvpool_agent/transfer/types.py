"""What transfers are made of: jobs in, results out, and the seam to whoever moves bytes between ring and blocks.

Values only. Nothing here acts, waits or validates; jobs are validated where they are started.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from kvpool_agent.coordinator import Plan
from kvpool_agent.pools.pool import MoveItem
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.trailer import TrailerFault


class FailReason(IntEnum):
    """Why a chunk was not loaded or not saved; numbers and names of `pb.FailureReason`."""

    EVICTED = pb.EVICTED
    CORRUPT = pb.CORRUPT
    PEER_UNREACHABLE = pb.PEER_UNREACHABLE
    MASTER_UNREACHABLE = pb.MASTER_UNREACHABLE
    TIMED_OUT = pb.TIMED_OUT
    CANCELLED = pb.CANCELLED
    ENGINE_FAILED = pb.ENGINE_FAILED
    STORE_FULL = pb.STORE_FULL
    DISPLACED = pb.DISPLACED
    INTERNAL = pb.INTERNAL
    HELD_BACK = pb.HELD_BACK


class TransferKind(IntEnum):
    """Direction of a transfer; numbers of `pb.TransferKind`."""

    LOAD = pb.LOAD
    SAVE = pb.SAVE


class FenceState(IntEnum):
    """Answer of a release; numbers of `pb.FenceState`."""

    FENCED = pb.FENCED
    FENCE_UNCONFIRMED = pb.FENCE_UNCONFIRMED


class Integrity(StrEnum):
    """How much of what is loaded has its checksum verified. The rest of the trailer is always compared."""

    ALWAYS = "Always"
    SAMPLED = "Sampled"
    OFF = "Off"


@dataclass(frozen=True, slots=True)
class HashChain:
    """The first hash units of a request, packed.

    Attributes:
        packed: `size` bytes per unit, unit 0 first; a whole number of units.
        size: bytes of one hash.
    """

    packed: bytes
    size: int

    def __len__(self) -> int:
        """Units."""
        return len(self.packed) // self.size

    def unit(self, index: int) -> bytes:
        """The hash of one unit.

        Raises:
            IndexError: the chain is shorter.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"hash unit {index} of a chain of {len(self)}")
        return self.packed[index * self.size : (index + 1) * self.size]

    def head(self, units: int) -> "HashChain":
        """The first `units` units, fewer if there are no more."""
        return HashChain(self.packed[: units * self.size], self.size)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Put a plan's chunks into these blocks.

    Attributes:
        request_id: the engine's.
        plan: what a lookup returned, perhaps on another node.
        chain: hash units 0 .. at least the highest that a loaded chunk is keyed by.
        total_hashes: units of the whole chain that the lookup counted with.
        extras: what beside the tokens decides the KV.
        start: tokens that the engine already has; chunks that end at or before it are not loaded.
        blocks: per group the ids of blocks start // block_size .. ceil(hit / block_size).
        deadline: `loop.time()`; what has not landed by then is reported TIMED_OUT.
        ordering: the proof that earlier kernels have left the blocks.
        attempt: the engine's number of this computation of the request (NO_SAVE_AFTER_FAILURE).
        context: the caller's trace context.
    """

    request_id: str
    plan: Plan
    chain: HashChain
    total_hashes: int
    extras: pb.Extras
    start: int
    blocks: tuple[NDArray[np.int32], ...]
    deadline: float
    ordering: pb.Ordering
    attempt: int
    context: Context | None = None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store what of these blocks is worth storing.

    Attributes:
        request_id: the engine's.
        chain: hash units 0 .. at least end.
        extras: what beside the tokens decides the KV.
        start: tokens; the first chunk of a group is ceil(start / block_size), as in vLLM.
        end: tokens computed; only whole blocks below it are saved.
        num_prompt_tokens: with a retention interval, what a replay of the prompt needs is kept too.
        blocks: per group the ids of blocks start // block_size .. end // block_size.
        deadline: `loop.time()`.
        attempt: the engine's number of this computation of the request (NO_SAVE_AFTER_FAILURE).
        ordering: the proof that the forward pass has finished.
        context: the caller's trace context.
    """

    request_id: str
    chain: HashChain
    extras: pb.Extras
    start: int
    end: int
    num_prompt_tokens: int | None
    blocks: tuple[NDArray[np.int32], ...]
    deadline: float
    attempt: int
    ordering: pb.Ordering
    context: Context | None = None


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """One chunk that was not loaded or not saved. `chunk` is the block's index in the prompt, never a block id."""

    group: int
    chunk: int
    reason: FailReason


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of a transfer. Exactly one per transfer that was started.

    Attributes:
        transfer: its id.
        kind: its direction.
        request_id: as in the job.
        good: chunks loaded and verified, or saved and confirmed.
        already_stored: saves only: chunks that were there before.
        bytes: payload bytes of the good chunks.
        failed: every other chunk, each once.
        resume_length: loads: tokens that need not be computed, as far as this rank knows; saves: 0.
    """

    transfer: int
    kind: TransferKind
    request_id: str
    good: int
    already_stored: int
    bytes: int
    failed: tuple[ChunkFailure, ...]
    resume_length: int


@dataclass(frozen=True, slots=True)
class SaveStart:
    """What `start_save` answers.

    Attributes:
        transfer: its id; 0: nothing to do, no result will come.
        chunks: chunks that are worth saving.
        skipped: why there are none, or fewer than asked for; "" if the coordinator's masks alone say so.
    """

    transfer: int
    chunks: int
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class FenceResult:
    """What a release knows by its deadline.

    Attributes:
        state: FENCED only if nobody touches the blocks any more.
        unconfirmed: the transfers that may still touch theirs.
    """

    state: FenceState
    unconfirmed: tuple[int, ...] = ()


class Landed(Enum):
    """What became of one item of a move, where it is not a `TrailerFault`."""

    OK = "ok"
    ENGINE_FAILED = "the engine's side could not copy"
    UNANSWERED = "the engine's side did not answer in time"
    STOPPED = "the transfer was stopped before the item was touched"


LandOutcome = Landed | TrailerFault


class Ticket(Protocol):
    """Permission to touch the blocks of one batch, given out by the fence.

    A mover looks at `stopped` before every item and calls `quiet` exactly once, on the event loop, when neither the
    batch's blocks nor its ring bytes are touched any more for it. Until then the blocks stay withheld (FENCED).
    """

    @property
    def transfer(self) -> int:
        """The transfer's id."""
        ...

    @property
    def deadline(self) -> float:
        """`loop.time()`."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether nothing further may be touched. Readable from any thread."""
        ...

    @property
    def stopping(self) -> "asyncio.Future[None]":
        """Done as soon as `stopped` is."""
        ...

    def quiet(self) -> None:
        """Nothing of this batch is touched any more."""
        ...


Check = Callable[[int], TrailerFault | None]
"""Verifies item number i in the ring. Called in worker threads."""

Seal = Callable[[int], None]
"""Writes the trailer of item number i in the ring. Called in worker threads."""


class BlockMover(Protocol):
    """Moves chunks between the ring and an engine's blocks. Both modes look alike to a transfer."""

    @property
    def mode(self) -> str:
        """`mapped` or `copy`."""
        ...

    async def order(self, ordering: pb.Ordering, *, give_up: Callable[[], bool]) -> None:
        """Wait until the blocks may be touched.

        Args:
            ordering: the engine's proof.
            give_up: asked in worker threads while the call waits; True ends it (BOUNDED).

        Raises:
            MoverFailed: the proof is missing or cannot be used, or did not come before `give_up` said True.
        """
        ...

    async def land(self, items: Sequence[MoveItem], check: Check, *, ticket: Ticket) -> list[LandOutcome]:
        """Verify items in the ring, then copy the good ones into their blocks; one outcome per item.

        Returns when the outcomes are known, at the latest soon after the ticket is stopped or its deadline has passed.
        """
        ...

    async def collect(self, items: Sequence[MoveItem], seal: Seal, *, ticket: Ticket) -> list[Landed]:
        """Copy blocks into the ring and seal them; one outcome per item, only OK ones may be stored."""
        ...

    async def close(self) -> None:
        """Return when no block is touched any more, and never touch one again."""
        ...


class TransferMetrics(Protocol):
    """What transfers count; `telemetry.metrics.AgentMetrics` in the agent."""

    def load_done(
        self, *, mode: str, seconds: float, bytes_: int, ok: int, failed: int, corrupt: int, evicted: int
    ) -> None:
        """One load was reported."""
        ...

    def save_done(
        self, *, mode: str, seconds: float, bytes_: int, saved: int, already: int, failed: int, displaced: int
    ) -> None:
        """One save was reported."""
        ...

    def store_request(self, *, operation: str, status: str, seconds: float, keys: int) -> None:
        """One batch request to the store ended."""
        ...

    def late_completion(self) -> None:
        """Something completed for a transfer that had been reported already."""
        ...
