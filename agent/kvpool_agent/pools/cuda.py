"""The CUDA driver, as `device.CudaPool` needs it: the only module that imports cuda, and only tests/gpu runs it.

Promises: errors carry the driver's own error name, what was tried and how to mend it; waiting threads sleep instead of
spinning; the GIL is released inside the driver's calls (cuda-bindings does that).
Refuses: to hold policy. What is copied when is decided in `device`.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from kvpool_agent.pools.device import EVENT_HANDLE_BYTES, CudaPool, Direction, Rows
from kvpool_agent.pools.pool import PoolError
from kvpool_wire.layout import IPC_HANDLE_BYTES, WorkerLayout

_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HOST_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_STREAM_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream
_BLOCKING_SYNC: Final = 4  # CU_CTX_SCHED_BLOCKING_SYNC

_REMEDIES: Final = {
    "CUDA_ERROR_INVALID_DEVICE": "the agent's pod does not see this GPU: check its runtime class and visible devices",
    "CUDA_ERROR_INVALID_CONTEXT": "the exporting process is gone, or shares no IPC with this one (MIG, another user)",
    "CUDA_ERROR_INVALID_VALUE": "no handle that the engine's driver exported; expandable segments need copy mode",
    "CUDA_ERROR_MAP_FAILED": "the device cannot map the allocation here; use copy mode",
    "CUDA_ERROR_OUT_OF_MEMORY": "too little memory left to map or pin; lower segment.ringSize, check the memlock limit",
    "CUDA_ERROR_NO_DEVICE": "no GPU in this container: check its runtime class",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the engine freed the memory while it was mapped; it has to detach first",
}


def open_cuda_pool(layout: WorkerLayout, ring: memoryview) -> CudaPool:
    """Map the storages of a layout on the device that they name.

    Raises:
        PoolError: cuda-bindings or the driver is missing, the device is not visible, or a handle cannot be opened.
    """
    if not layout.storages or not layout.storages[0].device_uuid:
        raise PoolError(
            "the worker declared no CUDA storage with a device UUID: there is nothing to map, use copy mode"
        )
    return CudaPool(layout, BindingsDriver(layout.storages[0].device_uuid), ring)


class BindingsDriver:
    """`device.CudaDriver` over cuda-bindings, in the primary context of one device."""

    def __init__(self, device_uuid: str) -> None:
        """Find the device and retain its primary context.

        Raises:
            PoolError: as of `open_cuda_pool`.
        """
        self._api = _load_api()
        self._device = self._find(device_uuid)
        flagged = self._api.cuDevicePrimaryCtxSetFlags(self._device, _BLOCKING_SYNC)[0]
        if (
            flagged.name != "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE"
        ):  # then another pool has set them, or they stay as they are
            self._check((flagged,), "set the flags of the primary context")
        self._context = self._check(
            self._api.cuDevicePrimaryCtxRetain(self._device), "retain the primary context"
        )

    def use(self) -> None:
        """See `CudaDriver.use`."""
        self._check(self._api.cuCtxSetCurrent(self._context), "make the context current")

    def open_memory(self, handle: bytes) -> int:
        """See `CudaDriver.open_memory`."""
        imported = self._api.CUipcMemHandle()
        ctypes.memmove(imported.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(
            self._check(
                self._api.cuIpcOpenMemHandle(imported, _LAZY_PEER_ACCESS), "open an IPC memory handle"
            )
        )

    def close_memory(self, address: int) -> None:
        """See `CudaDriver.close_memory`."""
        self._check(self._api.cuIpcCloseMemHandle(address), "close an IPC memory handle")

    def allocation_size(self, address: int) -> int | None:
        """See `CudaDriver.allocation_size`. Drivers differ in whether they know the range of imported memory."""
        result, *found = self._api.cuMemGetAddressRange(address)
        if result.name != "CUDA_SUCCESS":
            return None
        base, size = found
        return int(size) - (address - int(base))

    def register_host(self, address: int, size: int) -> None:
        """See `CudaDriver.register_host`."""
        self._check(
            self._api.cuMemHostRegister(address, size, _HOST_PORTABLE), f"pin {size} bytes of the ring"
        )

    def unregister_host(self, address: int) -> None:
        """See `CudaDriver.unregister_host`."""
        self._check(self._api.cuMemHostUnregister(address), "unpin the ring")

    def create_stream(self) -> int:
        """See `CudaDriver.create_stream`."""
        return int(self._check(self._api.cuStreamCreate(_STREAM_NON_BLOCKING), "create a stream"))

    def destroy_stream(self, stream: int) -> None:
        """See `CudaDriver.destroy_stream`."""
        self._check(self._api.cuStreamDestroy(stream), "destroy a stream")

    def copy(self, rows: Rows, direction: Direction, stream: int) -> None:
        """See `CudaDriver.copy`."""
        kinds = self._api.CUmemorytype
        what = self._api.CUDA_MEMCPY2D()
        what.WidthInBytes, what.Height = rows.width, rows.height
        if direction is Direction.TO_DEVICE:
            what.srcMemoryType, what.srcHost, what.srcPitch = (
                kinds.CU_MEMORYTYPE_HOST,
                rows.host,
                rows.host_pitch,
            )
            what.dstMemoryType, what.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, rows.device
            what.dstPitch = rows.device_pitch
        else:
            what.srcMemoryType, what.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, rows.device
            what.srcPitch = rows.device_pitch
            what.dstMemoryType, what.dstHost, what.dstPitch = (
                kinds.CU_MEMORYTYPE_HOST,
                rows.host,
                rows.host_pitch,
            )
        self._check(self._api.cuMemcpy2DAsync(what, stream), f"copy {rows} {direction.value}")

    def synchronise(self, stream: int) -> None:
        """See `CudaDriver.synchronise`."""
        self._check(self._api.cuStreamSynchronize(stream), "finish copies")

    def open_event(self, handle: bytes) -> int:
        """See `CudaDriver.open_event`."""
        imported = self._api.CUipcEventHandle()
        ctypes.memmove(imported.getPtr(), handle, EVENT_HANDLE_BYTES)
        return int(self._check(self._api.cuIpcOpenEventHandle(imported), "open an IPC event handle"))

    def event_happened(self, event: int) -> bool:
        """See `CudaDriver.event_happened`."""
        answer = self._api.cuEventQuery(event)
        if answer[0].name == "CUDA_ERROR_NOT_READY":
            return False
        self._check(answer, "ask for the engine's event")
        return True

    def close_event(self, event: int) -> None:
        """See `CudaDriver.close_event`."""
        self._check(self._api.cuEventDestroy(event), "close an IPC event handle")

    def release(self) -> None:
        """See `CudaDriver.release`."""
        self._check(self._api.cuDevicePrimaryCtxRelease(self._device), "release the primary context")

    def _find(self, wanted: str) -> Any:
        self._check(self._api.cuInit(0), "start the CUDA driver")
        seen: list[str] = []
        for ordinal in range(int(self._check(self._api.cuDeviceGetCount(), "count devices"))):
            device = self._check(self._api.cuDeviceGet(ordinal), f"open device {ordinal}")
            uuid = self._check(self._api.cuDeviceGetUuid(device), f"read the UUID of device {ordinal}")
            seen.append(_uuid_text(ctypes.string_at(uuid.getPtr(), 16)))
            if wanted.lower().endswith(
                seen[-1]
            ):  # nvidia-smi puts "GPU-" or "MIG-" before it, PyTorch nothing
                return device
        raise PoolError(
            f"GPU {wanted!r:.100} is not visible here (visible: {', '.join(seen) or 'none'}); check the pod's runtime"
            " class and visible devices, or use copy mode"
        )

    def _check(self, answer: tuple[Any, ...], what: str) -> Any:
        """The value that a driver call returned, if any.

        Raises:
            PoolError: the call failed.
        """
        result, *values = answer
        if result.name != "CUDA_SUCCESS":
            remedy = _REMEDIES.get(
                result.name, "see the CUDA driver API's description of the error; copy mode needs no GPU"
            )
            raise PoolError(f"could not {what}: {result.name}; {remedy}")
        return values[0] if values else None


def _load_api() -> Any:
    try:
        from cuda.bindings import driver  # noqa: PLC0415 -- only a pool on a GPU needs it
    except ImportError as error:
        raise PoolError("cuda-bindings is not installed; install kvpool[agent], or use copy mode") from error
    try:
        driver.cuInit(0)
    except RuntimeError as error:  # the bindings load libcuda at the first call
        raise PoolError(
            f"the CUDA driver is not there ({error}); give the pod a GPU, or use copy mode"
        ) from error
    return driver


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
