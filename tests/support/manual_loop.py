"""An event loop whose clock stands still until a test moves it: a deadline passes exactly when it is meant to."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class ManualLoop(asyncio.SelectorEventLoop):
    """Real threads and descriptors, a manual clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1_000.0

    def time(self) -> float:
        """Seconds, as far as the test has moved them."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock; timers that are due run in the next turn."""
        self._now += seconds
        self.call_soon(lambda: None)


def advance(seconds: float) -> None:
    """Move the clock of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)
    loop.advance(seconds)


async def turns(count: int = 20) -> None:
    """Let everything that is ready run, and what that makes ready."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Run turns of the loop until `condition` holds; threads get their time in between."""
    while not condition():
        await turns(1)


def manual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a `ManualLoop`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
