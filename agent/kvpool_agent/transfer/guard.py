"""NO_SAVE_AFTER_FAILURE over all sessions of an engine on this node, and what else outlives a worker session.

A load that fails on one rank makes the KV computed after it worthless on every rank. So failures are kept by engine and
request, for all worker sessions; who records one cuts the running saves of all of them, and what they put under the
failed attempt, at or past the failed token, is removed from the store. Ranks on other nodes are told by the engine
(`NoteFailure`, `Resume`) and then do the same. Promises (BOUNDED): the newest failures of each engine and the newest
puts are remembered; see `kvpool_wire.attempts` for what happens at the limit. Refuses: to believe that something was
computed again unless the attempt says so. Event loop only.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from kvpool_agent.transfer.removals import Removals, Why
from kvpool_agent.transfer.tombstones import Tombstones
from kvpool_wire.attempts import Barrier, FailedAttempts

_log: Final = logging.getLogger(__name__)

ABSENT_ENGINES: Final = 64
"""Engines without a session whose failures are remembered, for when they attach again."""

RECENT_PUTS: Final = 65_536
"""Chunks that were put lately and can still be taken back; the oldest request is let go first."""

Cut = Callable[[str, int, int], None]
"""Stops the saves of (request, attempts up to this one) that hold chunks at or past this token."""


class GuardMetrics(Protocol):
    """What the guard counts."""

    def failure_forgotten(self) -> None:
        """A failure was forgotten before its time; saves are refused instead."""
        ...


@dataclass(frozen=True, slots=True)
class Put:
    """One chunk that a save has put, or may have."""

    key: bytes
    end: int
    """Where the chunk ends, in tokens."""


@dataclass(slots=True)
class _Remembered:
    attempt: int
    puts: Sequence[Put]


class SaveGuard:
    """What failed loads forbid, by engine."""

    def __init__(self, *, removals: Removals, metrics: GuardMetrics, clock: Callable[[], float]) -> None:
        """Know of no failure.

        Args:
            removals: takes what has to be taken back.
            metrics: the agent's.
            clock: seconds, never going back.
        """
        self._removals = removals
        self._metrics = metrics
        self._clock = clock
        self._failed: dict[str, FailedAttempts] = {}
        self._cuts: dict[str, list[Cut]] = {}
        self._puts: OrderedDict[tuple[str, str], list[_Remembered]] = OrderedDict()
        self._num_puts = 0

    def join(self, engine_id: str, cut: Cut) -> None:
        """A worker session of the engine has begun."""
        self._cuts.setdefault(engine_id, []).append(cut)

    def leave(self, engine_id: str, cut: Cut) -> None:
        """It has ended, and saves nothing any more."""
        cuts = self._cuts[engine_id]
        cuts.remove(cut)
        if not cuts:
            del self._cuts[engine_id]

    def failed(self, engine_id: str, *, request_id: str, attempt: int, position: int) -> None:
        """A load of the request failed in `attempt` at token `position`, on whatever rank and node.

        All that the attempt has put past it is taken back, by ended saves, too: nobody can tell what came of what.
        """
        if self._engine(engine_id).record(request_id=request_id, attempt=attempt, position=position):
            self._metrics.failure_forgotten()
            _log.error(
                "engine %s: more failed loads than are remembered; for now saves of other requests are refused too",
                engine_id,
            )
        for cut in list(self._cuts.get(engine_id, ())):
            cut(request_id, attempt, position)
        for remembered in self._puts.get((engine_id, request_id), ()):
            if remembered.attempt == attempt:
                self._num_puts -= len(remembered.puts)
                remembered.puts = self._allowed(remembered.puts, position)
                self._num_puts += len(remembered.puts)

    def barrier(self, engine_id: str, *, request_id: str, attempt: int) -> Barrier | None:
        """What forbids saves of this attempt, None if nothing does."""
        known = self._failed.get(engine_id)
        return None if known is None else known.barrier(request_id=request_id, attempt=attempt)

    def put(self, engine_id: str, puts: Sequence[Put], *, request_id: str, attempt: int) -> None:
        """A save has put these chunks, or may have: take back what must not be there, now or after a later failure."""
        if not puts:
            return
        barrier = self.barrier(engine_id, request_id=request_id, attempt=attempt)
        kept = puts if barrier is None else self._allowed(puts, barrier.position)
        self._puts.setdefault((engine_id, request_id), []).append(_Remembered(attempt, kept))
        self._puts.move_to_end((engine_id, request_id))
        self._num_puts += len(kept)
        while self._num_puts > RECENT_PUTS and len(self._puts) > 1:
            _, oldest = self._puts.popitem(last=False)
            self._num_puts -= sum(len(some.puts) for some in oldest)

    def _allowed(self, puts: Sequence[Put], position: int) -> Sequence[Put]:
        """What lies before `position`; the rest is taken back."""
        keys = [one.key for one in puts if one.end > position]
        if not keys:
            return puts
        _log.warning("NO_SAVE_AFTER_FAILURE: %d chunks are taken back out of the store", len(keys))
        self._removals.add(keys, Why.REVOKED)
        return [one for one in puts if one.end <= position]

    def _engine(self, engine_id: str) -> FailedAttempts:
        known = self._failed.pop(engine_id, None)
        if known is None:
            known = FailedAttempts(clock=self._clock)
        # The engine that failed last, last.
        self._failed[engine_id] = known
        absent = [one for one in self._failed if one not in self._cuts and one != engine_id]
        for one in absent[: max(0, len(absent) - ABSENT_ENGINES)]:
            del self._failed[one]
        return known


class TransferIds:
    """Numbers of transfers: unique in the agent's life and, by its epoch, against the run before it.

    A late event can only be about the transfer that it names.
    """

    def __init__(self, epoch: int) -> None:
        """Take the agent's epoch, a random number."""
        self._numbers = count((epoch & 0x7FFFFF) << 40 | 1)

    def next(self) -> int:
        """The next number; below 2**63."""
        return next(self._numbers)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the worker sessions of one agent share beside the store."""

    ids: TransferIds
    guard: SaveGuard
    removals: Removals
    tombstones: Tombstones
