"""How long to wait before starting a worker again. Pure but for the random source, which is given.

Promises: pauses grow to a limit and are spread, so that a cluster of agents does not come back in step.
"""

from __future__ import annotations

from collections.abc import Callable


def pause(failures: int, *, first: float, most: float, random: Callable[[], float]) -> float:
    """Seconds to wait after `failures` (1 or more) failures in a row.

    Doubles from `first` to `most`, then takes a random part between half and all of it.
    """
    whole = min(most, first * 2.0 ** min(failures - 1, 32))
    return whole * (0.5 + 0.5 * random())
