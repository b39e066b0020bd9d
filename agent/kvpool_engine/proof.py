"""FENCED after a session's end: proof that the agent no longer touches this engine's memory.

Two facts prove it. The agent's writing process is gone: its pidfd says so, which no reused process id can fool. Or the
agent has closed its end of the descriptor socket, which it does last of all, after its copies have ended and the memory
is unmapped (the kernel closes it in that order, too, when the process dies). Time proves nothing.
"""

import asyncio
import os
import select
import socket


class WriterWatch:
    """Waits for either proof; owns the pidfd and the descriptor socket until `close`."""

    def __init__(self, pidfd: int, sock: socket.socket) -> None:
        self._pidfd = pidfd
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._proven: asyncio.Future[None] = self._loop.create_future()
        self._readers: list[int | socket.socket] = [pidfd]
        self._loop.add_reader(pidfd, self._prove)

    def watch_socket(self) -> None:
        """From now on nothing is expected on the socket but its end."""
        if not self._proven.done():
            self._readers.append(self._socket)
            self._loop.add_reader(self._socket, self._hear)

    @property
    def proven(self) -> bool:
        """True once the agent is known to keep its hands off; asks the kernel, not only what the loop has heard."""
        if not self._proven.done() and self._pidfd >= 0 and select.select([self._pidfd], [], [], 0)[0]:
            self._prove()
        return self._proven.done()

    async def wait(self) -> None:
        """Return when `proven` holds."""
        await asyncio.shield(self._proven)

    def close(self) -> None:
        """Stop watching. What was not proven then never will be, to this watch."""
        self._stop_reading()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._socket.close()
            self._pidfd = -1

    def _stop_reading(self) -> None:
        while self._readers:
            self._loop.remove_reader(self._readers.pop())

    def _prove(self) -> None:
        # The descriptors stay open: an attach that is under way still waits on the socket, and learns there of its end.
        self._stop_reading()
        if not self._proven.done():
            self._proven.set_result(None)

    def _hear(self) -> None:
        try:
            message = self._socket.recv(1)
        except BlockingIOError:
            return
        except OSError:
            message = b""  # reset by the other end: closed all the same
        # A message is not the end; its descriptors, if any, are dropped by the kernel.
        if not message:
            self._prove()
