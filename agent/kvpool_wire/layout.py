"""Where one rank's KV lies: checks the tensors that a worker declares and turns them into strided copies.

Promises: a layout that `check_worker` returned holds every tensor of every layer that the rank's pipeline stage has,
once, in the identity's own format; no copy of a block reaches outside its storage, into another block, or into another
tensor of its group. Different groups may share bytes block by block (hybrid engines have one pool of block ids); which
ones do is in `WorkerLayout.overlap`, for fences go by block ids.
Refuses: to guess. What is missing, foreign, doubled, misshapen or overlapping raises `LayoutError` with its name.
Pure: depends on protobuf only, so that the engine's side and the agent read one layout in one way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import (
    DTYPE_BYTES,
    layout_digest,
    payload_bytes,
    shard_index,
    shard_layers,
    tensor_bytes,
)
from kvpool_wire.overlap import IrregularOverlap, overlap_classes
from kvpool_wire.strides import Part, byte_set, first_overlap, fuse, part_set
from kvpool_wire.trailer import TRAILER_BYTES

__all__ = ["GroupLayout", "LayoutError", "Part", "StorageLayout", "WorkerLayout", "check_worker"]

IPC_HANDLE_BYTES: Final = 64
"""Size of a cuIpcMemHandle."""

_Declared = Mapping[tuple[int, str, int], pb.Tensor]


class LayoutError(ValueError):
    """Tensors that cannot be served; the message names group, layer and tensor and says what would be accepted."""


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """One allocation of the engine; see `Storage` in agent.proto.

    Attributes:
        size: bytes.
        device: `pb.CPU` or `pb.CUDA`.
        device_uuid: CUDA only, as `nvidia-smi -L` prints it.
        handle: CUDA only, the allocation's IPC handle, 64 bytes (empty where the engine copies by itself).
        handle_offset: CUDA only, byte of the allocation where the storage begins.
    """

    size: int
    device: pb.Device.ValueType
    device_uuid: str
    handle: bytes
    handle_offset: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What one rank holds of one group.

    Attributes:
        shard: number among all shards of the group; None: this rank holds nothing of it, and the rest is empty.
        payload_bytes: bytes of one chunk without its trailer.
        layout_digest: 16 bytes, what the trailer of each chunk has to carry.
        num_blocks: blocks of the engine's pool, ids 0 to num_blocks - 1.
        null_block: the block that is never written nor read; -1: there is none.
        parts: the copies that move one block. Empty where the worker declared no storages (copy mode).
    """

    shard: int | None
    payload_bytes: int
    layout_digest: bytes
    num_blocks: int
    null_block: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """What one rank holds.

    Attributes:
        groups: one per group of the identity, in its order.
        storages: as declared; empty: copy mode, the agent touches no block.
        max_chunk_bytes: the largest payload of any group plus the trailer: a slot of the ring.
        overlap: per group the lowest group that it shares memory with, itself if with none: groups of equal number must
            not use one block id for two things. Without storages nothing is known, and every group has its own.
    """

    groups: tuple[GroupLayout, ...]
    storages: tuple[StorageLayout, ...]
    max_chunk_bytes: int
    overlap: tuple[int, ...]


def check_worker(identity: pb.Identity, worker: pb.Worker) -> WorkerLayout:
    """Check what a rank declares at Attach against its engine's identity.

    A worker without storages (copy mode only) is checked for its shapes alone, since strides are then its own matter;
    it gets a layout without parts. A client that copies by itself calls this with its storages to get its own parts.

    Args:
        identity: checked by `identity.check_identity` before.
        worker: untrusted.

    Raises:
        LayoutError: naming group, layer and tensor.
    """
    _check_counts(identity, worker)
    storages = tuple(_check_storage(index, worker) for index in range(len(worker.storages)))
    declared = _by_name(identity, worker)
    groups = tuple(_group_layout(index, identity, worker, declared) for index in range(len(identity.groups)))
    if all(group.shard is None for group in groups):
        raise LayoutError(
            f"stage {worker.stage} of rank {worker.rank} holds no layer of any group; nothing to serve"
        )
    most = max(group.payload_bytes for group in groups)
    try:
        overlap = overlap_classes([group.parts for group in groups], [group.num_blocks for group in groups])
    except IrregularOverlap as error:
        raise LayoutError(str(error)) from error
    return WorkerLayout(groups, storages, most + TRAILER_BYTES, overlap)


