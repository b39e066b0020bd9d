"""Says where one rank's KV lies: from numpy or torch tensors to what Attach declares.

Promises: a declaration fits the identity (every tensor of every layer, dtype, shape, bounds, no overlap) before an
agent ever sees it, and keeps the tensors alive. Refuses: to guess an axis, and to call private memory mappable.
torch is used only if the caller's tensors are torch's.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import numpy as np
from numpy.typing import NDArray

from kvpool_engine import cuda_ipc
from kvpool_engine.errors import DeclarationError
from kvpool_engine.shm import SealedStorage
from kvpool_engine.storages import CudaStorage, HostStorage
from kvpool_engine.types import MODES, Mode
from kvpool_wire import agent_pb2 as pb
from kvpool_wire.identity import DTYPE_BYTES, check_identity
from kvpool_wire.layout import LayoutError, WorkerLayout, check_worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

TensorLike = Union["torch.Tensor", NDArray[np.generic]]
StorageLike = HostStorage | CudaStorage


@dataclass(frozen=True, slots=True, eq=False)
class Declaration:
    """One rank's KV, checked against the identity.

    Attributes:
        worker: what was declared, all storages included.
        storages: the allocations, in the declaration's order; they keep the tensors alive.
        layout: the copies that move one block.
    """

    worker: pb.Worker
    storages: tuple[StorageLike, ...]
    layout: WorkerLayout

    def message(self, mode: Mode) -> pb.Worker:
        """The declaration as it is sent for `mode`; AUTO becomes COPY where some memory cannot be mapped.

        Raises:
            DeclarationError: MAPPED with memory that cannot be; the message says which and what to do.
        """
        message = pb.Worker()
        message.CopyFrom(self.worker)
        message.mode = MODES[mode]
        if mode is not Mode.COPY:
            try:
                for storage, sent in zip(self.storages, message.storages, strict=True):
                    _share(storage, sent)
            except DeclarationError as error:
                if mode is Mode.MAPPED:
                    raise
                logger.info("copy mode: %s", error)
                mode = Mode.COPY
        if mode is Mode.COPY:
            # The agent touches no block then: where they lie is this side's own matter.
            message.mode = pb.COPY
            del message.storages[:]
        return message

    def descriptors(self, message: pb.Worker) -> tuple[int, ...]:
        """One descriptor per CPU storage that `message` names, in its order."""
        if not message.storages:
            return ()
        return tuple(storage.fd for storage in self.storages if isinstance(storage, HostStorage))

    @property
    def on_device(self) -> bool:
        """True when some of the KV lies in a device's memory: `synchronise` has something to wait for then."""
        return any(isinstance(storage, CudaStorage) for storage in self.storages)

    def synchronise(self) -> None:
        """Return when the devices have finished what they were doing (nothing to wait for on a CPU)."""
        for storage in self.storages:
            storage.synchronise()


def declare(
    identity: pb.Identity,
    tensors: Mapping[str, TensorLike | Sequence[TensorLike]],
    *,
    rank: int = 0,
    stage: int = 0,
    shards: Sequence[int] | None = None,
    block_axis: int | Mapping[str, int] = 0,
    null_blocks: Sequence[int] | None = None,
    shared: Sequence[SealedStorage] = (),
) -> Declaration:
    """Declare the tensors of one rank.

    Args:
        identity: of the engine.
        tensors: by layer name, the layer's tensors in the identity's order (one alone needs no list).
        rank: number of this worker, for people.
        stage: pipeline stage of this rank.
        shards: per group, which shard of its stage this rank holds; default the first of each.
        block_axis: the axis that counts blocks, of all tensors or by layer name.
        null_blocks: per group the block that is never written nor read, -1 for none; default none.
        shared: storages of `kvpool_engine.shm` that tensors may lie on; what lies elsewhere is private.

    Raises:
        DeclarationError: naming group, layer and tensor, or the dtype that was found.
        IdentityError: an identity that no agent would serve.
    """
    check_identity(identity)
    groups = len(identity.groups)
    collector = _Collector(shared)
    worker = pb.Worker(
        rank=rank,
        stage=stage,
        shards=shards or [0] * groups,
        null_blocks=null_blocks or [-1] * groups,
        num_blocks=[0] * groups,
    )
    given = dict(tensors)
    for index, group in enumerate(identity.groups):
        for layer in group.layers:
            if layer.stage != stage:
                continue
            if layer.name not in given:
                raise DeclarationError(
                    f"group {index} layer {layer.name!r} is left out: a block is not whole without it"
                )
            axis = block_axis if isinstance(block_axis, int) else block_axis[layer.name]
            found = given.pop(layer.name)
            parts: Sequence[TensorLike] = found if isinstance(found, list | tuple) else [found]  # type: ignore[list-item]
            for part, tensor in enumerate(parts):
                _check_dtype(layer, part, tensor)
                message = worker.tensors.add(group=index, layer=layer.name, part=part, block_axis=axis)
                collector.place(tensor, message)
                worker.num_blocks[index] = worker.num_blocks[index] or message.shape[axis]
    if given:
        raise DeclarationError(
            f"tensors of layers that stage {stage} of the identity does not have: {sorted(given)}"
        )
    return collector.finish(identity, worker)


