"""Keys that must not be found any more are removed from the store: corrupt ones, and what a failed load forbids.

The store refuses to remove what a reader holds a lease on, and even the question whether a save has arrived takes one;
so a removal is tried again after every lease until the key is gone. Until then it is a tombstone: a miss on this node.
Owned by the agent, not by a session: an engine that detaches or dies takes nothing along. Promises (BOUNDED): so many
keys wait, each so long; what is given up is logged and counted. Refuses: to remove by force, which would cut a reader
short, and to persist: an agent that is killed forgets what it had still to remove.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvpool_agent.store.errors import StoreError
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.transfer.tombstones import Tombstones

_log: Final = logging.getLogger(__name__)

MOST: Final = 65_536
"""Keys waiting; the next ones are left to their tombstones and to eviction."""

GIVE_UP_SECONDS: Final = 600.0
"""A key that readers elsewhere have kept leased for so long is left to eviction."""

_BATCH: Final = 1024
_REMOVE_SECONDS: Final = 5.0
_GONE: Final = (ChunkStatus.OK, ChunkStatus.ABSENT)


class Why(StrEnum):
    """Why a key must not be found."""

    CORRUPT = "corrupt"
    """Its bytes are not what was saved under it; whoever reads it finds out by its trailer."""
    REVOKED = "revoked"
    """NO_SAVE_AFTER_FAILURE: its bytes are what was saved, and must not have been."""


class Remover(Protocol):
    """Removes keys; `store.protocol.Prober` in the agent."""

    async def remove(self, keys: Sequence[bytes], *, deadline: float) -> list[ChunkStatus]:
        """Remove keys, never by force."""
        ...


class RemovalMetrics(Protocol):
    """What removals count."""

    def removed(self, *, reason: str, gone: int, given_up: int) -> None:
        """Keys that are gone, and keys that are not waited for any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    why: Why
    until: float


class Removals:
    """The keys that one agent has still to remove. Event loop only."""

    def __init__(
        self,
        remover: Remover,
        *,
        tombstones: Tombstones,
        metrics: RemovalMetrics,
        lease_seconds: float,
        most: int = MOST,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        """Wait for keys.

        Args:
            remover: asks the store.
            tombstones: the agent's.
            metrics: the agent's.
            lease_seconds: how long a question or a get keeps a key from being removed.
            most: keys waiting at once.
            give_up_seconds: how long one key is tried.
        """
        self._remover = remover
        self._tombstones = tombstones
        self._metrics = metrics
        self._lease = lease_seconds
        self._most = most
        self._give_up = give_up_seconds
        self._waiting: dict[bytes, _Waiting] = {}
        self._due: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, keys: Sequence[bytes], why: Why) -> None:
        """Remove `keys` for good; from now on they are a miss on this node. A key that waits already is not doubled.

        Corrupt keys are tried when the lease of the lookup that found them has lapsed, revoked ones at once.
        """
        if not keys:
            return
        self._tombstones.add(keys)
        now = asyncio.get_running_loop().time()
        new = [key for key in dict.fromkeys(keys) if key not in self._waiting]
        room = 0 if self._closed and why is Why.CORRUPT else self._most - len(self._waiting)
        for key in new[:room]:
            self._waiting[key] = _Waiting(why, now + self._give_up)
            self._put_off(key, now if why is Why.REVOKED else now + self._lease)
        if left := new[room:]:
            self._abandon(left, why, f"{len(self._waiting)} keys wait already")
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kvpool removals")
        self._added.set()

    async def close(self, *, deadline: float) -> None:
        """Go on until nothing revoked waits, at most until `deadline` (`loop.time()`); tell what is left.

        Corrupt keys are not waited for: whoever reads one finds out.
        """
        self._closed = True
        self._drop(Why.CORRUPT)
        self._due = [entry for entry in self._due if entry[2] in self._waiting]
        heapq.heapify(self._due)
        self._added.set()
        if self._task is not None:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait({self._task}, timeout=left)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop(Why.REVOKED)

    def __len__(self) -> int:
        """Keys waiting."""
        return len(self._waiting)

    def _put_off(self, key: bytes, until: float) -> None:
        heapq.heappush(self._due, (until, next(self._numbers), key))

    def _drop(self, why: Why) -> None:
        self._abandon([key for key, one in self._waiting.items() if one.why is why], why, "the agent ends")

    async def _run(self) -> None:
        """Ends when nothing waits; `add` begins it again."""
        while self._due:
            self._added.clear()
            # Nobody wakes it: the next key's turn has come.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._due[0][0]):
                    await self._added.wait()
            if keys := self._take_due():
                await self._try(keys)

    def _take_due(self) -> list[bytes]:
        now = asyncio.get_running_loop().time()
        keys: list[bytes] = []
        while self._due and self._due[0][0] <= now and len(keys) < _BATCH:
            keys.append(heapq.heappop(self._due)[2])
        return keys

    async def _try(self, keys: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        try:
            statuses = await self._remover.remove(keys, deadline=loop.time() + _REMOVE_SECONDS)
        except StoreError as error:
            _log.info("%d keys not removed, tried again: %s", len(keys), error)
            statuses = [ChunkStatus.MASTER_FAILED] * len(keys)
        now = loop.time()
        late: dict[Why, list[bytes]] = {why: [] for why in Why}
        for key, status in zip(keys, statuses, strict=True):
            waiting = self._waiting[key]
            if status in _GONE:
                self._gone(key, waiting.why)
            elif now >= waiting.until:
                late[waiting.why].append(key)
            else:
                self._tombstones.add([key])
                self._put_off(key, min(now + self._lease, waiting.until))
        for why, left in late.items():
            self._abandon(left, why, f"not in {self._give_up:.0f} s: a reader keeps a lease, or no answer")

    def _gone(self, key: bytes, why: Why) -> None:
        del self._waiting[key]
        self._metrics.removed(reason=why, gone=1, given_up=0)
        if why is Why.REVOKED:
            # What comes under it next is another computation, and may be saved at once.
            self._tombstones.discard(key)

    def _abandon(self, keys: Sequence[bytes], why: Why, because: str) -> None:
        if not keys:
            return
        for key in keys:
            self._waiting.pop(key, None)
        self._metrics.removed(reason=why, gone=0, given_up=len(keys))
        _log.log(
            logging.ERROR if why is Why.REVOKED else logging.WARNING,
            "%d %s keys not removed (%s first): %s; they stay until they are evicted%s",
            len(keys),
            why,
            keys[0].decode("ascii", "replace"),
            because,
            ". NO_SAVE_AFTER_FAILURE: other nodes may load what they hold" if why is Why.REVOKED else "",
        )
