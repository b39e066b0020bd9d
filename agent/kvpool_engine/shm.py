"""Memory that an agent can map: memory files sealed against resizing, and numpy or torch tensors on them.

An engine that wants mapped mode on a CPU allocates its KV here *before* views of it are made: moving a tensor later
leaves earlier views behind. Foreign memory is mapped only if sealed: whoever could shrink it could kill this process.
"""

import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvpool_engine.errors import DeclarationError

if TYPE_CHECKING:
    import torch

_NO_RESIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SealedStorage:
    """One anonymous memory file with a fixed size, mapped here and mappable by the agent.

    The memory lives as long as any tensor on it, here or any mapping in the agent.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.size = len(mapping)
        """Bytes."""
        self.buffer = memoryview(mapping)
        self.address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]

    @classmethod
    def create(cls, size: int, *, name: str = "kvpool-kv") -> Self:
        """Allocate `size` bytes, zero.

        Args:
            size: bytes, at least 1.
            name: shown in /proc/PID/maps.

        Raises:
            ValueError: a size below 1.
            OSError: the kernel refused, or memory is short.
        """
        if size < 1:
            raise ValueError(f"a storage of {size} bytes; at least 1 is needed")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NO_RESIZE | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping)

    def numpy(self, shape: tuple[int, ...], dtype: DTypeLike, *, offset: int = 0) -> NDArray[np.generic]:
        """A writable array at byte `offset`; several may share the storage."""
        return np.ndarray(shape, dtype, self.buffer, offset)

    def torch(self, shape: tuple[int, ...], dtype: "torch.dtype", *, offset: int = 0) -> "torch.Tensor":
        """A writable CPU tensor at byte `offset`; all tensors of one storage lie in one torch storage range."""
        import torch  # noqa: PLC0415 - an engine without torch never comes here

        count = int(np.prod(shape, dtype=np.int64))
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Close the descriptor; tensors and mappings stay valid. No further attach can share the storage."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_sealed(fd: int, size: int) -> mmap.mmap:
    """Map foreign memory that cannot shrink under us; `fd` stays the caller's.

    Raises:
        DeclarationError: an unsealed or short file.
    """
    found = os.fstat(fd).st_size
    if found < size:
        raise DeclarationError(f"shared memory of {found} bytes where {size} were announced")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise DeclarationError(
            "shared memory that is not sealed against shrinking; its owner could crash this process"
        )
    return mmap.mmap(fd, size)
