"""The engine's half of the GPU try: owns device memory, exports it by IPC, reads and writes it whole.

Speaks lines of JSON on its standard streams: `{"do": ..., ...}` in, one answer out. Bytes travel through a file that
the parent names. Refuses to know layouts: it has bytes, the other process has the pool.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray


def check(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call."""
    result, *values = answer
    if result.name != "CUDA_SUCCESS":
        raise RuntimeError(result.name)
    return values[0] if values else None


class Owner:
    """One allocation, by torch where it can reach the GPU, else by the driver."""

    def __init__(self) -> None:
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        found = check(driver.cuDeviceGetUuid(device))  # has to live while its bytes are read
        uuid = ctypes.string_at(found.getPtr(), 16).hex()
        self.uuid = "GPU-" + "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
        self.context = check(driver.cuDevicePrimaryCtxRetain(device))
        check(driver.cuCtxSetCurrent(self.context))
        self.tensor: Any = None
        self.address = self.size = 0
        self.event = check(driver.cuEventCreate(0x2 | 0x4))  # no timing, for other processes
        self.stream = check(driver.cuStreamCreate(1))

    def allocate(self, size: int) -> dict[str, Any]:
        """Device memory of `size` bytes; answers how to reach it."""
        by = "driver"
        try:
            import torch

            if torch.cuda.is_available():
                self.tensor = torch.empty(size, dtype=torch.uint8, device="cuda:0")
                self.address, by = int(self.tensor.data_ptr()), f"torch {torch.__version__}"
        except ImportError:
            pass  # the driver allocates
        if not self.address:
            self.address = int(check(driver.cuMemAlloc(size)))
        self.size = size
        base = check(driver.cuMemGetAddressRange(self.address))
        handle = check(driver.cuIpcGetMemHandle(base))
        return {
            "by": by,
            "uuid": self.uuid,
            "handle": ctypes.string_at(handle.getPtr(), 64).hex(),
            "handle_offset": self.address - int(base),
        }

    def write(self, path: str) -> dict[str, Any]:
        """The file's bytes become the memory's."""
        data: NDArray[np.uint8] = np.fromfile(path, np.uint8)
        check(driver.cuMemcpyHtoD(self.address, data.ctypes.data, self.size))
        check(driver.cuCtxSynchronize())
        return {}

    def read(self, path: str) -> dict[str, Any]:
        """The memory's bytes become the file's."""
        data = np.empty(self.size, np.uint8)
        check(driver.cuCtxSynchronize())
        check(driver.cuMemcpyDtoH(data.ctypes.data, self.address, self.size))
        data.tofile(path)
        return {}

    def fill_late(self, value: int, times: int) -> dict[str, Any]:
        """Queue `times` fills, the last of them with `value`, and record the event behind them; answers at once."""
        for step in range(times):
            check(
                driver.cuMemsetD8Async(self.address, (value + times - 1 - step) % 256, self.size, self.stream)
            )
        check(driver.cuEventRecord(self.event, self.stream))
        busy = driver.cuEventQuery(self.event)[0].name == "CUDA_ERROR_NOT_READY"
        handle = check(driver.cuIpcGetEventHandle(self.event))
        return {"event": ctypes.string_at(handle.getPtr(), 64).hex(), "busy": busy}


def main() -> None:
    """Serve until the parent closes the pipe."""
    owner = Owner()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(owner, request.pop("do"))(**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
