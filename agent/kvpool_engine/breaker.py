"""A circuit breaker over the agent itself: a frozen agent must not cost every request its whole deadline (BOUNDED).

Opens after a few calls in a row that ran into their deadline; while open, callers answer "no hit" at once. One call at
a time then tries again, and the first that is answered closes it.
"""

import time
from collections.abc import Callable
from typing import Final

THRESHOLD: Final = 3
"""Deadlines in a row: one slow answer is no outage."""

COOLDOWN: Final = 1.0
"""Seconds between two tries while open."""


class Breaker:
    """Counts deadlines. Not thread-safe: it belongs to the client's loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._missed = 0
        self._next_try = 0.0

    def allows(self) -> bool:
        """May a call be made now? While open, True once per cooldown (half-open)."""
        if self._missed < THRESHOLD:
            return True
        now = self._clock()
        if now < self._next_try:
            return False
        self._next_try = now + COOLDOWN
        return True

    def answered(self) -> None:
        """The agent answered something."""
        self._missed = 0

    def missed(self) -> None:
        """A call ran into its deadline."""
        self._missed += 1
        if self._missed >= THRESHOLD:
            self._next_try = self._clock() + COOLDOWN
