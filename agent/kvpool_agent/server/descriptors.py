"""The descriptor socket: hands out session tokens and the writer's pidfd, takes storages in, gives the ring out.

A SOCK_SEQPACKET Unix socket beside gRPC's, because gRPC cannot pass descriptors. Promises: a token opens one Attach and
no more; a token that nobody claims expires; the number of connections is bounded (BOUNDED); every descriptor that
arrives is owned by somebody or closed at once (CRASH_ONLY); nothing here ever blocks the event loop.
Refuses: to know sessions. What a descriptor is good for is checked by whoever maps it.
"""

import array
import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool_agent.errors import SessionRefused
from kvpool_wire import rpc

log = logging.getLogger(__name__)

_HELLO: Final = struct.Struct(f"<1s{rpc.TOKEN_BYTES}sQ")
_STORAGES: Final = struct.Struct("<1sII")
_RING: Final = struct.Struct("<1sQ")
_PEER: Final = struct.Struct("3i")
_BACKLOG: Final = 64
_ROOM: Final = socket.CMSG_SPACE(rpc.DESCRIPTORS_PER_MESSAGE * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says. The pid is 0 across pid namespaces."""

    pid: int
    uid: int
    gid: int


class Channel:
    """One client's connection; belongs to one token and then to one session."""

    def __init__(
        self, sock: socket.socket, token: bytes, peer: Peer, on_close: Callable[["Channel"], None]
    ) -> None:
        self.token: Final = token
        self.peer: Final = peer
        self._sock = sock
        self._on_close = on_close

    async def storages(self, count: int, *, seconds: float) -> list[int]:
        """Receive `count` descriptors in storage order; the caller owns them.

        Raises:
            SessionRefused: they did not come in time, not in order, or not whole.
        """
        fds: list[int] = []
        try:
            async with asyncio.timeout(seconds):
                while len(fds) < count:
                    await self._readable()
                    self._receive(fds, count)
        except TimeoutError as error:
            _close_all(fds)
            raise SessionRefused(
                "DescriptorsMissing",
                f"{len(fds)} of {count} storages arrived within {seconds:g} s on the descriptor socket",
            ) from error
        except BaseException:
            _close_all(fds)
            raise
        return fds

    def send_ring(self, fd: int, size: int) -> None:
        """Send the session's ring.

        Raises:
            SessionRefused: the client does not read its socket, or is gone.
        """
        try:
            socket.send_fds(self._sock, [_RING.pack(rpc.RING, size)], [fd])
        except OSError as error:
            raise SessionRefused(
                "DescriptorSocketBroken", f"the ring could not be sent: {error.strerror}"
            ) from error

    def hung_up(self) -> bool:
        """Whether the other end is gone. What it may have sent before its Attach stays where it is."""
        self.unwatch()
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def unwatch(self) -> None:
        """Let nobody be called any more when something arrives."""
        asyncio.get_running_loop().remove_reader(self._sock)

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._sock.fileno() >= 0:
            self._sock.close()
            self._on_close(self)

    def _receive(self, fds: list[int], count: int) -> None:
        try:
            # Not socket.recv_fds: Python 3.11 ignores its flags, and the descriptors would be inherited by workers.
            raw, ancillary, flags, _ = self._sock.recvmsg(_STORAGES.size + 1, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return  # a spurious wake-up
        except OSError as error:
            raise SessionRefused(
                "DescriptorSocketBroken", f"receiving storages failed: {error.strerror}"
            ) from error
        first, got = len(fds), _descriptors(ancillary)
        fds += got
        if not raw:
            raise SessionRefused(
                "DescriptorSocketBroken", "the client closed the descriptor socket before its storages came"
            )
        truncated = flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC)
        if (
            truncated
            or len(raw) != _STORAGES.size
            or _STORAGES.unpack(raw) != (rpc.STORAGES, first, len(got))
            or not got
        ):
            raise SessionRefused(
                "DescriptorsMalformed",
                f"a message of {len(raw)} bytes with {len(got)} descriptors where storages from {first} on belong; "
                f"send at most {rpc.DESCRIPTORS_PER_MESSAGE} a message, in storage order",
            )
        if len(fds) > count:
            raise SessionRefused(
                "DescriptorsMalformed", f"{len(fds)} descriptors arrived, {count} were asked for"
            )

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self._sock, wake)
        try:
            await ready
        finally:
            loop.remove_reader(self._sock)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class DescriptorServer:
    """Listens on `fd.sock` between `start` and `close`.

    Args:
        path: of the socket; nobody else listens there (`sockets.prepare`).
        epoch: differs between two runs of the agent.
        allowed_uids: who may connect; empty admits whoever the folder's permissions admit.
        token_timeout: seconds that a token waits for its Attach.
        max_connections: sessions and waiting tokens together.
    """

    def __init__(
        self,
        path: Path,
        *,
        epoch: int,
        allowed_uids: Collection[int],
        token_timeout: float,
        max_connections: int,
    ) -> None:
        self._path = path
        self._epoch = epoch
        self._allowed = frozenset(allowed_uids)
        self._token_timeout = token_timeout
        self._max_connections = max_connections
        self._waiting: dict[bytes, tuple[Channel, asyncio.TimerHandle]] = {}
        self._open: set[Channel] = set()
        self._listener: socket.socket | None = None
        self._pidfd = -1

    def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the socket cannot be made.
        """
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o660)
            listener.listen(_BACKLOG)
            # The writer of engine memory is this very process; its loaders touch the ring alone.
            self._pidfd = os.pidfd_open(os.getpid())
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def claim(self, token: bytes) -> Channel | None:
        """The connection that was given `token`; None if there is none, or it was claimed before."""
        found = self._waiting.pop(token, None)
        if found is None:
            return None
        channel, expiry = found
        expiry.cancel()
        channel.unwatch()
        return channel

    def waits(self, token: bytes) -> bool:
        """Whether `token` was handed out and is neither claimed nor expired."""
        return token in self._waiting

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._open)

    def close(self) -> None:
        """Stop listening and end every connection that no session owns; idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
            os.close(self._pidfd)
        for token in list(self._waiting):
            self._expire(token)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept on %s: %s; raise the limit of open files", self._path, error.strerror)
            return
        try:
            self._greet(sock)
        except OSError as error:
            sock.close()
            log.warning("client of %s went away at once: %s", self._path, error.strerror)

    def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = Peer(*_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))
        if self._allowed and peer.uid not in self._allowed:
            sock.close()
            log.warning("uid %d may not connect to %s; see socket.allowedUids", peer.uid, self._path)
            return
        if len(self._open) >= self._max_connections:
            sock.close()
            log.warning("more than %d connections; see socket.maxConnections", self._max_connections)
            return
        token = secrets.token_bytes(rpc.TOKEN_BYTES)
        socket.send_fds(sock, [_HELLO.pack(rpc.HELLO, token, self._epoch)], [self._pidfd])
        channel = Channel(sock, token, peer, self._forget)
        self._open.add(channel)
        expiry = asyncio.get_running_loop().call_later(self._token_timeout, self._expire, token)
        self._waiting[token] = (channel, expiry)
        asyncio.get_running_loop().add_reader(sock, self._stirred, channel)

    def _stirred(self, channel: Channel) -> None:
        """A waiting client sent something before its Attach, or went away: the latter frees its place at once."""
        if channel.hung_up():
            self._expire(channel.token)

    def _expire(self, token: bytes) -> None:
        channel = self.claim(token)
        if channel is not None:
            channel.close()

    def _forget(self, channel: Channel) -> None:
        self._open.discard(channel)
