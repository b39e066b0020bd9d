"""Transfers on the engine's side: the handle that a caller waits on.

A handle resolves exactly once, at the latest at the deadline that its caller gave (BOUNDED); whoever resolves it second
is told so and changes nothing. It holds no connection: it outlives the session that began it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpool_engine.types import ChunkFailure, FailReason, IpcEvent, TransferKind, TransferResult

GRACE: Final = 1.0
"""Seconds beyond a deadline after which the loop that keeps it is taken to be stuck."""


class Transfer:
    """One load or save under way. `await transfer` or `transfer.wait()` gives its `TransferResult`.

    Made, and resolved, on the thread of the client's loop.
    """

    def __init__(
        self,
        *,
        kind: TransferKind,
        request_id: str,
        chunks: Sequence[NDArray[np.int64]],
        blocks: Sequence[NDArray[np.int32]],
        fallback_length: int,
        deadline: float,
        after: IpcEvent | None = None,
    ) -> None:
        self.kind = kind
        self.request_id = request_id
        self.id = 0
        """The agent's id of the transfer; 0 until it has one."""
        self.session: object = None
        """The worker session that began it."""
        self.chunks = tuple(chunks)
        """Loads: per group, the chunks that are to arrive."""
        self.blocks = tuple(blocks)
        """Per group, the block ids that the transfer may touch."""
        self.fallback_length = fallback_length
        """Loads: resume length when nothing is known to have arrived."""
        self.after = after
        self.stopped = threading.Event()
        """Set by a release: no further copy of this transfer begins."""
        self._last = time.monotonic() + deadline + GRACE
        self._future: Future[TransferResult] = Future()
        self._owner = threading.get_ident()

    def done(self) -> bool:
        """True once the result is there."""
        return self._future.done()

    def result(self) -> TransferResult:
        """The result of a transfer that is done.

        Raises:
            RuntimeError: if it is not.
        """
        if not self._future.done():
            raise RuntimeError(
                f"transfer {self.id} of {self.request_id!r} is still under way; wait for it first"
            )
        return self._future.result()

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Block the calling thread until the transfer has ended; its deadline bounds that.

        Args:
            timeout: seconds; None leaves it to the transfer's own deadline.

        Raises:
            TimeoutError: `timeout` passed first, and the transfer goes on; or the loop that has to keep its deadline is
                stuck (BOUNDED: the engine does not wait for that either).
            RuntimeError: called on the client's own event-loop thread, where it would wait for itself.
        """
        if self._owner == threading.get_ident() and not self._future.done():
            raise RuntimeError(
                "wait() blocks the event loop that ends the transfer; await the transfer instead"
            )
        return self._future.result(max(0.0, self._last - time.monotonic()) if timeout is None else timeout)

    def __await__(self) -> Generator[None, None, TransferResult]:
        # Shielded: a caller that gives up waiting does not end the transfer.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` once the result is there, on the thread that sets it."""
        self._future.add_done_callback(lambda _: call())

    def resolve(self, result: TransferResult) -> bool:
        """Set the result; False if there was one already. Called on the owning loop's thread only."""
        if self._future.done():
            return False
        self._future.set_result(result)
        return True

    def fail_all(self, reason: FailReason, error: str, *, withheld: bool = False) -> bool:
        """Report every chunk as failed (LOADED_OR_REPORTED: what is not known to have arrived has not)."""
        failed = tuple(
            ChunkFailure(group, int(chunk), reason)
            for group, chunks in enumerate(self.chunks)
            for chunk in chunks
        )
        return self.resolve(
            TransferResult(
                transfer=self.id,
                kind=self.kind,
                request_id=self.request_id,
                failed=failed,
                resume_length=self.fallback_length,
                error=error,
                withheld=withheld,
            )
        )

    def nothing(self, resume_length: int) -> bool:
        """Report a load of which no chunk has to arrive on this rank."""
        return self.resolve(
            TransferResult(
                transfer=0, kind=self.kind, request_id=self.request_id, resume_length=resume_length
            )
        )

    def skip(self, why: str) -> bool:
        """Report that there was nothing to do, and why."""
        return self.resolve(
            TransferResult(transfer=0, kind=self.kind, request_id=self.request_id, skipped=why)
        )
