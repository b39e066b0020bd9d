"""One event-loop thread for all synchronous clients of a process.

One for all, since gRPC's asyncio layer polls once a process: a loop per client would have them wake each other.
The thread starts with the first client, is a daemon, and dies with the process.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from kvpool_engine.transfer import GRACE

Result = TypeVar("Result")


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvpool-client", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Result], *, deadline: float) -> Result:
        """Run `work`, which keeps `deadline` seconds by itself, and return its result.

        Raises:
            TimeoutError: it did not keep it (BOUNDED: the engine does not wait for a stuck loop either).
            RuntimeError: called on the loop's own thread.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "the synchronous client was called on its own event loop; use kvpool_engine.aio there"
            )
        future = self.submit(work)
        try:
            return future.result(deadline + GRACE)
        except TimeoutError:
            future.cancel()
            raise


def shared_loop() -> LoopThread:
    """The process's client loop; a forked child gets one of its own, since threads do not survive a fork."""
    return _loop_of(os.getpid())


@cache
def _loop_of(_pid: int) -> LoopThread:
    return LoopThread()
