"""Whether the master can be reached, from what its answers said. Pure: the clock is given.

Promises: `known_down` only after the master itself failed to answer; a worker that is down says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable


class MasterReach:
    """Shared by the prober, the loaders and the monitor."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._down = False
        self._why = ""

    @property
    def known_down(self) -> bool:
        """True from a failed probe until the next answer."""
        return self._down

    @property
    def why(self) -> str:
        """What the failed probe said."""
        return self._why

    @property
    def age(self) -> float | None:
        """Seconds since the master last answered, None if it never did."""
        return None if self._last is None else self._clock() - self._last

    def answered(self) -> None:
        """The master answered a request."""
        self._last = self._clock()
        self._down = False
        self._why = ""

    def failed(self, why: str) -> None:
        """The master did not answer a probe."""
        self._down = True
        self._why = why
