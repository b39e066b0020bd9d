"""An agent that does what a test says, on real sockets: gRPC on `agent.sock`, SOCK_SEQPACKET on `fd.sock`.

Its "writing process" is a child of its own, so that a test can kill it. Answers are functions that a test replaces.
It checks nothing for the client's sake: what arrived is kept for the test to look at.
"""

import asyncio
import fcntl
import mmap
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import rpc

Answer = Callable[[Any, "Call"], Awaitable[Any]]
RING_BYTES = 1 << 16


class Refusal(Exception):
    """Raised by an answer: the status that the client gets."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


@dataclass
class Call:
    """One unary call as it arrived."""

    method: str
    request: Any
    metadata: dict[str, str]


@dataclass
class FakeSession:
    """One Attach."""

    request: pb.AttachRequest
    socket: socket.socket
    token: str
    outgoing: "asyncio.Queue[pb.ServerEvent | None]" = field(default_factory=asyncio.Queue)
    incoming: "asyncio.Queue[pb.ClientEvent]" = field(default_factory=asyncio.Queue)
    storages: list[int] = field(default_factory=list)
    ring: mmap.mmap | None = None

    def send(self, **event: Any) -> None:
        """Send one event, given as the field of ServerEvent that it sets."""
        self.outgoing.put_nowait(pb.ServerEvent(**event))

    def end(self) -> None:
        """End the stream; the descriptor socket stays open, as if something still held the memory."""
        self.outgoing.put_nowait(None)

    def let_go(self) -> None:
        """Close the descriptor socket: the proof that memory is unmapped."""
        self.socket.close()

    def ring_bytes(self) -> NDArray[np.uint8]:
        """The ring as the agent sees it."""
        assert self.ring is not None
        return np.frombuffer(self.ring, np.uint8)


class FakeAgent:
    """Started by `async with`; `restart` is another run of the agent on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epoch = 1
        self.mode = pb.MAPPED
        self.refuse: tuple[str, str] | None = None
        self.unsealed_ring = False
        self.calls: list[Call] = []
        self.sessions: asyncio.Queue[FakeSession] = asyncio.Queue()
        self.answers: dict[str, Answer] = {"Release": _fenced, "NoteFailure": _noted}
        self.attaches = 0
        self._open: list[FakeSession] = []
        self._connections: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE
        )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.folder / rpc.DESCRIPTOR_SOCKET))
        self._listener.listen(8)
        asyncio.get_running_loop().add_reader(self._listener, self._greet)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Attach": grpc.stream_stream_rpc_method_handler(
                self._attach,
                request_deserializer=pb.ClientEvent.FromString,
                response_serializer=pb.ServerEvent.SerializeToString,
            )
        }
        requests: dict[str, Any] = {
            "Lookup": pb.LookupRequest,
            "Resume": pb.ResumeRequest,
            "NoteFailure": pb.NoteFailureRequest,
            "Load": pb.LoadRequest,
            "Save": pb.SaveRequest,
            "Release": pb.ReleaseRequest,
            "Status": pb.StatusRequest,
        }
        for name, request in requests.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                self._unary(name),
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
        self.server.add_insecure_port(f"unix:{self.folder / rpc.RPC_SOCKET}")
        await self.server.start()

    async def stop(self) -> None:
        """End as a killed process does: sockets closed, the writer gone."""
        await self.vanish()
        await self.kill_writer()

    async def vanish(self) -> None:
        """Sockets closed, but the process that writes lives on."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await self.server.stop(None)
        for name in (rpc.DESCRIPTOR_SOCKET, rpc.RPC_SOCKET):
            (self.folder / name).unlink(missing_ok=True)

    def greet_nobody(self) -> None:
        """A client that comes from now on waits in vain."""
        asyncio.get_running_loop().remove_reader(self._listener)

    async def kill_writer(self) -> None:
        for session in self._open:
            session.let_go()
            for fd in session.storages:
                os.close(fd)
            session.storages.clear()
        self._open.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self.writer.returncode is None:
            self.writer.send_signal(signal.SIGKILL)
            await self.writer.wait()

    async def restart(self) -> None:
        await self.stop()
        self.epoch += 1
        await self.start()

    def called(self, method: str) -> list[Any]:
        """Requests of one method, in order."""
        return [call.request for call in self.calls if call.method == method]

    def _greet(self) -> None:
        connection, _ = self._listener.accept()
        token = secrets.token_bytes(rpc.TOKEN_BYTES)
        pidfd = os.pidfd_open(self.writer.pid)
        hello = struct.pack("<1s16sQ", rpc.HELLO, token, self.epoch)
        socket.send_fds(connection, [hello], [pidfd])
        os.close(pidfd)
        self._connections[token.hex()] = connection

    def _unary(self, name: str) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            call = Call(name, request, dict(context.invocation_metadata()))
            self.calls.append(call)
            try:
                return await self.answers[name](request, call)
            except Refusal as refusal:
                await context.abort(refusal.code, refusal.details)

        return handle

    async def _attach(
        self, events: AsyncIterator[pb.ClientEvent], context: Any
    ) -> AsyncIterator[pb.ServerEvent]:
        token = dict(context.invocation_metadata())[rpc.TOKEN_METADATA]
        request = (await anext(events)).attach
        self.attaches += 1
        if self.refuse is not None:
            yield pb.ServerEvent(refused=pb.Refused(reason=self.refuse[0], message=self.refuse[1]))
            return
        session = FakeSession(request, self._connections.pop(token), token)
        self._open.append(session)
        wanted = sum(storage.device == pb.CPU for storage in request.worker.storages)
        if wanted:
            yield pb.ServerEvent(descriptors_wanted=pb.DescriptorsWanted(count=wanted))
            while len(session.storages) < wanted:
                await _readable(session.socket)
                raw, fds, _, _ = socket.recv_fds(session.socket, 64, rpc.DESCRIPTORS_PER_MESSAGE)
                assert struct.unpack("<1sII", raw) == (rpc.STORAGES, len(session.storages), len(fds))
                session.storages += fds
        ready = pb.Ready(protocol=1, session=len(self._open), agent_version="fake", pool="ns.pool")
        if request.WhichOneof("role") == "worker":
            session.ring = self._send_ring(session)
            ready.mode, ready.ring_size = self.mode, RING_BYTES
        yield pb.ServerEvent(ready=ready)
        self.sessions.put_nowait(session)
        reader = asyncio.ensure_future(_pump(events, session.incoming))
        try:
            while (event := await session.outgoing.get()) is not None:
                yield event
        finally:
            reader.cancel()

    def _send_ring(self, session: FakeSession) -> mmap.mmap:
        fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, RING_BYTES)
        if not self.unsealed_ring:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        ring = mmap.mmap(fd, RING_BYTES)
        socket.send_fds(session.socket, [struct.pack("<1sQ", rpc.RING, RING_BYTES)], [fd])
        os.close(fd)
        return ring


async def _fenced(request: Any, call: Call) -> pb.ReleaseResponse:
    return pb.ReleaseResponse(state=pb.FENCED)


async def _noted(request: Any, call: Call) -> pb.NoteFailureResponse:
    return pb.NoteFailureResponse()


async def _pump(events: AsyncIterator[pb.ClientEvent], queue: "asyncio.Queue[pb.ClientEvent]") -> None:
    async for event in events:
        queue.put_nowait(event)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock)
