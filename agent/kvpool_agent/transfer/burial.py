"""Corrupt keys are removed from the store when the lease that the lookup took has lapsed.

Until then they are tombstones: a miss on this node. Promises: bounded in number, never by force, given up after a few
tries (a reader elsewhere may keep the lease alive; it will find the corruption itself). Refuses: to hold up a session's
end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvpool_agent.store.protocol import ChunkStatus

_log: Final = logging.getLogger(__name__)

_TRIES: Final = 3
_REMOVE_SECONDS: Final = 5.0
_MOST: Final = 4096
"""Keys waiting; more are left to their tombstones and to eviction."""

Remove = Callable[[Sequence[bytes], float], Awaitable[Sequence[ChunkStatus]]]
"""Removes keys by a deadline (`loop.time()`)."""


class Burials:
    """Removes corrupt keys of one session after a while."""

    def __init__(self, remove: Remove, *, lease_seconds: float) -> None:
        self._remove = remove
        self._lease_seconds = lease_seconds
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` when their lease has lapsed."""
        taken = list(keys[: _MOST - self._waiting])
        if not taken:
            return
        self._waiting += len(taken)
        task = asyncio.get_running_loop().create_task(self._bury(taken), name="remove corrupt keys")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is still waiting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bury(self, keys: list[bytes]) -> None:
        left = keys
        try:
            for _ in range(_TRIES):
                await asyncio.sleep(self._lease_seconds)
                deadline = asyncio.get_running_loop().time() + _REMOVE_SECONDS
                statuses = await self._remove(left, deadline)
                done = (ChunkStatus.OK, ChunkStatus.ABSENT)
                left = [key for key, status in zip(left, statuses, strict=True) if status not in done]
                if not left:
                    return
            _log.warning(
                "%d corrupt keys are still leased by a reader; they stay until they are evicted", len(left)
            )
        finally:
            self._waiting -= len(keys)
