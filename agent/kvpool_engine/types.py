"""Values that callers of the client library see: reasons, results, notices; they mean what they say.

Every enum mirrors the wire's by value, and unknown values of a newer agent become the general one of this build.
"""

import logging
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, Protocol, Self, runtime_checkable

from typing_extensions import override

from kvpool_wire import agent_pb2 as pb

logger = logging.getLogger(__name__)


class Mode(IntEnum):
    """How bytes come between the agent's ring and the engine's blocks."""

    AUTO = pb.MODE_UNSPECIFIED
    MAPPED = pb.MAPPED
    """The agent writes the blocks itself, through a mapping."""
    COPY = pb.COPY
    """This library copies between the ring and the blocks."""


MODES: Final[dict[Mode, pb.Mode.ValueType]] = {
    Mode.AUTO: pb.MODE_UNSPECIFIED,
    Mode.MAPPED: pb.MAPPED,
    Mode.COPY: pb.COPY,
}


class TransferKind(IntEnum):
    """Which way a transfer goes."""

    LOAD = pb.LOAD
    SAVE = pb.SAVE


class FailReason(IntEnum):
    """Why one chunk was not loaded or saved."""

    UNSPECIFIED = pb.FAILURE_UNSPECIFIED
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

    @override
    @classmethod
    def _missing_(cls, value: object) -> "FailReason":
        """A reason that only a newer agent knows: the chunk has failed all the same."""
        logger.debug("unknown failure reason %s", value)
        return cls.UNSPECIFIED


class MissReason(Enum):
    """Why a plan has no hit."""

    NONE = "none"
    """It has a hit, or simply nothing is stored."""
    STORE_UNAVAILABLE = "store unavailable"
    DEADLINE = "deadline"
    DRAINING = "draining"
    AGENT_UNAVAILABLE = "agent unavailable"
    """No session with the agent, or it answered with an error."""


class FenceState(IntEnum):
    """What a release knows (FENCED)."""

    FENCED = pb.FENCED
    """Nobody touches the blocks any more: they may be reused."""
    FENCE_UNCONFIRMED = pb.FENCE_UNCONFIRMED
    """It cannot be known yet: the blocks are in `withheld_blocks` and must not be reused."""


@dataclass(frozen=True, slots=True)
class ChunkFailure:
    """One chunk that did not arrive. `chunk` is the index of the block in the prompt, never a block id."""

    group: int
    chunk: int
    reason: FailReason


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended (LOADED_OR_REPORTED: every chunk of a load is counted in `good` or listed in `failed`)."""

    transfer: int
    """The agent's id; 0 when no agent ever began it."""
    kind: TransferKind
    request_id: str
    good: int = 0
    """Chunks loaded and verified, or saved and confirmed."""
    already_stored: int = 0
    bytes: int = 0
    failed: tuple[ChunkFailure, ...] = ()
    resume_length: int = 0
    """Loads: tokens from which this rank can go on; a scheduler joins all ranks' failures with `resume`."""
    skipped: str = ""
    """Saves: why nothing was saved, where that is not simply "all are stored"."""
    error: str = ""
    """Not empty when the client itself had to end the transfer; says why."""
    withheld: bool = False
    """True when blocks of the transfer went into `withheld_blocks`."""

    @property
    def ok(self) -> bool:
        """True when every chunk that was asked for is where it should be."""
        return not (self.failed or self.error or self.skipped)


@dataclass(frozen=True, slots=True)
class Extras:
    """What decides the KV of one request beside its tokens. Empty means that nothing does."""

    lora_name: str = ""
    lora_revision: str = ""
    cache_salt: str = ""
    media: tuple[str, ...] = ()

    def message(self) -> pb.Extras:
        """As it travels."""
        return pb.Extras(
            lora_name=self.lora_name,
            lora_revision=self.lora_revision,
            cache_salt=self.cache_salt,
            media=self.media,
        )


class NoticeKind(Enum):
    """What happened to the session."""

    ATTACHED = "attached"
    DETACHED = "detached"
    REFUSED = "refused"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Notice:
    """One event of the session, for logs and for engines that act on it."""

    kind: NoticeKind
    detail: str
    deadline: float = 0.0
    """DRAINING: seconds that the agent still serves what is in flight."""


@runtime_checkable
class IpcEvent(Protocol):
    """A recorded device event; `torch.cuda.Event(interprocess=True)` is one."""

    def ipc_handle(self) -> bytes:
        """Handle by which another process can wait for the event."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the event has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the client has to know of an identity's sizes, all in tokens."""

    block_sizes: tuple[int, ...]
    scheduler_block_size: int

    @classmethod
    def of(cls, identity: pb.Identity) -> Self:
        """The sizes of a checked identity."""
        return cls(tuple(group.block_size for group in identity.groups), identity.scheduler_block_size)

    def local_resume(self, start: int) -> int:
        """Tokens from which to go on when nothing past `start` can be trusted and no agent can be asked.

        `start` itself where it is a boundary of every group: what the engine had there is its own hit. Otherwise 0: a
        block that `start` cuts may have been written to in part, and a shorter length may lack a window's blocks.
        """
        return (
            start if all(start % size == 0 for size in (*self.block_sizes, self.scheduler_block_size)) else 0
        )
