"""A client that speaks the wire by itself: what the agent is tested with, without the product's own client library.

Nothing is retried, nothing is checked: tests send what they like.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits, rpc

OPTIONS = (
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
RESPONSES: dict[str, Any] = {
    "Lookup": pb.LookupResponse,
    "Resume": pb.ResumeResponse,
    "NoteFailure": pb.NoteFailureResponse,
    "Load": pb.LoadResponse,
    "Save": pb.SaveResponse,
    "Release": pb.ReleaseResponse,
    "Status": pb.StatusResponse,
}


@dataclass
class Descriptors:
    """A connection to `fd.sock`, blocking."""

    sock: socket.socket
    token: bytes = b""
    epoch: int = 0
    pidfd: int = -1

    @classmethod
    def connect(cls, folder: Path) -> Descriptors:
        """Connect and take the greeting."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(str(folder / rpc.DESCRIPTOR_SOCKET))
        raw, fds, _, _ = socket.recv_fds(sock, 64, 4)
        if not raw:
            sock.close()
            raise ConnectionResetError("turned away")
        kind, token, epoch = struct.unpack(f"<1s{rpc.TOKEN_BYTES}sQ", raw)
        assert kind == rpc.HELLO
        return cls(sock, token, epoch, fds[0])

    def send_storages(self, fds: Sequence[int], *, first: int = 0, count: int | None = None) -> None:
        """One STORAGES message."""
        head = struct.pack("<1sII", rpc.STORAGES, first, len(fds) if count is None else count)
        socket.send_fds(self.sock, [head], list(fds))

    def ring(self) -> tuple[int, int]:
        """Descriptor and size of the ring."""
        raw, fds, _, _ = socket.recv_fds(self.sock, 64, 4)
        kind, size = struct.unpack("<1sQ", raw)
        assert kind == rpc.RING
        return fds[0], size

    def close(self) -> None:
        """Close what is open; idempotent."""
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass
class Client:
    """One session, or the attempt at one."""

    folder: Path
    descriptors: Descriptors
    channel: grpc.aio.Channel
    stream: Any = None
    ready: pb.Ready = field(default_factory=pb.Ready)
    ring_fd: int = -1
    events: list[pb.ServerEvent] = field(default_factory=list)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What its calls carry."""
        return ((rpc.TOKEN_METADATA, self.descriptors.token.hex()),)

    async def call(
        self,
        name: str,
        request: Any,
        *,
        metadata: Sequence[tuple[str, str]] | None = None,
        more: Sequence[tuple[str, str]] = (),
    ) -> Any:
        """One unary call; raises grpc.aio.AioRpcError."""
        unary = self.channel.unary_unary(
            rpc.path(name),
            request_serializer=type(request).SerializeToString,
            response_deserializer=RESPONSES[name].FromString,
        )
        carried = self.metadata if metadata is None else metadata
        return await unary(request, timeout=30, metadata=(*carried, *more))

    def open_stream(self, metadata: Sequence[tuple[str, str]] | None = None) -> None:
        """Begin the Attach call."""
        method = self.channel.stream_stream(
            rpc.path("Attach"),
            request_serializer=pb.ClientEvent.SerializeToString,
            response_deserializer=pb.ServerEvent.FromString,
        )
        self.stream = method(None, metadata=self.metadata if metadata is None else metadata)

    async def next(self, kind: str, seconds: float = 20.0) -> Any:
        """The next event of this kind; others before it are kept in `events`."""
        async with asyncio.timeout(seconds):
            while True:
                event = await self.stream.read()
                assert isinstance(event, pb.ServerEvent), f"stream ended: {await self.stream.code()}"
                if event.WhichOneof("event") == kind:
                    return getattr(event, kind)
                self.events.append(event)

    async def attach(self, request: pb.AttachRequest, storages: Sequence[int] = ()) -> pb.Ready:
        """The whole sequence; AssertionError with the refusal if there is one."""
        self.open_stream()
        await self.stream.write(pb.ClientEvent(attach=request))
        while True:
            event = await asyncio.wait_for(self.stream.read(), 20)
            assert isinstance(event, pb.ServerEvent), f"stream ended: {await self.stream.code()}"
            match event.WhichOneof("event"):
                case "descriptors_wanted":
                    self.descriptors.send_storages(storages)
                case "refused":
                    raise Refused(event.refused.reason, event.refused.message)
                case _:
                    break
        self.ready = event.ready
        if self.ready.ring_size:
            self.ring_fd, size = self.descriptors.ring()
            assert size == self.ready.ring_size
        return self.ready

    async def close(self) -> None:
        """End the session and close what is open."""
        if self.stream is not None:
            self.stream.cancel()
        await self.channel.close(None)
        self.descriptors.close()
        if self.ring_fd >= 0:
            os.close(self.ring_fd)
            self.ring_fd = -1


class Refused(Exception):
    """The agent's refusal."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@asynccontextmanager
async def client(folder: Path) -> AsyncIterator[Client]:
    """A client with a token and no session yet."""
    channel = grpc.aio.insecure_channel(f"unix:{folder / rpc.RPC_SOCKET}", options=OPTIONS)
    one = Client(folder, Descriptors.connect(folder), channel)
    try:
        yield one
    finally:
        await one.close()
