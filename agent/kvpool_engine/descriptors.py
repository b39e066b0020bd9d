"""The descriptor socket from the client's side: token and pidfd in, storages out, the ring in.

One connection belongs to one session. Every wait takes part in the caller's deadline; every descriptor that arrives is
owned by somebody or closed before an exception leaves this module (CRASH_ONLY: nothing leaks across re-attachments).
"""

import array
import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvpool_engine.errors import AgentUnavailableError
from kvpool_wire import rpc

_HELLO = struct.Struct(f"<1s{rpc.TOKEN_BYTES}sQ")
_STORAGES = struct.Struct("<1sII")
_RING = struct.Struct("<1sQ")
_LONGEST_PATH = 107
"""sun_path has 108 bytes, the last of them zero."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the agent says first."""

    token: bytes
    epoch: int
    """Differs between two runs of the agent."""
    pidfd: int
    """Of the process that writes engine memory; readable once that process is gone."""


class DescriptorSocket:
    """One connection to the agent's descriptor socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    async def connect(cls, folder: Path) -> Self:
        """Connect to the socket in the pool's folder.

        Raises:
            AgentUnavailableError: nobody listens there, or the path is too long for a Unix socket.
        """
        path = folder / rpc.DESCRIPTOR_SOCKET
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise AgentUnavailableError(
                f"{path}: longer than the {_LONGEST_PATH} bytes of a Unix socket's path"
            )
        sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        except OSError as error:
            sock.close()
            raise AgentUnavailableError(
                f"{path}: {error.strerror}; is the pool's agent running here?"
            ) from error
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def hello(self) -> Hello:
        """Receive the session's token and the writer's pidfd."""
        raw, pidfd = await self._receive_one(_HELLO.size)
        kind, token, epoch = _HELLO.unpack(raw)
        if kind != rpc.HELLO:
            os.close(pidfd)
            raise AgentUnavailableError(f"descriptor socket: expected HELLO, got a message of kind {kind!r}")
        return Hello(token, epoch, pidfd)

    async def send_storages(self, fds: Sequence[int]) -> None:
        """Send one descriptor per CPU storage, in storage order."""
        for first in range(0, len(fds), rpc.DESCRIPTORS_PER_MESSAGE):
            some = list(fds[first : first + rpc.DESCRIPTORS_PER_MESSAGE])
            await self._ready(write=True)
            try:
                socket.send_fds(self._sock, [_STORAGES.pack(rpc.STORAGES, first, len(some))], some)
            except OSError as error:
                raise AgentUnavailableError(
                    f"descriptor socket: sending storages failed: {error.strerror}"
                ) from error

    async def ring(self) -> tuple[int, int]:
        """Receive the session's ring: (descriptor, size in bytes). The caller owns the descriptor."""
        raw, fd = await self._receive_one(_RING.size)
        kind, size = _RING.unpack(raw)
        if kind != rpc.RING:
            os.close(fd)
            raise AgentUnavailableError(f"descriptor socket: expected RING, got a message of kind {kind!r}")
        return fd, size

    @property
    def raw(self) -> socket.socket:
        """The socket itself, for `proof.WriterWatch`, which watches for its end."""
        return self._sock

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    async def _receive_one(self, length: int) -> tuple[bytes, int]:
        """One message of exactly `length` bytes with exactly one descriptor."""
        await self._ready(write=False)
        room = array.array("i").itemsize * rpc.DESCRIPTORS_PER_MESSAGE
        try:
            raw, ancillary, flags, _ = self._sock.recvmsg(
                length + 1, socket.CMSG_SPACE(room), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except OSError as error:
            raise AgentUnavailableError(f"descriptor socket: {error.strerror}") from error
        fds = _descriptors(ancillary)
        if len(fds) == 1 and len(raw) == length and not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            return raw, fds[0]
        for fd in fds:
            os.close(fd)
        if not raw:
            raise AgentUnavailableError("descriptor socket: the agent closed the connection")
        raise AgentUnavailableError(
            f"descriptor socket: {len(raw)} bytes with {len(fds)} descriptors where {length} with 1 belong; "
            "agent and client are of different protocols"
        )

    async def _ready(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = (
            (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        )
        add(self._sock, _wake, ready)
        try:
            await ready
        finally:
            remove(self._sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