def _check_counts(identity: pb.Identity, worker: pb.Worker) -> None:
    wanted = len(identity.groups)
    for field in ("shards", "num_blocks", "null_blocks"):
        found = len(getattr(worker, field))
        if found != wanted:
            raise LayoutError(
                f"worker.{field} has {found} entries; one per group of the identity, {wanted}, are needed"
            )
    if len(worker.storages) > limits.MAX_STORAGES:
        raise LayoutError(f"{len(worker.storages)} storages; at most {limits.MAX_STORAGES} are served")
    if worker.mode not in pb.Mode.values():
        raise LayoutError(f"worker.mode {worker.mode} is not one that this build knows")
    if worker.mode == pb.MAPPED and not worker.storages:
        raise LayoutError(
            "mapped mode needs the storages that the tensors lie in; declare them, or ask for copy mode"
        )


def _check_storage(index: int, worker: pb.Worker) -> StorageLayout:
    storage = worker.storages[index]
    where = f"storages[{index}]"
    if not 1 <= storage.size <= limits.MAX_STORAGE_BYTES:
        raise LayoutError(f"{where}.size is {storage.size}; 1 to {limits.MAX_STORAGE_BYTES} bytes are served")
    if storage.device == pb.CPU:
        if storage.handle or storage.handle_offset or storage.device_uuid:
            raise LayoutError(
                f"{where} is on the CPU: its descriptor travels beside, handle and device_uuid stay empty"
            )
    elif storage.device == pb.CUDA:
        by_itself = worker.mode == pb.COPY and not storage.handle
        if not by_itself and len(storage.handle) != IPC_HANDLE_BYTES:
            raise LayoutError(
                f"{where}.handle has {len(storage.handle)} bytes; a cuIpcMemHandle has {IPC_HANDLE_BYTES}"
            )
        if not by_itself and not 1 <= len(storage.device_uuid) <= limits.MAX_STRING_BYTES:
            raise LayoutError(
                f"{where}.device_uuid is empty or too long; give it as `nvidia-smi -L` prints it"
            )
        if storage.handle_offset > limits.MAX_STORAGE_BYTES:
            raise LayoutError(f"{where}.handle_offset {storage.handle_offset} is past any allocation")
    else:
        raise LayoutError(f"{where}.device {storage.device} is not one that this build knows")
    return StorageLayout(
        storage.size, storage.device, storage.device_uuid, storage.handle, storage.handle_offset
    )


def _by_name(identity: pb.Identity, worker: pb.Worker) -> _Declared:
    """The declared tensors by (group, layer, part); refuses those that the identity or the stage does not have."""
    layers = [{layer.name: layer for layer in group.layers} for group in identity.groups]
    found: dict[tuple[int, str, int], pb.Tensor] = {}
    for tensor in worker.tensors:
        where = f"group {tensor.group} layer {tensor.layer!r:.200} tensor {tensor.part}"
        if tensor.group >= len(layers):
            raise LayoutError(f"{where}: the identity has groups 0 to {len(layers) - 1}")
        layer = layers[tensor.group].get(tensor.layer)
        if layer is None:
            raise LayoutError(f"{where}: the identity's group has no layer of that name")
        if layer.stage != worker.stage:
            raise LayoutError(
                f"{where}: the layer belongs to stage {layer.stage}, this rank is of stage {worker.stage}"
            )
        if tensor.part >= len(layer.tensors):
            raise LayoutError(f"{where}: the layer has tensors 0 to {len(layer.tensors) - 1}")
        name = (tensor.group, tensor.layer, tensor.part)
        if name in found:
            raise LayoutError(f"{where} is declared twice")
        found[name] = tensor
    return found


def _group_layout(index: int, identity: pb.Identity, worker: pb.Worker, declared: _Declared) -> GroupLayout:
    group = identity.groups[index]
    num_blocks, null_block = worker.num_blocks[index], worker.null_blocks[index]
    if worker.shards[index] >= group.shards_per_stage:
        raise LayoutError(
            f"worker.shards[{index}] is {worker.shards[index]}; group {index} has"
            f" {group.shards_per_stage} a stage, counted from 0"
        )
    shard = shard_index(group, stage=worker.stage, shard=worker.shards[index])
    if shard is None:
        return GroupLayout(None, 0, b"", num_blocks, null_block, ())
    if not 1 <= num_blocks <= limits.MAX_BLOCKS:
        raise LayoutError(f"worker.num_blocks[{index}] is {num_blocks}; 1 to {limits.MAX_BLOCKS} are served")
    if not -1 <= null_block < num_blocks:
        raise LayoutError(
            f"worker.null_blocks[{index}] is {null_block}; -1 (none) or a block below {num_blocks} is right"
        )
    size = payload_bytes(group, shard)
    if size > limits.MAX_CHUNK_BYTES:
        raise LayoutError(
            f"a chunk of group {index} has {size} bytes; at most {limits.MAX_CHUNK_BYTES} are served"
        )
    parts = _group_parts(index, group, shard, worker, declared)
    return GroupLayout(shard, size, layout_digest(group, shard), num_blocks, null_block, parts)


