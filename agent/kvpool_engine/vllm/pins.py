"""FENCED by reference counts: a block that a transfer may touch is not reused before that is over.

A pin is one more reference in vLLM's own block pool: a request that finishes, is aborted or is preempted never waits
for kvpool, and its blocks still cannot become another request's while a save reads them. Bounded: at most a share of
the pool is ever pinned, beyond it saves are skipped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

MAX_SHARE: Final = 0.25
"""Of all blocks, what saves may pin at once: a cache must not take an engine's memory from its requests."""


class Pool(Protocol):
    """What of vLLM's BlockPool is used."""

    @property
    def blocks(self) -> Sequence[Any]:
        """Every block, by its id."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more reference each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One reference less each."""
        ...


@dataclass(slots=True)
class _Pin:
    blocks: tuple[int, ...]
    ranks: int


class Pins:
    """The blocks that transfers keep, by job."""

    def __init__(self, pool: Pool, *, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._saves: dict[int, _Pin] = {}
        self._held: dict[str, tuple[int, ...]] = {}
        self._limit = int(len(pool.blocks) * MAX_SHARE)
        self._count = 0

    @property
    def saving(self) -> bool:
        """True while some save is not over."""
        return bool(self._saves)

    @property
    def blocks(self) -> int:
        """Blocks pinned for saves."""
        return self._count

    def pin_save(self, number: int, blocks: tuple[int, ...]) -> bool:
        """Keep the blocks of a save until every rank is done with it; False when too many are pinned already."""
        if self._count + len(blocks) > self._limit:
            return False
        self._take(blocks)
        self._saves[number] = _Pin(blocks, self._ranks)
        self._count += len(blocks)
        return True

    def save_over(self, number: int, ranks: int) -> None:
        """So many ranks more are done; an unknown job is one that was over already."""
        pin = self._saves.get(number)
        if pin is None:
            return
        pin.ranks -= ranks
        if pin.ranks <= 0:
            del self._saves[number]
            self._count -= len(pin.blocks)
            self._give(pin.blocks)

    def hold(self, name: str, blocks: tuple[int, ...]) -> None:
        """Keep blocks that somebody might still write; called while the request still owns them."""
        if name not in self._held:
            self._held[name] = blocks
            self._take(blocks)

    def lift(self, name: str) -> None:
        """Nobody touches them any more."""
        blocks = self._held.pop(name, None)
        if blocks is not None:
            self._give(blocks)

    def _take(self, blocks: tuple[int, ...]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def _give(self, blocks: tuple[int, ...]) -> None:
        # The end of a prompt first: it is the least likely to serve another request.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
