"""Counters of the connector, as vLLM logs and aggregates them: what was found, missed, skipped and why.

Names are plain; a reason is part of the name after a colon. Nothing here is per request.
"""

import re
from collections import Counter
from typing import Any

from typing_extensions import override

from kvpool_engine.vllm.compat import KVConnectorStats

_NOT_PLAIN = re.compile(r"[^a-z0-9]+")


def reason(text: str) -> str:
    """A reason as part of a counter's name."""
    return _NOT_PLAIN.sub("_", text.lower()).strip("_")[:48]


class KVPoolStats(KVConnectorStats):
    """Counts of one interval; `data` maps names to numbers."""

    data: dict[str, Any]

    @override
    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> "KVPoolStats":
        """The sum of both."""
        return KVPoolStats(dict(Counter(self.data) + Counter(other.data)))

    @override
    def reduce(self) -> dict[str, int | float]:
        """As it is logged."""
        return dict(sorted(self.data.items()))

    @override
    def is_empty(self) -> bool:
        """True when nothing happened."""
        return not self.data


class Counts:
    """Counts up; `take` gives an interval's worth, `total` everything since the start."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Count `number` more."""
        if number:
            self.total[name] += number

    def take(self) -> KVPoolStats | None:
        """What was counted since the last call; None if nothing was."""
        fresh: dict[str, Any] = dict(self.total - self._taken)
        self._taken = self.total.copy()
        return KVPoolStats(fresh) if fresh else None
