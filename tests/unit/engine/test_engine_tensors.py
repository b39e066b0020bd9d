"""Declarations: what fits is described to the byte, what does not is refused by name."""

import fcntl
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvpool_engine.errors import DeclarationError
from kvpool_engine.shm import SealedStorage, map_sealed
from kvpool_engine.storages import HostStorage
from kvpool_engine.tensors import declare
from kvpool_engine.types import Mode
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples

SHAPE = (samples.BLOCKS, samples.TOKENS, samples.CONTENT)


def arrays(**changes: Any) -> dict[str, Any]:
    return {"full": np.zeros(SHAPE, np.float16), "window": np.zeros(SHAPE, np.float16)} | changes


def test_numpy_arrays_of_one_buffer_are_one_storage() -> None:
    memory = np.zeros((2, *SHAPE), np.float16)
    declared = declare(samples.identity(), {"full": memory[0], "window": memory[1]})
    assert [storage.size for storage in declared.worker.storages] == [memory.nbytes]
    assert [tensor.offset for tensor in declared.worker.tensors] == [0, memory.nbytes // 2]
    assert list(declared.worker.tensors[0].strides) == [64, 16, 2]


def test_torch_tensors_are_described_by_their_storage_and_strides() -> None:
    pool = torch.zeros((samples.BLOCKS, 2, samples.TOKENS, samples.CONTENT), dtype=torch.float16)
    declared = declare(samples.identity(), {"full": pool[:, 0], "window": pool[:, 1]})
    assert len(declared.storages) == 1
    assert [tensor.offset for tensor in declared.worker.tensors] == [0, 64]
    assert list(declared.worker.tensors[1].strides) == [128, 16, 2]


def test_torch_tensors_on_sealed_memory_can_be_mapped() -> None:
    storage = SealedStorage.create(2 * samples.BLOCKS * samples.PAYLOAD)
    full = storage.torch(SHAPE, torch.float16)
    window = storage.torch(SHAPE, torch.float16, offset=samples.BLOCKS * samples.PAYLOAD)
    declared = declare(samples.identity(), {"full": full, "window": window}, shared=[storage])
    message = declared.message(Mode.MAPPED)
    assert (message.mode, declared.descriptors(message)) == (pb.MAPPED, (storage.fd,))
    window[3] = 2.0
    there = os.pread(storage.fd, samples.PAYLOAD, (samples.BLOCKS + 3) * samples.PAYLOAD)
    assert np.frombuffer(there, np.float16).tolist() == [2.0] * 32


def test_private_memory_is_copied_unless_mapping_was_demanded() -> None:
    declared = declare(samples.identity(), arrays())
    assert declared.message(Mode.AUTO).mode == pb.COPY
    assert not declared.message(Mode.AUTO).storages
    with pytest.raises(DeclarationError, match=r"private memory.*SealedStorage"):
        declared.message(Mode.MAPPED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"full": np.zeros(SHAPE, np.float32)},
            "layer 'full' tensor 0 is float32, the identity says float16",
        ),
        ({"full": torch.zeros(SHAPE, dtype=torch.bfloat16)}, "layer 'full' tensor 0 is bfloat16"),
        ({"full": np.zeros((16, 4, 9), np.float16)}, "layer 'full' tensor 0 .* has shape"),
        ({"full": [np.zeros(SHAPE, np.float16)] * 2}, "layer 'full' has 1 tensors; tensor 1 was given too"),
        ({"extra": np.zeros(SHAPE, np.float16)}, r"does not have: \['extra'\]"),
        ({"full": np.broadcast_to(np.zeros(SHAPE[1:], np.float16), SHAPE)}, "overlap"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare(samples.identity(), arrays(**changes))


def test_a_layer_that_is_left_out_is_named() -> None:
    with pytest.raises(DeclarationError, match="group 1 layer 'window' is left out"):
        declare(samples.identity(), {"full": np.zeros(SHAPE, np.float16)})


def test_numpy_may_stand_in_for_types_that_it_lacks() -> None:
    identity = samples.identity()
    for group in identity.groups:
        group.layers[0].tensors[0].dtype = "bfloat16"
    assert declare(identity, arrays(full=np.zeros(SHAPE, np.uint16))).layout.groups[0].payload_bytes == 64


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_copies_follow_the_declared_block_axis_and_leave_neighbours_alone(axis: int) -> None:
    identity = samples.identity()
    rng = np.random.default_rng(axis)
    spread = [[*SHAPE[1:]] for _ in range(2)]
    for shape in spread:
        shape.insert(axis, samples.BLOCKS)
    padded = rng.integers(0, 256, (*spread[0][:-1], 2 * spread[0][-1] * 2), np.uint8).view(np.float16)
    full = padded[..., : spread[0][-1]]
    declared = declare(
        identity,
        arrays(full=full, window=np.zeros(SHAPE, np.float16)),
        block_axis={"full": axis, "window": 0},
    )
    group = declared.layout.groups[0]
    payload = bytearray(rng.integers(0, 256, group.payload_bytes, np.uint8).tobytes())
    expected = padded.copy()
    np.moveaxis(expected[..., : spread[0][-1]], axis, 0)[5] = np.frombuffer(payload, np.float16).reshape(
        SHAPE[1:]
    )
    for part in group.parts:
        declared.storages[part.storage].scatter(part, 5, memoryview(payload))
    np.testing.assert_array_equal(padded.view(np.uint8), expected.view(np.uint8))
    back = bytearray(group.payload_bytes)
    for part in group.parts:
        declared.storages[part.storage].gather(part, 5, memoryview(back))
    assert back == payload


def test_the_declaration_keeps_the_memory_alive() -> None:
    declared = declare(
        samples.identity(),
        {"full": torch.full(SHAPE, 3.0, dtype=torch.float16), "window": np.full(SHAPE, 4.0, np.float16)},
    )
    out = bytearray(64)
    for group, value in ((0, 3.0), (1, 4.0)):
        for part in declared.layout.groups[group].parts:
            storage = declared.storages[part.storage]
            assert isinstance(storage, HostStorage)
            storage.gather(part, 2, memoryview(out))
        assert np.frombuffer(out, np.float16).tolist() == [value] * 32


def test_sealed_storage_cannot_be_resized_or_unsealed() -> None:
    storage = SealedStorage.create(4096)
    for size in (1, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(storage.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(storage.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    array = storage.numpy((4096,), np.uint8)
    storage.close()
    array[:] = 7
    assert array.sum() == 7 * 4096
    with pytest.raises(ValueError, match="at least 1"):
        SealedStorage.create(0)


def test_memory_that_could_shrink_or_is_short_is_not_mapped() -> None:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(DeclarationError, match="not sealed"):
        map_sealed(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(DeclarationError, match="4096 bytes where 8192"):
        map_sealed(fd, 8192)
    assert len(map_sealed(fd, 4096)) == 4096
    os.close(fd)


def test_the_library_loads_neither_torch_nor_the_agent() -> None:
    code = (
        "import sys, kvpool_engine.client, kvpool_engine.tensors;"
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('torch', 'kvpool_agent', 'mooncake', 'cuda', 'pydantic', 'xxhash')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
