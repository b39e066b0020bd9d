"""Keeps a session with the node's agent alive: attaches, notices its end, attaches again.

It waits between attempts with full jitter, so that the engines of a node do not all call at once when its agent comes
back. It never gives up before it is closed, also not on a refusal: the agent may be upgraded under a running engine.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvpool_engine.errors import AgentUnavailableError, AttachRefusedError, KvpoolError
from kvpool_engine.session import Session
from kvpool_engine.types import Notice, NoticeKind

logger = logging.getLogger(__name__)

MAX_NOTICES: Final = 64
"""An engine that never reads its notices keeps the newest ones."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between attempts: uniform in [0, min(longest, first * 2**n)], at least `first` / 2."""

    first: float = 0.1
    longest: float = 5.0
    refused: float = 30.0
    """After a refusal: nothing changes until somebody changes something."""
    attach_timeout: float = 10.0
    """One attempt, from connecting to Ready; the agent maps the engine's memory within it."""

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 0)."""
        ceiling = min(self.longest, self.first * 2 ** min(attempt, 16))
        return max(self.first / 2, rng.uniform(0, ceiling))


Open = Callable[[], Awaitable[Session]]
Begin = Callable[[Session], None]
End = Callable[[Session], Awaitable[None]]


class Link:
    """The supervisor of a client's sessions."""

    def __init__(self, *, opened: Open, begin: Begin, end: End, backoff: Backoff, rng: random.Random) -> None:
        self._open = opened
        self._begin = begin
        self._end = end
        self._backoff = backoff
        self._rng = rng
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self.session: Session | None = None
        self.last_error: KvpoolError | None = None
        self.attachments = 0
        self.notices: deque[Notice] = deque(maxlen=MAX_NOTICES)

    def start(self) -> None:
        """Begin to attach in the background; a second call changes nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="kvpool-link")

    async def attached(self, timeout: float) -> Session:
        """Wait for a session.

        Raises:
            AttachRefusedError: the agent's latest answer.
            AgentUnavailableError: none within `timeout` seconds; attempts go on in the background.
        """
        self.start()
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(
                    lambda: self.session is not None or isinstance(self.last_error, AttachRefusedError)
                )
        except TimeoutError:
            raise AgentUnavailableError(f"not attached within {timeout:g} s: {self.last_error}") from None
        if self.session is not None:
            return self.session
        raise self.last_error or AgentUnavailableError("not attached")

    async def close(self) -> None:
        """End the session, if there is one, and every further attempt."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        attempt = 0
        while True:
            session = await self._try_attach()
            if session is None:
                refused = isinstance(self.last_error, AttachRefusedError)
                delay = self._backoff.refused if refused else self._backoff.delay(attempt, self._rng)
                attempt += 1
            else:
                attempt = 0
                try:
                    await session.ended.wait()
                finally:
                    self.session = None
                    await self._end(session)
                self._note(Notice(NoticeKind.DETACHED, session.end_reason))
                delay = self._backoff.delay(0, self._rng)
            await asyncio.sleep(delay)

    async def _try_attach(self) -> Session | None:
        try:
            async with asyncio.timeout(self._backoff.attach_timeout):
                session = await self._open()
            await self._begin_or_close(session)
        except TimeoutError:
            error: KvpoolError = AgentUnavailableError(
                f"attach took longer than {self._backoff.attach_timeout:g} s"
            )
        except KvpoolError as found:
            error = found
        else:
            ready = session.ready
            self._note(Notice(NoticeKind.ATTACHED, f"session {ready.session}, agent {ready.agent_version}"))
            self.attachments += 1
            await self._publish(session, None)
            return session
        await self._publish(None, error)
        if isinstance(error, AttachRefusedError):
            self._note(Notice(NoticeKind.REFUSED, str(error)))
        return None

    async def _begin_or_close(self, session: Session) -> None:
        try:
            self._begin(session)
        except BaseException:
            await session.close("the client could not use it")
            session.writer.close()
            raise

    async def _publish(self, session: Session | None, error: KvpoolError | None) -> None:
        async with self._changed:
            self.session = session
            self.last_error = error
            self._changed.notify_all()

    def _note(self, notice: Notice) -> None:
        self.notices.append(notice)
        level = logging.INFO if notice.kind is NoticeKind.ATTACHED else logging.WARNING
        logger.log(level, "kvpool %s: %s", notice.kind.value, notice.detail)
