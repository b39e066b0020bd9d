"""A few threads for hashing and copying, waited for to the end.

Promises: `split` returns, raises or is cancelled only when none of its threads is still at work. A copy that goes on
after its caller has gone would write blocks that nobody holds (FENCED). The threads see their caller's context
variables, the current span among them. Refuses: to interrupt a thread.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Threads of one session."""

    def __init__(self, threads: int, *, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def split(self, count: int, work: Callable[[range], Sequence[T]]) -> list[T]:
        """Run `work` over 0..count-1 cut into one range per thread; its results, joined in order."""
        size = -(-count // self._threads)
        if not size:
            return []
        loop = asyncio.get_running_loop()
        ranges = [range(first, min(first + size, count)) for first in range(0, count, size)]
        # One copy of the context each: none can be entered twice, and log lines of the threads want its trace.
        futures = [
            loop.run_in_executor(self._executor, contextvars.copy_context().run, work, part)
            for part in ranges
        ]
        return [result for part in await _all_of(futures) for result in part]

    async def call(self, work: Callable[[], T]) -> T:
        """Run one call in a thread."""
        context = contextvars.copy_context()
        [result] = await _all_of(
            [asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)]
        )
        return result

    def close(self) -> None:
        """Let the threads go; nothing may be under way."""
        self._executor.shutdown(wait=False)


async def to_the_end(futures: Iterable["asyncio.Future[T]"]) -> None:
    """Wait until all are done, even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    pending = set(futures)
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _all_of(futures: Sequence["asyncio.Future[T]"]) -> list[T]:
    await to_the_end(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
