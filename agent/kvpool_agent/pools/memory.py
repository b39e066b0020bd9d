"""Shared memory files that nobody can pull from under a mapping: memfds sealed against resizing.

Promises: what `create` returns has its final size for ever; what `map_foreign` maps cannot be truncated by its owner
(reading a truncated file would kill this process with SIGBUS); closing frees the mapping and the descriptor, and a
process that is killed leaves nothing behind (CRASH_ONLY), since a memfd has no name.
Refuses: files that could still shrink, and to close while somebody holds a view.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Self

from kvpool_agent.pools.pool import PoolError

_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_ONLY = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


class SealedMemory:
    """A sealed memory file and a writable mapping of all of it.

    Attributes:
        size: bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Take over `fd`, which must be sealed; use `create` or `map_foreign`."""
        self.size = size
        self._fd = fd
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise PoolError(f"cannot map {size} bytes of shared memory for writing: {error}") from error
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """A new memory file of `size` zero bytes; `name` only shows in /proc.

        Raises:
            PoolError: the kernel refused; the message carries its reason.
        """
        if size < 1:
            raise PoolError(f"shared memory {name!r} of {size} bytes: at least 1 is needed")
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise PoolError(f"cannot make shared memory {name!r}: {error}") from error
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _RESIZE | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise PoolError(f"cannot size shared memory {name!r} to {size} bytes: {error}") from error
        return cls(fd, size)

    @classmethod
    def map_foreign(cls, fd: int, size: int) -> Self:
        """Map the first `size` bytes of a file that another process made; `fd` is duplicated, the caller keeps its own.

        Raises:
            PoolError: the file is no memory file, is not sealed against shrinking and growing, is sealed against
                writing, is shorter than `size`, or cannot be mapped for writing.
        """
        try:
            status = os.fstat(fd)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise PoolError(
                f"descriptor {fd} is no memory file: {error}; pass one made by memfd_create"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise PoolError(f"descriptor {fd} is no memory file; pass one made by memfd_create")
        if seals & _RESIZE != _RESIZE:
            raise PoolError(
                f"the memory file is not sealed against resizing (seals {seals:#x}); add F_SEAL_SHRINK and F_SEAL_GROW"
                " before passing it"
            )
        if seals & _READ_ONLY:
            raise PoolError(
                f"the memory file is sealed against writing (seals {seals:#x}); loads could not write it"
            )
        if not 1 <= size <= status.st_size:
            raise PoolError(
                f"the memory file has {status.st_size} bytes, the storage in it was declared with {size}"
            )
        return cls(os.dup(fd), size)

    @property
    def fd(self) -> int:
        """The descriptor; owned by this object.

        Raises:
            PoolError: it is closed.
        """
        if self._fd < 0:
            raise PoolError("the shared memory is closed")
        return self._fd

    @property
    def view(self) -> memoryview:
        """All bytes, writable. Release what is derived from it before `close`.

        Raises:
            PoolError: it is closed.
        """
        if self._fd < 0:
            raise PoolError("the shared memory is closed")
        return self._view

    @property
    def closed(self) -> bool:
        """Whether `close` has succeeded."""
        return self._fd < 0

    def close(self) -> None:
        """Unmap and close; closing again does nothing.

        Raises:
            PoolError: a view of the memory is still held; nothing was closed, release the view and call again.
        """
        if self._fd < 0:
            return
        self._view.release()
        try:
            self._map.close()
        except BufferError as error:
            self._view = memoryview(self._map)
            raise PoolError("a view of the shared memory is still held; release it before closing") from error
        os.close(self._fd)
        self._fd = -1
