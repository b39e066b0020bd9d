"""One session with one run of the agent: attach, calls, events, end.

A session begins with everything in order or not at all, and ends once: when its stream breaks, when the agent's process
is gone, or when it is closed. It never comes back; `link.Link` begins the next one.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvpool_engine.descriptors import DescriptorSocket, Hello
from kvpool_engine.errors import AgentUnavailableError, AttachRefusedError, RequestRejectedError
from kvpool_engine.proof import WriterWatch
from kvpool_engine.tracing import with_trace
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits, rpc

logger = logging.getLogger(__name__)

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # A connection of its own for every session: a shared one would carry the old agent's failure into the new session.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

_LAST_WORDS: Final = 0.1
"""Seconds that an ended session waits for its stream to say why."""

_CERTAIN: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.ABORTED,
    }
)
"""Answers that an agent gives before it touches anything; after any other one nobody knows."""

_REJECTED: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})


class CallError(Exception):
    """A call that got no good answer; inside the library only."""

    def __init__(self, method: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{method}: {code.name}: {details}")
        self.code = code
        self.details = details

    @property
    def timed_out(self) -> bool:
        """True when the call's deadline passed."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def uncertain(self) -> bool:
        """True when the agent may have begun what the call asked for."""
        return self.code not in _CERTAIN

    def raise_if_rejected(self) -> None:
        """Raise what the caller has to hear: that its call was wrong in itself.

        Raises:
            RequestRejectedError: with the agent's own words.
        """
        if self.code in _REJECTED:
            raise RequestRejectedError(self.code.name, self.details) from self


EventHandler = Callable[[pb.ServerEvent], None]
Stream = grpc.aio.StreamStreamCall[pb.ClientEvent, pb.ServerEvent]


@dataclass(frozen=True, slots=True)
class Method:
    """One unary call of the service."""

    name: str
    response: type[Any]


LOOKUP: Final = Method("Lookup", pb.LookupResponse)
RESUME: Final = Method("Resume", pb.ResumeResponse)
NOTE_FAILURE: Final = Method("NoteFailure", pb.NoteFailureResponse)
LOAD: Final = Method("Load", pb.LoadResponse)
SAVE: Final = Method("Save", pb.SaveResponse)
RELEASE: Final = Method("Release", pb.ReleaseResponse)
STATUS: Final = Method("Status", pb.StatusResponse)


