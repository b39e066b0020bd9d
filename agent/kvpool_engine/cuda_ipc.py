"""IPC handles of CUDA allocations, asked of the driver that the engine has loaded already.

Through ctypes, two calls: torch's own sharing (`_share_cuda_`) counts references that the agent would have to return,
and a binding would be one more thing for an engine to install. Never run where there is no GPU; `tests/gpu` does.
"""

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_engine.errors import DeclarationError

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES: Final = 64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """How another process finds a storage: the allocation's handle, the byte where the storage begins, the device."""

    handle: bytes
    offset: int
    device_uuid: str
    """As `nvidia-smi -L` prints it."""


def export(tensor: "torch.Tensor") -> IpcHandle:
    """The handle of the allocation that holds the tensor's storage.

    Raises:
        DeclarationError: the driver cannot share it, as with expandable segments or CUDA's asynchronous allocator.
    """
    import torch  # noqa: PLC0415 - the tensor brought it

    address = tensor.untyped_storage().data_ptr()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        torch.cuda.current_stream().synchronize()  # makes the device's primary context current on this thread
        driver = ctypes.CDLL("libcuda.so.1")
        _check(
            driver,
            driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)),
        )
        _check(driver, driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return IpcHandle(bytes(handle), address - base.value, uuid if "-" in uuid[:4] else f"GPU-{uuid}")


def _check(driver: ctypes.CDLL, code: int) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    raise DeclarationError(
        f"CUDA cannot share this allocation ({(name.value or b'?').decode()}, {code}): expandable segments and the "
        "asynchronous allocator have no IPC handle; unset them in PYTORCH_CUDA_ALLOC_CONF, or use copy mode"
    )
