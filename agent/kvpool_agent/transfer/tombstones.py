"""Keys that were found corrupt: a miss at once, not probed, not saved again until they lapse.

Bounded in number and in time, shared by all sessions of an agent. Promises to hold at least the newest `capacity` keys
for `ttl` seconds. Refuses to persist: after a restart a corrupt key is found corrupt again, by its trailer.
"""

from collections.abc import Callable, Iterable


class Tombstones:
    """A set of keys that forgets. Not thread-safe: event loop only."""

    def __init__(self, *, ttl: float, capacity: int, clock: Callable[[], float]) -> None:
        """Make an empty set.

        Args:
            ttl: seconds that a key stays.
            capacity: keys; adding one more forgets the oldest.
            clock: seconds, never going back; `time.monotonic` in the agent.
        """
        if ttl <= 0 or capacity < 1:
            raise ValueError(
                f"tombstones need a ttl above 0 and a capacity of at least 1, got {ttl} and {capacity}"
            )
        self._ttl = ttl
        self._capacity = capacity
        self._clock = clock
        # In order of death, because every key has the same ttl and a renewed one moves to the end.
        self._until: dict[bytes, float] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """Bury keys, or renew them."""
        until = self._clock() + self._ttl
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = until
        self._sweep()
        while len(self._until) > self._capacity:
            del self._until[next(iter(self._until))]

    def discard(self, key: bytes) -> None:
        """The key is gone from the store: what comes under it next is not what was buried."""
        self._until.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """Whether the key is buried now."""
        until = self._until.get(key) if isinstance(key, bytes) else None
        return until is not None and until > self._clock()

    def __len__(self) -> int:
        """Keys buried now."""
        self._sweep()
        return len(self._until)

    def _sweep(self) -> None:
        now = self._clock()
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
