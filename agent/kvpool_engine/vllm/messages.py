"""What travels between the connector's two sides in vLLM's own step metadata. Values only; all of it is picklable.

A job has a number of its own that is never used again: a late answer can only be about the job that it names.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool_engine.types import Extras
from kvpool_engine.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Put a plan's chunks into these blocks."""

    number: int
    request_id: str
    """vLLM's."""
    key: str
    """The request's name towards the agent: another one after every preemption."""
    plan: bytes
    start: int
    """Tokens that the engine has already."""
    blocks: tuple[int, ...]
    """Block ids from block start/block_size to the end of the hit."""
    trace: Mapping[str, str] | None = None
    attempt: int = 0
    """The scheduler's number of this computation of the request, the same on all ranks (NO_SAVE_AFTER_FAILURE)."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store these blocks once the step that computes them has run."""

    number: int
    key: str
    hashes: bytes
    """The chain up to `end`, packed."""
    hash_size: int
    start: int
    end: int
    num_prompt_tokens: int
    blocks: tuple[int, ...]
    extras: Extras = field(default_factory=Extras)
    trace: Mapping[str, str] | None = None
    attempt: int = 0
    """As in the load."""


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """What the workers have to do with one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    release: tuple[str, ...] = ()
    """Keys whose transfers are no longer wanted; their blocks stay pinned until each has ended."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What has ended on a worker since the last step; joined over all ranks before the scheduler sees it."""

    saves_over: Counter[int] = field(default_factory=Counter)
    """By job: ranks on which nobody reads its blocks any more."""
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Blocks of failed loads that somebody might still write: not to be reused until lifted (FENCED)."""
    lifted: set[str] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    """vLLM's ids of requests of which some chunk did not arrive on some rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        """Join the report of another rank, or of a later step."""
        if not isinstance(other, WorkerReport):
            raise TypeError(f"a report of kvpool joined with {type(other).__name__}")
        return WorkerReport(
            self.saves_over + other.saves_over,
            self.held | other.held,
            self.lifted | other.lifted,
            self.failed_loads | other.failed_loads,
        )

    @property
    def empty(self) -> bool:
        """True when there is nothing to say."""
        return not (self.saves_over or self.held or self.lifted or self.failed_loads)


@dataclass(frozen=True, slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler at start."""

    identity: bytes
    """A serialised `pb.Identity`."""
    engine_id: str