class _Collector:
    """Finds the storage of each tensor; one entry per allocation, however many tensors lie on it."""

    def __init__(self, shared: Sequence[SealedStorage]) -> None:
        self._shared = shared
        self._storages: dict[int, tuple[int, StorageLike]] = {}

    def place(self, tensor: TensorLike, message: pb.Tensor) -> None:
        """Fill in storage, offset, shape and strides."""
        if isinstance(tensor, np.ndarray):
            address, strides = int(tensor.__array_interface__["data"][0]), list(tensor.strides)
        else:
            address, strides = tensor.data_ptr(), [step * tensor.element_size() for step in tensor.stride()]
        index, storage = self._storage(tensor, address)
        message.storage = index
        message.offset = address - storage.address
        message.shape.extend(tensor.shape)
        message.strides.extend(strides)

    def _storage(self, tensor: TensorLike, address: int) -> tuple[int, StorageLike]:
        storage = self._describe(tensor, address)
        return self._storages.setdefault(storage.address, (len(self._storages), storage))

    def _describe(self, tensor: TensorLike, address: int) -> StorageLike:
        for sealed in self._shared:
            if sealed.address <= address < sealed.address + sealed.size:
                return HostStorage(sealed.address, sealed.size, (sealed, tensor), sealed.fd)
        if isinstance(tensor, np.ndarray):
            owner: NDArray[np.generic] = tensor
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            first, end = np.lib.array_utils.byte_bounds(owner)
            return HostStorage(first, end - first, owner)
        if _on_cuda(tensor):
            return CudaStorage(tensor)
        if not tensor.is_cpu:
            raise DeclarationError(f"a tensor on {tensor.device}; CPU and CUDA are served")
        memory = tensor.untyped_storage()
        return HostStorage(memory.data_ptr(), memory.nbytes(), tensor)

    def finish(self, identity: pb.Identity, worker: pb.Worker) -> Declaration:
        """Check the whole and freeze it."""
        storages = [storage for _, storage in self._storages.values()]
        for storage in storages:
            device = pb.CUDA if isinstance(storage, CudaStorage) else pb.CPU
            worker.storages.add(size=storage.size, device=device)
        worker.mode = pb.COPY  # lets the check pass storages that have no handle yet
        try:
            layout = check_worker(identity, worker)
        except LayoutError as error:
            raise DeclarationError(str(error)) from error
        return Declaration(worker, tuple(storages), layout)


def _on_cuda(tensor: "torch.Tensor") -> bool:
    return bool(tensor.is_cuda)


def _check_dtype(layer: pb.Layer, part: int, tensor: TensorLike) -> None:
    if part >= len(layer.tensors):
        raise DeclarationError(
            f"layer {layer.name!r} has {len(layer.tensors)} tensors; tensor {part} was given too"
        )
    wanted = layer.tensors[part].dtype
    found = str(tensor.dtype).removeprefix("torch.")
    # numpy lacks bfloat16 and the float8 types: any type of the same width holds their bits.
    fits = tensor.dtype.itemsize == DTYPE_BYTES[wanted] if isinstance(tensor, np.ndarray) else found == wanted
    if not fits:
        raise DeclarationError(f"layer {layer.name!r} tensor {part} is {found}, the identity says {wanted}")


def _share(storage: StorageLike, sent: pb.Storage) -> None:
    """Fill in how another process finds the storage."""
    if isinstance(storage, CudaStorage):
        exported = cuda_ipc.export(storage.tensor)
        sent.handle, sent.handle_offset = exported.handle, exported.offset
        sent.device_uuid = exported.device_uuid
    elif storage.fd < 0:
        raise DeclarationError(
            f"{storage.size} bytes of KV lie in private memory, which nobody else can map: allocate them by "
            "kvpool_engine.shm.SealedStorage before views are made and pass it as `shared`, or use copy mode"
        )
