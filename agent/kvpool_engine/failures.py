"""NO_SAVE_AFTER_FAILURE on the client: failed loads, remembered also across agents.

An agent remembers as long as it lives; one that died, or that never saw the load, cannot. So a process keeps the failed
attempts of its engine's requests, one memory for all workers of the engine in it, and cuts saves there until they come
under a higher attempt. What it does at its limit is written in `kvpool_wire.attempts`. Callable from any thread.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool_engine.types import FailReason, Geometry, TransferResult, logger
from kvpool_wire.attempts import FailedAttempts

_UNSURE: Final = frozenset({FailReason.CANCELLED})
"""Reasons after which nothing of the load is trusted."""


class Failures:
    """The failed loads of one engine, as far as this process knows."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempts = FailedAttempts(clock=clock)
        self._lock = threading.Lock()
        self.forgotten = 0
        """Requests whose failure was forgotten before its time; other saves are refused for it."""

    def note(self, request_id: str, attempt: int, position: int) -> None:
        """A load failed in `attempt` at token `position`, on whatever rank."""
        with self._lock:
            forgotten = self._attempts.record(request_id=request_id, attempt=attempt, position=position)
            self.forgotten += forgotten
        if forgotten:
            logger.error(
                "more failed loads than are remembered; for now saves of other requests are refused too"
            )

    def clip(self, request_id: str, end: int, attempt: int) -> int:
        """Tokens, at most `end`, up to which the request may be saved in `attempt`."""
        with self._lock:
            barrier = self._attempts.barrier(request_id=request_id, attempt=attempt)
        return end if barrier is None else min(end, barrier.position)


def failed_at(result: TransferResult, start: int, geometry: Geometry) -> int | None:
    """Where a load from token `start` on failed, in tokens; None if all of it arrived."""
    if not result.failed:
        return None
    first = min(item.chunk * geometry.block_sizes[item.group] for item in result.failed)
    unsure = result.error or any(item.reason in _UNSURE for item in result.failed)
    return min(first, start) if unsure else first


@dataclass(slots=True)
class _Shared:
    failures: Failures
    clients: int = 0


_engines: Final[dict[str, _Shared]] = {}
_engines_lock: Final = threading.Lock()


def join(engine_id: str) -> Failures:
    """The memory of an engine in this process, for one more of its clients; `leave` follows."""
    with _engines_lock:
        shared = _engines.setdefault(engine_id, _Shared(Failures()))
        shared.clients += 1
        return shared.failures


def leave(engine_id: str) -> None:
    """A client has closed; with the last one the memory goes."""
    with _engines_lock:
        shared = _engines[engine_id]
        shared.clients -= 1
        if shared.clients == 0:
            del _engines[engine_id]
