"""What a scheduler's and a worker's asynchronous client share: identity, link, notices, status.

All methods belong to one event loop; the properties may be read from any thread.
"""

import random
from abc import ABC, abstractmethod
from pathlib import Path

from kvpool_engine import failures
from kvpool_engine.errors import AgentUnavailableError, ClientClosedError
from kvpool_engine.link import Backoff, Link
from kvpool_engine.session import NOTE_FAILURE, STATUS, CallError, Session
from kvpool_engine.types import FenceState, Geometry, Notice, NoticeKind
from kvpool_wire import PROTOCOLS, VERSION
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import check_identity


class Client(ABC):
    """What both roles share: the link to the agent."""

    def __init__(
        self, socket_dir: Path, identity: pb.Identity, engine_id: str, backoff: Backoff | None
    ) -> None:
        check_identity(identity)
        self._socket_dir = socket_dir
        self._identity = identity
        self._engine_id = engine_id
        self._geometry = Geometry.of(identity)
        self._failures = failures.join(engine_id)
        self._draining = False
        self._late = 0
        self._closed = False
        # Jitter, not secrecy.
        self._link = Link(
            opened=self._opened,
            begin=self._begin,
            end=self._end,
            backoff=backoff or Backoff(),
            rng=random.Random(),  # noqa: S311
        )

    def start(self) -> None:
        """Begin to attach in the background; other calls do so by themselves."""
        if not self._closed:
            self._link.start()

    async def connect(self, timeout: float = 10.0) -> None:
        """Wait until attached; see `kvpool_engine.client`."""
        self._check_open()
        await self._link.attached(timeout)

    async def status(self, *, deadline: float = 1.0) -> pb.StatusResponse:
        """The agent's account of itself; see `kvpool_engine.client`."""
        session = self._session()
        if session is None:
            raise AgentUnavailableError(
                f"no session with the agent in {self._socket_dir}: {self._link.last_error}"
            )
        try:
            response: pb.StatusResponse = await session.call(STATUS, pb.StatusRequest(), timeout=deadline)
        except CallError as error:
            raise AgentUnavailableError(f"status: {error}") from error
        return response

    async def note_failure(self, request_id: str, attempt: int, token: int, *, deadline: float = 1.0) -> bool:
        """Say that a load failed on some rank; see `kvpool_engine.client`."""
        self._failures.note(request_id, attempt, token)
        session = self._session()
        if session is None:
            return False
        request = pb.NoteFailureRequest(request_id=request_id, attempt=attempt, token=token)
        try:
            await session.call(NOTE_FAILURE, request, timeout=deadline)
        except CallError as error:
            error.raise_if_rejected()
            return False
        return True

    def notices(self) -> list[Notice]:
        """What happened to the session since the last call, oldest first."""
        taken: list[Notice] = []
        while self._link.notices:
            taken.append(self._link.notices.popleft())
        return taken

    @property
    def attached(self) -> bool:
        """True while there is a session."""
        return self._link.session is not None

    @property
    def draining(self) -> bool:
        """True from the agent's warning until its session ends."""
        return self._draining

    @property
    def late_events(self) -> int:
        """Events for a transfer that was over; dropped."""
        return self._late

    async def close(self, *, deadline: float = 5.0) -> FenceState:
        """Detach. A scheduler owns no blocks: always FENCED."""
        if not self._closed:
            failures.leave(self._engine_id)
        self._closed = True
        await self._link.close()
        return FenceState.FENCED

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the client is closed; make a new one")

    def _session(self) -> Session | None:
        """The present session; begins to attach if nobody did."""
        self._check_open()
        self._link.start()
        return self._link.session

    @abstractmethod
    def _request(self) -> tuple[pb.AttachRequest, tuple[int, ...]]:
        """What Attach sends, and the descriptors that go with it."""

    async def _opened(self) -> Session:
        request, storages = self._request()
        return await Session.attach(self._socket_dir, request, storages=storages)

    def _attach_request(self) -> pb.AttachRequest:
        return pb.AttachRequest(
            protocols=PROTOCOLS, engine_id=self._engine_id, identity=self._identity, client_version=VERSION
        )

    def _begin(self, session: Session) -> None:
        session.listen(self._handle)

    async def _end(self, session: Session) -> None:
        self._draining = False
        await session.close(session.end_reason or "closed")
        session.writer.close()

    def _handle(self, event: pb.ServerEvent) -> None:
        if event.WhichOneof("event") == "draining":
            self._draining = True
            left = event.draining.deadline_ms / 1000
            self._link.notices.append(
                Notice(NoticeKind.DRAINING, f"the agent drains within {left:g} s", left)
            )