class Session:
    """An attached session. Use `attach`; every method belongs to the loop that attached it."""

    def __init__(self, channel: grpc.aio.Channel, socket: DescriptorSocket, hello: Hello) -> None:
        self.epoch = hello.epoch
        self.writer = WriterWatch(hello.pidfd, socket.raw)
        """Says when the agent no longer touches engine memory; closed by whoever waits for that last."""
        self.ready = pb.Ready()
        self.ring: tuple[int, int] | None = None
        """(descriptor, bytes) of the ring until somebody takes it; closed with the session otherwise."""
        self.end_reason = ""
        self.ended = asyncio.Event()
        self._channel = channel
        self._socket = socket
        self._metadata = ((rpc.TOKEN_METADATA, hello.token.hex()),)
        self._stream: Stream | None = None
        self._sending = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def attach(cls, folder: Path, request: pb.AttachRequest, *, storages: Sequence[int]) -> Self:
        """Run the attach sequence; the caller bounds it with `asyncio.timeout`.

        Raises:
            AgentUnavailableError: nobody there, or the connection broke on the way.
            AttachRefusedError: the agent's own words.
        """
        socket = await DescriptorSocket.connect(folder)
        try:
            hello = await socket.hello()
        except BaseException:
            socket.close()
            raise
        channel = grpc.aio.insecure_channel(f"unix:{folder / rpc.RPC_SOCKET}", options=_CHANNEL_OPTIONS)
        session = cls(channel, socket, hello)
        try:
            await session._open(request, storages)
        except BaseException:
            await session.close("attach failed")
            session.writer.close()
            raise
        return session

    async def _open(self, request: pb.AttachRequest, storages: Sequence[int]) -> None:
        method = self._channel.stream_stream(
            rpc.path("Attach"),
            request_serializer=pb.ClientEvent.SerializeToString,
            response_deserializer=pb.ServerEvent.FromString,
        )
        self._stream = method(None, metadata=self._metadata)
        try:
            await self._stream.write(pb.ClientEvent(attach=request))
            while True:
                event = await self._stream.read()
                if not isinstance(event, pb.ServerEvent):
                    raise await self._ended_early()
                match event.WhichOneof("event"):
                    case "descriptors_wanted":
                        await self._answer_wanted(event.descriptors_wanted.count, storages)
                    case "refused":
                        raise AttachRefusedError(event.refused.reason, event.refused.message)
                    case "ready":
                        break
                    case other:
                        raise AgentUnavailableError(f"attach: unexpected event {other!r} before Ready")
        except grpc.aio.AioRpcError as error:
            raise AgentUnavailableError(f"attach: {error.code().name}: {error.details()}") from error
        except asyncio.InvalidStateError as error:  # write on a stream that has just broken
            raise await self._ended_early() from error
        self.ready = event.ready
        if event.ready.ring_size:
            self.ring = await self._socket.ring()
        self.writer.watch_socket()

    async def _answer_wanted(self, count: int, storages: Sequence[int]) -> None:
        if count != len(storages):
            raise AgentUnavailableError(
                f"attach: the agent wants {count} descriptors, {len(storages)} were declared"
            )
        await self._socket.send_storages(storages)

    async def _ended_early(self) -> AgentUnavailableError:
        return AgentUnavailableError(f"attach: {await _end_of(self._stream)}")

    def take_ring(self) -> tuple[int, int] | None:
        """The ring's descriptor and size; the caller owns the descriptor from now on."""
        ring, self.ring = self.ring, None
        return ring

    def listen(self, handle: EventHandler) -> None:
        """Begin to hand events to `handle`, which must not block; `ended` is set when none will come any more."""
        self._reader = asyncio.get_running_loop().create_task(self._read(handle), name="kvpool-events")

    async def _read(self, handle: EventHandler) -> None:
        gone = asyncio.ensure_future(self.writer.wait())
        events = asyncio.ensure_future(self._read_stream(handle))
        try:
            await asyncio.wait((gone, events), return_when=asyncio.FIRST_COMPLETED)
            # The stream knows more about why, if it ends as well.
            await asyncio.wait((events,), timeout=_LAST_WORDS)
            why = events.result() if events.done() else "the agent let go of the session"
        finally:
            gone.cancel()
            events.cancel()
        self._finish(why)

    async def _read_stream(self, handle: EventHandler) -> str:
        stream = self._stream
        if stream is None:
            return "never attached"
        try:
            while isinstance(event := await stream.read(), pb.ServerEvent):
                handle(event)
            return await _end_of(stream)
        except grpc.aio.AioRpcError as error:
            return f"the stream broke: {error.code().name}: {error.details()}"

    def _finish(self, why: str) -> None:
        if not self.ended.is_set():
            self.end_reason = why
            self.ended.set()

    async def send(self, event: pb.ClientEvent) -> None:
        """Write one event to the stream; one that can no longer be sent is dropped, for the session is over then."""
        stream = self._stream
        if stream is None:
            return
        async with self._sending:
            try:
                await stream.write(event)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                logger.debug("event not sent, the stream is over: %s", error)

    async def call(self, method: Method, request: Message, *, timeout: float) -> Any:
        """One unary call, bounded by `timeout` seconds.

        Raises:
            CallError: whatever its status; the caller knows what it means.
        """
        unary = self._channel.unary_unary(
            rpc.path(method.name),
            request_serializer=type(request).SerializeToString,
            response_deserializer=method.response.FromString,
        )
        if timeout <= 0:
            raise CallError(method.name, grpc.StatusCode.DEADLINE_EXCEEDED, "no time was left to call")
        try:
            answer: Awaitable[Any] = unary(request, timeout=timeout, metadata=with_trace(self._metadata))
            return await answer
        except grpc.aio.AioRpcError as error:
            raise CallError(method.name, error.code(), error.details() or "") from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            # Closing the channel cancels its calls, which looks like a cancelled caller but is the session's end.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            raise CallError(
                method.name, grpc.StatusCode.UNAVAILABLE, f"session ended: {self.end_reason}"
            ) from error

    async def close(self, why: str) -> None:
        """End the session; the agent fences what it has under way. `writer` stays open: it says when that is done."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._stream is not None:
            self._stream.cancel()
        await self._channel.close(None)
        if (ring := self.take_ring()) is not None:
            os.close(ring[0])
        self._finish(why)


async def _end_of(stream: Stream | None) -> str:
    if stream is None:
        return "never attached"
    return f"the agent ended the stream: {(await stream.code()).name}: {await stream.details()}"
