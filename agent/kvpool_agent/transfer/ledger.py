"""NO_SAVE_AFTER_FAILURE: what may not be saved because a load failed.

Once a load of a request has failed at a position, nothing at or past it may be saved for that request until the engine
says that it has recomputed it, by naming that load (or a later one). Promises: to answer from all failures that it
remembers, the newest `capacity` requests. Refuses: to guess that something was recomputed. Pure.
"""

from typing import Final

_STEPS: Final = 8
"""Failures remembered per request; older ones are merged, towards caution."""


class FailureLedger:
    """Failed loads by request."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        # Per request (transfer, position) in order of transfer, each position below all that follow it: an earlier
        # failure matters only if it lies further to the front.
        self._failures: dict[str, list[tuple[int, int]]] = {}

    def record(self, *, request_id: str, transfer: int, position: int) -> None:
        """A load of the request failed at token `position`."""
        # One at or before another's position, of the same or a later load, says all that the other says.
        steps: list[tuple[int, int]] = []
        for step in sorted(
            [*self._failures.pop(request_id, []), (transfer, position)], key=lambda s: (-s[0], s[1])
        ):
            if not steps or step[1] < steps[0][1]:
                steps.insert(0, step)
        if len(steps) > _STEPS:
            (_, lowest), (later, _), *rest = steps
            steps = [(later, lowest), *rest]
        self._failures[request_id] = steps
        if len(self._failures) > self._capacity:
            del self._failures[next(iter(self._failures))]

    def barrier(self, *, request_id: str, recomputed_after: int) -> tuple[int, int] | None:
        """The lowest failure that is not yet recomputed, as (transfer, position in tokens); None if there is none."""
        open_steps = [step for step in self._failures.get(request_id, ()) if step[0] > recomputed_after]
        return min(open_steps, key=lambda step: step[1], default=None)

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._failures)
