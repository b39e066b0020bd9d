"""Work that outlives the transfer that began it: a late get, a replacement, the removal of a corrupt key.

Promises: no task is lost to the garbage collector, every exception is logged, and `wait` returns when all have ended.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_log: Final = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """Tasks of one session."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Run `work` and keep it until it ends."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Wait until no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def __len__(self) -> int:
        """Tasks under way."""
        return len(self._tasks)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s ended with an error", task.get_name(), exc_info=error)
