"""The Attach stream: a session from its first message to its end.

Promises: the session lives exactly as long as its stream; however that ends (the client closed it, died, does not read,
or broke the protocol; the agent drains), the session is closed before the handler is left. Refuses a token twice.
"""

import asyncio
import logging
from typing import Final

import grpc

from kvpool_agent.errors import SessionRefused
from kvpool_agent.server.attach import Attacher
from kvpool_agent.server.calls import Call, parse_event, token_of
from kvpool_agent.server.descriptors import Channel, DescriptorServer
from kvpool_agent.server.registry import Sessions
from kvpool_agent.server.session import Session, WorkerSession
from kvpool_agent.server.status import AgentStatus
from kvpool_agent.transfer.errors import CopyProtocolError
from kvpool_wire import agent_pb2 as pb

log = logging.getLogger(__name__)

DRAINING_TEXT: Final = "the agent is draining"


class SessionStreams:
    """Handler of `Attach`."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        descriptors: DescriptorServer,
        attacher: Attacher,
        status: AgentStatus,
        attach_seconds: float,
    ) -> None:
        self._sessions = sessions
        self._descriptors = descriptors
        self._attacher = attacher
        self._status = status
        self._attach_seconds = attach_seconds

    async def attach(self, _: object, context: Call) -> None:
        """The session: from its first message to the end of its stream."""
        channel = self._claim(context)
        if channel is None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "no unclaimed token in kvpool-token: connect to fd.sock, and attach with the token that it gives, once",
            )
        try:
            session = await self._open(channel, context)
        except BaseException:
            channel.close()
            raise
        if session is None:
            channel.close()
            return
        try:
            await self._serve(session, context)
        finally:
            await self._sessions.close(session)

    def _claim(self, context: Call) -> Channel | None:
        token = token_of(context)
        return self._descriptors.claim(token) if token is not None else None

    async def _open(self, channel: Channel, context: Call) -> Session | None:
        """Open a session and write Ready; None after a refusal."""
        try:
            async with asyncio.timeout(self._attach_seconds):
                event = parse_event(await context.read())
            if event is None or event.WhichOneof("event") != "attach":
                raise SessionRefused(
                    "AttachMissing", "the first message of the stream has to be an AttachRequest"
                )
            if self._status.draining:
                raise SessionRefused("Draining", DRAINING_TEXT)
            opened = await self._attacher.open(event.attach, channel, context.write)
        except TimeoutError:
            await _refuse(
                context, "AttachMissing", f"no AttachRequest came within {self._attach_seconds:g} s"
            )
            return None
        except SessionRefused as error:
            await _refuse(context, error.reason, str(error))
            return None
        session = opened.session
        try:
            await context.write(pb.ServerEvent(ready=opened.ready))
        except BaseException:
            session.end("the client went away before Ready")
            await self._sessions.close(session)
            raise
        log.info(
            "session begun",
            extra={
                "session": session.number,
                "role": session.role,
                "engine": session.engine_id,
                "identity": session.keyspace.digest.hex(),
                "uid": channel.peer.uid,
                "mode": session.mode if isinstance(session, WorkerSession) else "",
                "mode_reason": opened.ready.mode_reason,
            },
        )
        return session

    async def _serve(self, session: Session, context: Call) -> None:
        """Move events both ways until one side is over."""
        tasks = [
            asyncio.ensure_future(self._read_events(session, context)),
            asyncio.ensure_future(_write_events(session, context)),
            asyncio.ensure_future(session.outbox.overflowed.wait()),
            asyncio.ensure_future(session.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if session.outbox.overflowed.is_set():
                session.end("the client does not read its events")
            for task in tasks[:2]:
                if task.done() and task.exception() is not None:
                    session.end(f"the stream broke: {task.exception()}")
            session.end("the client closed the stream")
        except asyncio.CancelledError:
            session.end("the client went away")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_events(self, session: Session, context: Call) -> None:
        while (event := parse_event(await context.read())) is not None:
            if event.WhichOneof("event") == "copy_done" and isinstance(session, WorkerSession):
                try:
                    session.copy_done(event.copy_done)
                except CopyProtocolError as error:
                    session.end(f"copy protocol broken: {error}")
                    return


async def _write_events(session: Session, context: Call) -> None:
    while True:
        await context.write(await session.outbox.get())


async def _refuse(context: Call, reason: str, message: str) -> None:
    log.warning("attach refused: %s: %s", reason, message)
    await context.write(pb.ServerEvent(refused=pb.Refused(reason=reason, message=message)))
