"""The folder of the sockets: one agent at a time, no leftovers of a killed one in the way (CRASH_ONLY).

Promises: what a killed agent left behind is removed, and only if nobody listens on it; a second agent on one folder is
refused. Refuses: to make the folder (its owner, group and mode decide who may connect, so somebody decided them) and to
remove anything that is not a socket.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from kvpool_agent.errors import StartFault
from kvpool_wire import rpc

LONGEST_PATH: Final = 107
"""`sun_path` has 108 bytes, the last of them zero."""

LOCK_FILE: Final = "agent.lock"
"""Held by `flock` while an agent serves the folder; the kernel lets go of it with the process."""


class SocketFolder:
    """Exclusive use of a socket folder, from construction until `close`.

    Raises:
        StartFault: the folder is not usable, or another agent serves it.
    """

    def __init__(self, folder: Path) -> None:
        self.rpc: Final = folder / rpc.RPC_SOCKET
        self.descriptors: Final = folder / rpc.DESCRIPTOR_SOCKET
        for path in (self.rpc, self.descriptors):
            length = len(os.fsencode(path))
            if length > LONGEST_PATH:
                raise StartFault(
                    f"{path} has {length} bytes; a Unix socket's path has at most {LONGEST_PATH}. "
                    "Choose a shorter socket.directory"
                )
        if not folder.is_dir():
            raise StartFault(
                f"socket.directory {folder} is no folder; make it, owned by the agent's user, mode 2750"
            )
        self._lock = self._take_lock(folder / LOCK_FILE)
        try:
            for kind, path in ((socket.SOCK_STREAM, self.rpc), (socket.SOCK_SEQPACKET, self.descriptors)):
                _remove_stale(path, kind)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Remove the sockets and let another agent in; idempotent."""
        if self._lock >= 0:
            self.rpc.unlink(missing_ok=True)
            self.descriptors.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    @staticmethod
    def _take_lock(path: Path) -> int:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StartFault(
                f"{path} cannot be made: {error.strerror}; the agent's user must own socket.directory"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise StartFault(
                f"another agent serves {path.parent}; stop it, or give this one a folder of its own"
            ) from error
        return lock


def _remove_stale(path: Path, kind: socket.SocketKind) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartFault(f"{path} is not a socket; remove it, or choose another socket.directory")
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody listens
        except OSError as error:
            raise StartFault(
                f"{path} cannot be probed: {error.strerror}; remove it if no agent serves it"
            ) from error
    raise StartFault(f"somebody listens on {path}; stop that agent, or choose another socket.directory")
