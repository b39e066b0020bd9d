"""The engine's allocations as this library copies into and out of them.

One class per kind of memory, one method per direction. `part` is one strided copy of `kvpool_wire.strides`; the chunk's
side is always host memory, the session's ring. torch is touched only by the class whose tensors brought it.
"""

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool_wire.strides import Part

if TYPE_CHECKING:
    import torch


class Storage(Protocol):
    """One allocation."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def scatter(self, part: Part, block: int, payload: memoryview) -> None:
        """Payload to block."""
        ...

    def gather(self, part: Part, block: int, payload: memoryview) -> None:
        """Block to payload."""
        ...

    def flush(self) -> None:
        """Return when every copy of this library so far has happened."""
        ...

    def synchronise(self) -> None:
        """Return when whatever the device was doing has happened, whoever asked for it."""
        ...


def chunk_view(part: Part, payload: memoryview) -> NDArray[np.generic]:
    """The bytes of one part inside a chunk's payload."""
    kind = f"{'u' if part.itemsize == 1 else 'i'}{part.itemsize}"  # torch has no full set of unsigned types
    return np.ndarray(part.shape, kind, payload, part.chunk_offset, part.chunk_strides)


class HostStorage:
    """Host memory at an address; `owner` keeps it alive. `fd` is its sealed memory file, -1 if it is private."""

    def __init__(self, address: int, size: int, owner: object, fd: int = -1) -> None:
        self.address = address
        self.size = size
        self.fd = fd
        self._owner = owner
        self._memory = memoryview((ctypes.c_ubyte * size).from_address(address))

    def _view(self, part: Part, block: int) -> NDArray[np.generic]:
        kind = f"{'u' if part.itemsize == 1 else 'i'}{part.itemsize}"
        return np.ndarray(
            part.shape, kind, self._memory, part.offset + block * part.block_stride, part.strides
        )

    def scatter(self, part: Part, block: int, payload: memoryview) -> None:
        """Payload to block; releases the GIL while it copies."""
        self._view(part, block)[...] = chunk_view(part, payload)

    def gather(self, part: Part, block: int, payload: memoryview) -> None:
        """Block to payload."""
        chunk_view(part, payload)[...] = self._view(part, block)

    def flush(self) -> None:
        """Host copies have happened when they return."""

    def synchronise(self) -> None:
        """The host does nothing behind our back."""


class CudaStorage:
    """A torch CUDA allocation, copied on a stream of its own so that the engine's kernels are not held up."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        self.tensor = tensor
        """Any tensor on the storage; keeps it alive."""
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.address = storage.data_ptr()
        self._typed: dict[int, torch.Tensor] = {}
        self._stream: Any = None

    def scatter(self, part: Part, block: int, payload: memoryview) -> None:
        """Payload to block, enqueued on this storage's stream."""
        self._copy(part, block, payload, into_block=True)

    def gather(self, part: Part, block: int, payload: memoryview) -> None:
        """Block to payload."""
        self._copy(part, block, payload, into_block=False)

    def flush(self) -> None:
        """Wait for this storage's stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def synchronise(self) -> None:
        """Wait for the whole device."""
        import torch  # noqa: PLC0415 - the tensor brought it

        torch.cuda.synchronize(self.tensor.device)

    def _copy(self, part: Part, block: int, payload: memoryview, *, into_block: bool) -> None:
        import torch  # noqa: PLC0415 - the tensor brought it

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.tensor.device)  # type: ignore[no-untyped-call]
        width = part.itemsize
        strides = tuple(stride // width for stride in part.strides)
        first = (part.offset + block * part.block_stride) // width
        in_block = torch.as_strided(self._as_type(width), part.shape, strides, first)
        in_chunk = torch.from_numpy(chunk_view(part, payload))
        with torch.cuda.stream(self._stream):
            if into_block:
                in_block.copy_(in_chunk)
            else:
                in_chunk.copy_(in_block)

    def _as_type(self, width: int) -> "torch.Tensor":
        """The whole storage as elements of `width` bytes."""
        import torch  # noqa: PLC0415 - the tensor brought it

        if width not in self._typed:
            dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
            whole = torch.empty(0, dtype=dtype, device=self.tensor.device)
            self._typed[width] = whole.set_(self.tensor.untyped_storage(), 0, (self.size // width,), (1,))
        return self._typed[width]
