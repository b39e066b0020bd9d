"""FENCED on the client: blocks that somebody might still touch are withheld until that is known to be over.

A hold names a transfer's blocks and ends when it is lifted: the agent said FENCED, the transfer's own end arrived, or
the agent has let go (`proof`; and, on a GPU, the device is synchronised). Nothing else ends it, least of all time.
`snapshot` may be read from any thread; everything else belongs to the client's loop.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool_engine.transfer import Transfer


@dataclass(eq=False, slots=True)
class Hold:
    """One transfer's blocks that must not be reused yet."""

    owner: Transfer
    why: str
    lifted: asyncio.Event = field(default_factory=asyncio.Event)


class Withheld:
    """All holds of one client."""

    def __init__(self, groups: int, *, overlap: Sequence[int] | None = None) -> None:
        """Nothing is withheld.

        Args:
            groups: of the identity.
            overlap: see `WorkerLayout.overlap`: a block withheld in one group is so in all that share its memory.
        """
        self._pool: Sequence[int] = range(groups) if overlap is None else overlap
        self._holds: list[Hold] = []
        self._counts: tuple[Counter[int], ...] = tuple(Counter() for _ in range(groups))
        self.snapshot: tuple[frozenset[int], ...] = tuple(frozenset() for _ in range(groups))
        """Per group the block ids that must not be reused."""

    def hold(self, *, owner: Transfer, why: str) -> Hold:
        """Withhold a transfer's blocks until `lift`."""
        hold = Hold(owner, why)
        self._holds.append(hold)
        for pool, ids in zip(self._pool, hold.owner.blocks, strict=True):
            self._counts[pool].update(ids.tolist())
        self._publish()
        return hold

    def lift(self, hold: Hold) -> None:
        """End one hold; a second time changes nothing."""
        if hold.lifted.is_set():
            return
        hold.lifted.set()
        self._holds.remove(hold)
        for pool, ids in zip(self._pool, hold.owner.blocks, strict=True):
            self._counts[pool].subtract(ids.tolist())
        self._publish()

    def of(self, *, request_id: str | None = None, owner: Transfer | None = None) -> list[Hold]:
        """Holds of a request, of a transfer, or all."""
        return [
            hold
            for hold in self._holds
            if (request_id is None or hold.owner.request_id == request_id)
            and (owner is None or hold.owner is owner)
        ]

    def _publish(self) -> None:
        for counter in self._counts:
            for block in [block for block, count in counter.items() if count <= 0]:
                del counter[block]
        withheld = [frozenset(counter) for counter in self._counts]
        self.snapshot = tuple(withheld[pool] for pool in self._pool)


async def all_lifted(holds: Sequence[Hold], timeout: float) -> bool:
    """Wait until every hold is lifted; False if `timeout` seconds pass first."""
    try:
        async with asyncio.timeout(timeout):
            for hold in holds:
                await hold.lifted.wait()
    except TimeoutError:
        return False
    return True


def check_apart(blocks: Sequence[NDArray[np.int32]], overlap: Sequence[int]) -> None:
    """Refuse one id in two groups that share memory: it would be one block for two chunks.

    The agent refuses that as well, but in copy mode it does not know where the blocks lie.

    Raises:
        ValueError: naming the block.
    """
    taken: dict[tuple[int, int], int] = {}
    for group, ids in enumerate(blocks):
        for block in ids.tolist() if overlap.count(overlap[group]) > 1 else ():
            other = taken.setdefault((overlap[group], block), group)
            if other != group:
                raise ValueError(
                    f"block {block} is named by group {other} and by group {group}, which share its memory; every chunk"
                    " needs a block of its own"
                )
