"""NO_SAVE_AFTER_FAILURE: what may not be saved, by request and attempt. Agent and client library hold the same rule.

An *attempt* is the engine's number of a computation of a request: 0 at first, one more each time it computes the
request again after a load that failed or was given up. A load that failed in attempt k at token p forbids saves of
attempts up to k at or past p. Promises: to answer from every failure that it remembers, and, where it had to forget
one, to refuse rather than to guess (see `FailedAttempts.record`). Refuses: to learn that something was computed again
from anything but a higher attempt. Pure; not thread-safe.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_FAILED_REQUESTS: Final = 16_384
"""Requests of one engine whose failures are remembered; far more than it runs at once."""

KEEP_SECONDS: Final = 3600.0
"""A failure that old concerns no save any more: its engine heard of it within the deadline of a load, which is at most
`limits.MAX_DEADLINE_MS`, and has computed again since."""

_STEPS: Final = 8
"""Failures remembered per request; older ones are merged, towards caution."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """What forbids a save.

    Attributes:
        attempt: saves of attempts up to this one are concerned.
        position: tokens; nothing at or past it may be saved.
    """

    attempt: int
    position: int


@dataclass(slots=True)
class _Request:
    steps: list[Barrier]
    """In order of attempt, each position below all that follow it: an earlier failure matters only further in front."""
    at: float
    """When the last failure was recorded."""


class FailedAttempts:
    """The failed loads of one engine."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        capacity: int = MAX_FAILED_REQUESTS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        """Remember nothing yet.

        Args:
            clock: seconds, never going back.
            capacity: requests.
            keep_seconds: a failure younger than this is never forgotten without a trace.
        """
        self._clock = clock
        self._capacity = capacity
        self._keep = keep_seconds
        self._requests: dict[str, _Request] = {}
        self._floor: Barrier | None = None
        self._floor_until = 0.0

    def record(self, *, request_id: str, attempt: int, position: int) -> bool:
        """A load of the request failed in `attempt` at token `position`.

        At the limit the request whose last failure is the oldest is forgotten. If that failure is younger than
        `keep_seconds`, a floor is raised for as long as it would be: a request that is not remembered is then treated
        as if it had failed as the forgotten ones did.

        Returns:
            True if a floor had to be raised: worth counting.
        """
        # The newest failure last.
        known = self._requests.pop(request_id, None)
        steps = _joined([*(known.steps if known is not None else ()), Barrier(attempt, position)])
        self._requests[request_id] = _Request(steps, self._clock())
        return len(self._requests) > self._capacity and self._forget_oldest()

    def barrier(self, *, request_id: str, attempt: int) -> Barrier | None:
        """The lowest failure that forbids saves of this attempt, None if none does."""
        known = self._requests.get(request_id)
        if known is not None:
            # A lower attempt is forbidden by every later failure too, so the first one that concerns it is the lowest.
            return next((step for step in known.steps if step.attempt >= attempt), None)
        floor = self._floor if self._clock() < self._floor_until else None
        return floor if floor is not None and floor.attempt >= attempt else None

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._requests)

    def _forget_oldest(self) -> bool:
        oldest = self._requests.pop(next(iter(self._requests)))
        now, until = self._clock(), oldest.at + self._keep
        if until <= now:
            return False
        forgotten = Barrier(oldest.steps[-1].attempt, oldest.steps[0].position)
        if self._floor is not None and now < self._floor_until:
            forgotten = Barrier(
                max(forgotten.attempt, self._floor.attempt), min(forgotten.position, self._floor.position)
            )
        self._floor, self._floor_until = forgotten, max(until, self._floor_until)
        return True


def _joined(failures: list[Barrier]) -> list[Barrier]:
    """The failures that matter: one at or before another's position, of the same or a later attempt, says it all."""
    steps: list[Barrier] = []
    for step in sorted(failures, key=lambda one: (-one.attempt, one.position)):
        if not steps or step.position < steps[0].position:
            steps.insert(0, step)
    if len(steps) > _STEPS:
        first, second, *rest = steps
        steps = [Barrier(second.attempt, first.position), *rest]
    return steps
