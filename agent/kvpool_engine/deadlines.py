"""Deadlines on the engine's side: seconds of the caller, the loop's clock, milliseconds on the wire."""

import asyncio
from typing import Final

from kvpool_wire import limits

AGENTS_SHARE: Final = 0.9
"""Of a deadline, what the agent is given: its own account of a late transfer then still arrives in time."""


def now() -> float:
    """The running loop's clock, seconds."""
    return asyncio.get_running_loop().time()


def milliseconds(seconds: float) -> int:
    """The agent's share of `seconds`, as it travels; at least 1."""
    return max(1, min(limits.MAX_DEADLINE_MS, int(seconds * 1000 * AGENTS_SHARE)))
