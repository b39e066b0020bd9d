"""NO_SAVE_AFTER_FAILURE on the client: remembers failed loads also across agents.

The agent remembers within a session; an agent that died, or that never saw the load, cannot. So the client keeps, per
request, the latest failed load and the token position of its first failed chunk, and cuts saves there until the caller
says that it has recomputed what that load did not bring.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvpool_engine.transfer import Transfer
from kvpool_engine.types import Geometry, TransferResult

MAX_REQUESTS: Final = 4096
"""Requests remembered; more than any engine runs at once. The oldest go first."""


@dataclass(frozen=True, slots=True)
class _Failure:
    transfer: Transfer
    position: int
    """Tokens."""


class Failures:
    """The failed loads of one worker."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._of: OrderedDict[str, _Failure] = OrderedDict()

    def note(self, transfer: Transfer, result: TransferResult) -> None:
        """Remember a load that ended with failed chunks; the lowest position counts if there are several."""
        if not result.failed:
            return
        position = min(item.chunk * self._geometry.block_sizes[item.group] for item in result.failed)
        known = self._of.pop(transfer.request_id, None)
        self._of[transfer.request_id] = _Failure(
            transfer, min(position, known.position) if known else position
        )
        while len(self._of) > MAX_REQUESTS:
            self._of.popitem(last=False)

    def clip(self, request_id: str, end: int, recomputed_after: Transfer | int | None) -> int:
        """Tokens up to which the request may be saved.

        Args:
            request_id: of the save.
            end: tokens that the caller wants saved.
            recomputed_after: the load, or its id, whose tail was recomputed since; it or a later one clears the memory.
        """
        known = self._of.get(request_id)
        if known is None:
            return end
        by_id = isinstance(recomputed_after, int) and recomputed_after >= known.transfer.id > 0
        if by_id or recomputed_after is known.transfer:
            del self._of[request_id]
            return end
        return min(end, known.position)

    def forget(self, request_id: str) -> None:
        """The request gave up its blocks: what comes under its id later is another computation."""
        self._of.pop(request_id, None)
