"""What can be held of the CUDA side without a GPU: handles, addresses, words. `tests/gpu` runs the rest."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool_engine import cuda_ipc
from kvpool_engine.errors import DeclarationError
from kvpool_engine.storages import CudaStorage
from kvpool_engine.tensors import Declaration, declare
from kvpool_engine.types import Mode
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples

UUID = "0b0a7c2e-1111-2222-3333-444455556666"
HANDLE = bytes(range(64))


class Driver:
    """libcuda for one allocation that begins 512 bytes before whatever is asked for."""

    code = 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:  # noqa: N802 - the driver's name
        base._obj.value = address.value - 512
        size._obj.value = 1 << 20
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:  # noqa: N802
        ctypes.memmove(handle, HANDLE, 64)
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


class Stream:
    """A stream that does everything at once."""

    flushed = 0

    def synchronize(self) -> None:
        Stream.flushed += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": found}[name])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return found


def on_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Declaration, torch.Tensor, torch.Tensor]:
    """Host tensors that are taken for CUDA ones: the address arithmetic is the same."""
    monkeypatch.setattr("kvpool_engine.tensors._on_cuda", lambda tensor: True)
    pool = torch.zeros((samples.BLOCKS, 2, samples.TOKENS, samples.CONTENT), dtype=torch.float16)
    declared = declare(samples.identity(), {"full": pool[:, 0], "window": pool[:, 1]})
    return declared, pool[:, 0], pool[:, 1]


def test_a_handle_names_the_allocation_the_offset_in_it_and_the_device(driver: Driver) -> None:
    exported = cuda_ipc.export(torch.zeros(8))
    assert exported == cuda_ipc.IpcHandle(HANDLE, 512, f"GPU-{UUID}")


def test_cuda_storages_are_declared_by_handle_and_need_no_descriptor(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, _, _ = on_device(monkeypatch)
    message = declared.message(Mode.MAPPED)
    (storage,) = message.storages
    assert (storage.device, storage.handle, storage.handle_offset) == (pb.CUDA, HANDLE, 512)
    assert declared.descriptors(message) == ()


def test_memory_that_cuda_cannot_share_is_copied_unless_mapping_was_demanded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.code = 1
    declared, _, _ = on_device(monkeypatch)
    with pytest.raises(DeclarationError, match=r"CUDA_ERROR_INVALID_VALUE, 1.*expandable segments"):
        declared.message(Mode.MAPPED)
    assert declared.message(Mode.AUTO).mode == pb.COPY


def test_copies_of_a_cuda_storage_touch_the_named_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    declared, full, window = on_device(monkeypatch)
    (storage,) = declared.storages
    assert isinstance(storage, CudaStorage)
    payload = np.random.default_rng(1).integers(0, 200, samples.PAYLOAD, np.uint8)
    (part,) = declared.layout.groups[1].parts
    storage.scatter(part, 6, memoryview(bytearray(payload)))
    assert window[6].numpy().tobytes() == payload.tobytes()
    assert not full.any()
    assert not window[:6].any()
    assert not window[7:].any()
    back = bytearray(samples.PAYLOAD)
    storage.gather(part, 6, memoryview(back))
    assert back == payload.tobytes()
    before = Stream.flushed
    storage.flush()
    assert Stream.flushed == before + 1


def test_a_dead_agent_waits_for_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    declared, _, _ = on_device(monkeypatch)
    declared.synchronise()
    assert [str(device) for device in seen] == ["cpu"]
