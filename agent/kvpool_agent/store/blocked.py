"""Keys whose writer died in mid-put, and until when the master keeps them blocked. Pure: the clock is given.

Promises: a put of such a key is not tried before its time (Mooncake would answer success and store nothing).
Refuses to grow without limit (BOUNDED): beyond `most` keys the oldest is forgotten, which costs a lost save, no more.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockedKeys:
    """Shared by all loaders of an agent."""

    def __init__(self, *, most: int = 1 << 18) -> None:
        self._until: dict[bytes, float] = {}
        self._most = most

    def block(self, keys: Iterable[bytes], *, until: float, now: float) -> None:
        """Hold these keys back until then."""
        self._expire(now)
        for key in keys:
            self._until.pop(key, None)  # to the end: the dict is ordered by time
            self._until[key] = until
        while len(self._until) > self._most:
            del self._until[next(iter(self._until))]

    def until(self, key: bytes, *, now: float) -> float | None:
        """When the key is free, None if it is."""
        until = self._until.get(key)
        return until if until is not None and until > now else None

    def __len__(self) -> int:
        """Keys remembered, lapsed ones that were not swept yet included."""
        return len(self._until)

    def _expire(self, now: float) -> None:
        while self._until:
            first = next(iter(self._until))
            if self._until[first] > now:
                return
            del self._until[first]