def _group_parts(
    index: int, group: pb.Group, shard: int, worker: pb.Worker, declared: _Declared
) -> tuple[Part, ...]:
    """Check every tensor of the rank's layers of one group; returns the fused copies."""
    num_blocks = worker.num_blocks[index]
    parts: list[Part] = []
    names: list[str] = []
    offset = 0
    for layer in shard_layers(group, shard):
        for number, form in enumerate(layer.tensors):
            where = (
                f"group {index} layer {layer.name!r:.200} tensor {number} ({form.dtype} {list(form.axes)})"
            )
            tensor = declared.get((index, layer.name, number))
            if tensor is None:
                raise LayoutError(f"{where} is left out: declare it, for a block is not whole without it")
            _check_shape(where, tensor, form, num_blocks)
            if worker.storages:
                parts.append(_check_place(where, tensor, form, worker, offset))
                names.append(where)
            offset += tensor_bytes(form)
    fused = fuse(parts, num_blocks)
    if _overlap(fused, num_blocks) is not None:
        # Asked again of the single tensors, which have names; most layouts fuse to a handful and end above.
        pair = _overlap(parts, num_blocks) or (0, len(parts) - 1)
        raise LayoutError(
            f"{names[pair[0]]} and {names[pair[1]]} share bytes, or interleave too irregularly to show that they do"
            " not: tensors of one group have to lie apart"
        )
    return fused


def _overlap(parts: Sequence[Part], num_blocks: int) -> tuple[int, int] | None:
    """Indexes of two parts of one storage whose bytes are not shown to be apart, over all blocks."""
    by_storage: dict[int, list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        by_storage[part.storage].append(index)
    for indexes in by_storage.values():
        pair = first_overlap([part_set(parts[index], num_blocks) for index in indexes])
        if pair is not None:
            return indexes[pair[0]], indexes[pair[1]]
    return None


def _check_shape(where: str, tensor: pb.Tensor, form: pb.TensorFormat, num_blocks: int) -> None:
    if tensor.block_axis > len(form.shape):
        raise LayoutError(
            f"{where}: block_axis {tensor.block_axis}, but there are axes 0 to {len(form.shape)}"
        )
    wanted = [*form.shape]
    wanted.insert(tensor.block_axis, num_blocks)
    if [*tensor.shape] != wanted:
        raise LayoutError(
            f"{where} has shape {[*tensor.shape][: limits.MAX_AXES + 2]}; the identity's format with {num_blocks}"
            f" blocks at axis {tensor.block_axis} is {wanted}"
        )


def _check_place(
    where: str, tensor: pb.Tensor, form: pb.TensorFormat, worker: pb.Worker, chunk_offset: int
) -> Part:
    """Check one tensor's strides and bounds; returns the copy of one block of it."""
    itemsize = DTYPE_BYTES[form.dtype]
    if tensor.storage >= len(worker.storages):
        raise LayoutError(f"{where}: storage {tensor.storage}, but {len(worker.storages)} are declared")
    if len(tensor.strides) != len(tensor.shape):
        raise LayoutError(
            f"{where}: {len(tensor.strides)} strides for {len(tensor.shape)} axes; one per axis, in bytes"
        )
    if any(not 0 <= stride <= limits.MAX_STORAGE_BYTES for stride in tensor.strides):
        raise LayoutError(
            f"{where}: strides {[*tensor.strides]} must be bytes, neither negative nor past any storage"
        )
    covered = byte_set(tensor.offset, zip(tensor.shape, tensor.strides, strict=True), itemsize)
    if covered is None:
        raise LayoutError(
            f"{where}: strides {[*tensor.strides]} of shape {[*tensor.shape]} let blocks or elements overlap: every"
            " axis has to step over all that lies inside it"
        )
    size = worker.storages[tensor.storage].size
    if covered.end > size:
        raise LayoutError(f"{where} runs to byte {covered.end} of storage {tensor.storage}, which has {size}")
    strides = [*tensor.strides]
    block_stride = strides.pop(tensor.block_axis)
    return Part(
        storage=tensor.storage,
        offset=tensor.offset,
        block_stride=block_stride,
        shape=tuple(form.shape),
        strides=tuple(strides),
        chunk_offset=chunk_offset,
        chunk_strides=_dense(tuple(form.shape), itemsize),
        itemsize=itemsize,
    )


def _dense(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of a dense array in the order of its axes: how a tensor lies in a chunk."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))
