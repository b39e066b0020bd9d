"""The sessions of one agent: found by token, counted, ended.

Promises: a token finds its session from Ready until its end, and nothing after; every session that was added is closed,
at the latest by `close_all`; a worker session is known to its engine until nothing of it touches blocks any more
(FENCED), for ever if that cannot be known. Event loop only; the counts may be read from any thread.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

from kvpool_agent.server.session import Session, WorkerSession
from kvpool_wire import agent_pb2 as pb

log = logging.getLogger(__name__)


class Sessions:
    """All sessions; at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_token: dict[bytes, Session] = {}
        self._ending: list[WorkerSession] = []
        """Those that take no calls any more, but may still touch blocks."""
        self._reserved = 0
        self._numbers = 0

    def __iter__(self) -> Iterator[Session]:
        """All of them, in the order of their beginning."""
        return iter(list(self._by_token.values()))

    def __len__(self) -> int:
        """Sessions now, with those that are just being opened, and those that could not be ended (BOUNDED)."""
        return len(self._by_token) + self._reserved + sum(one.fence_failed for one in self._ending)

    def reserve(self) -> int | None:
        """A number for a session that is being opened, None at the limit. `add` or `unreserve` follows."""
        if len(self) >= self._limit:
            return None
        self._reserved += 1
        self._numbers += 1
        return self._numbers

    def unreserve(self) -> None:
        """The session was not opened after all."""
        self._reserved -= 1

    def add(self, session: Session) -> None:
        """The session is open."""
        self._reserved -= 1
        self._by_token[session.token] = session

    def find(self, token: bytes) -> Session | None:
        """The session that was opened with `token`."""
        return self._by_token.get(token)

    def workers_of(self, engine_id: str) -> list[WorkerSession]:
        """The worker sessions of one engine on this node, also those that are ending (FENCED)."""
        self._ending = [one for one in self._ending if not one.gone]
        found = [one for one in self if isinstance(one, WorkerSession)] + self._ending
        return [one for one in found if one.engine_id == engine_id]

    async def close(self, session: Session) -> None:
        """End one session; returns when nothing of it is left."""
        self._ending = [one for one in self._ending if not one.gone]
        if self._by_token.pop(session.token, None) is not None and isinstance(session, WorkerSession):
            self._ending.append(session)
        await session.close()
        log.info(
            "session ended: %s",
            session.end_reason,
            extra={"session": session.number, "role": session.role, "engine": session.engine_id},
        )

    async def close_all(self, reason: str) -> None:
        """End all of them, side by side."""
        for session in self:
            session.end(reason)
        await asyncio.gather(*(self.close(session) for session in self))

    def broadcast(self, event: pb.ServerEvent) -> None:
        """Send one event to every client."""
        for session in self:
            session.outbox.put(event)

    def counts(self) -> dict[str, int]:
        """Sessions by role; workers by mode."""
        found = Counter(one.mode if isinstance(one, WorkerSession) else one.role for one in self)
        return {role: found[role] for role in ("scheduler", "mapped", "copy")}

    def in_flight(self) -> int:
        """Transfers accepted and not reported, of all sessions."""
        return sum(one.manager.in_flight for one in self if isinstance(one, WorkerSession))
