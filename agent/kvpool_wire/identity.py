"""SAME_IDENTITY: what decides which bytes a key may hold, and the digests made of it.

A digest covers, field by field and with every field's length, the pool, the model's name and fingerprint, the engine
(unless the pool says Ignore), hash algorithm, seed and unit, and per group its kind, sizes, layer names, stages, tensor
formats (dtype, the meaning of every axis, shape) and shard count. Two identities that differ in any of these have
different digests; `tests/property/test_same_identity.py` holds that. Block counts, strides and addresses are not part
of it: they decide where bytes lie in one engine, not which bytes they are.

This module checks and digests; it reads nothing and keeps nothing.
"""

import hashlib
from collections.abc import Iterable
from copy import deepcopy
from typing import Final

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits

DIGEST_BYTES: Final = 16
"""128 bits of SHA-256: an accident will not collide, and keys stay short (the store keeps every key in memory)."""

DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the type without `torch.`."""


class IdentityError(ValueError):
    """An identity that cannot be served; the message names the field, its value and what would be accepted."""


def canonical(*parts: bytes | str | int | Iterable[bytes]) -> bytes:
    """Encode `parts` so that different parts never give equal bytes: each carries its kind and its length."""
    out: list[bytes] = []
    for part in parts:
        if isinstance(part, bytes):
            out.append(b"b" + len(part).to_bytes(8, "big") + part)
        elif isinstance(part, str):
            raw = part.encode()
            out.append(b"s" + len(raw).to_bytes(8, "big") + raw)
        elif isinstance(part, int):
            raw = str(int(part)).encode()
            out.append(b"i" + len(raw).to_bytes(8, "big") + raw)
        else:
            items = [canonical(item) for item in part]
            out.append(b"l" + len(items).to_bytes(8, "big") + b"".join(items))
    return b"".join(out)


def digest(tag: str, *parts: bytes | str | int | Iterable[bytes]) -> bytes:
    """16 bytes over `parts`, apart from every other use of the function by `tag`."""
    return hashlib.sha256(canonical(tag, *parts)).digest()[:DIGEST_BYTES]


def group_stages(group: pb.Group) -> list[int]:
    """The pipeline stages that hold layers of the group, ascending; a stage without any has no shard of it."""
    return sorted({layer.stage for layer in group.layers})


def shard_count(group: pb.Group) -> int:
    """KV shards of one chunk of the group: a chunk is present only if all of them are."""
    return len(group_stages(group)) * group.shards_per_stage


def shard_index(group: pb.Group, *, stage: int, shard: int) -> int | None:
    """The number of a rank's shard among all of the group's, stage by stage; None if its stage holds no layer of it."""
    stages = group_stages(group)
    return stages.index(stage) * group.shards_per_stage + shard if stage in stages else None


def shard_layers(group: pb.Group, shard: int) -> list[pb.Layer]:
    """The layers that shard number `shard` (of `shard_count`) holds, in chunk order."""
    stage = group_stages(group)[shard // group.shards_per_stage]
    return [layer for layer in group.layers if layer.stage == stage]


def tensor_bytes(tensor: pb.TensorFormat) -> int:
    """Bytes of one block of the tensor."""
    size = DTYPE_BYTES[tensor.dtype]
    for extent in tensor.shape:
        size *= extent
    return size


def payload_bytes(group: pb.Group, shard: int) -> int:
    """Bytes of one chunk of one shard, without the trailer."""
    return sum(tensor_bytes(tensor) for layer in shard_layers(group, shard) for tensor in layer.tensors)


def _layer(layer: pb.Layer) -> bytes:
    tensors = [
        canonical(
            tensor.dtype,
            [axis.encode() for axis in tensor.axes],
            [str(extent).encode() for extent in tensor.shape],
        )
        for tensor in layer.tensors
    ]
    return canonical(layer.name, layer.stage, tensors)


def _group(group: pb.Group) -> bytes:
    # `eagle` is not here: which group the drafter reads changes how long a hit is, not what a block holds.
    return canonical(
        int(group.kind),
        group.block_size,
        group.sliding_window,
        group.chunk_size,
        group.variant,
        group.shards_per_stage,
        [_layer(layer) for layer in group.layers],
    )


def identity_digest(pool: str, identity: pb.Identity, *, with_engine: bool = True) -> bytes:
    """16 bytes that are equal for two engines of one pool exactly when they may read each other's chunks.

    Args:
        pool: `namespace.name` of the pool.
        identity: checked by `check_identity` before.
        with_engine: False where the pool says `engineVersion: Ignore`.
    """
    return digest(
        "kvpool identity 1",
        pool,
        identity.model,
        identity.fingerprint,
        identity.engine if with_engine else b"",
        identity.hash_algorithm,
        identity.hash_seed,
        identity.hash_block_size,
        [_group(group) for group in identity.groups],
    )


def namespace_digest(identity: bytes, group: pb.Group, *, shard: int, extras: bytes) -> bytes:
    """16 bytes that name one shard of one group of one identity, for requests with these extras."""
    return digest("kvpool namespace 1", identity, _group(group), shard, shard_count(group), extras)


def layout_digest(group: pb.Group, shard: int) -> bytes:
    """16 bytes over the layout of one chunk: what the loader compares before it believes a single byte."""
    return digest(
        "kvpool layout 1", shard, shard_count(group), [_layer(layer) for layer in shard_layers(group, shard)]
    )


def extras_digest(extras: pb.Extras) -> bytes:
    """Empty when nothing beside the tokens decides the KV; else 16 bytes, each field tagged by its place."""
    check_extras(extras)
    if extras == pb.Extras():
        return b""
    media = [item.encode() for item in extras.media]
    return digest("kvpool extras 1", extras.lora_name, extras.lora_revision, extras.cache_salt, media)


def check_extras(extras: pb.Extras) -> None:
    """Refuse extras that are too large, that this build cannot read whole, or a revision without its adapter."""
    _refuse_unknown("extras", extras)
    texts = (extras.lora_name, extras.lora_revision, extras.cache_salt, *extras.media)
    if any(len(text.encode()) > limits.MAX_STRING_BYTES for text in texts):
        raise IdentityError(
            f"a LoRA name, revision, salt or media id is longer than {limits.MAX_STRING_BYTES} bytes"
        )
    if len(extras.media) > limits.MAX_MEDIA:
        raise IdentityError(
            f"{len(extras.media)} media items; at most {limits.MAX_MEDIA} can be part of a key"
        )
    if extras.lora_revision and not extras.lora_name:
        raise IdentityError("lora_revision without lora_name: name the adapter")


def check_identity(identity: pb.Identity) -> None:
    """Refuse an identity that is incomplete, contradictory or beyond the limits.

    Raises:
        IdentityError: naming the field.
    """
    _refuse_unknown("identity", identity)
    for field in ("model", "fingerprint", "engine", "hash_algorithm"):
        value = getattr(identity, field)
        if not value:
            raise IdentityError(
                f"identity.{field} is empty; without it engines could read KV that is not theirs"
            )
        if len(value.encode()) > limits.MAX_STRING_BYTES:
            raise IdentityError(f"identity.{field} is longer than {limits.MAX_STRING_BYTES} bytes")
    if len(identity.hash_seed) > limits.MAX_STRING_BYTES:
        raise IdentityError(f"identity.hash_seed is longer than {limits.MAX_STRING_BYTES} bytes")
    if identity.hash_block_size < 1 or identity.scheduler_block_size < 1:
        raise IdentityError("identity.hash_block_size and scheduler_block_size are tokens, at least 1")
    if not 1 <= len(identity.groups) <= limits.MAX_GROUPS:
        raise IdentityError(
            f"identity.groups has {len(identity.groups)} entries; 1 to {limits.MAX_GROUPS} are served"
        )
    if sum(len(group.layers) for group in identity.groups) > limits.MAX_LAYERS:
        raise IdentityError(f"more than {limits.MAX_LAYERS} layers")
    names: set[str] = set()
    for index, group in enumerate(identity.groups):
        _check_group(index, group, names)


def _refuse_unknown(what: str, message: pb.Identity | pb.Extras) -> None:
    """A field that a newer client added decides KV too, and would be missing in the keys (SAME_IDENTITY)."""
    size = message.ByteSize()
    if not size:
        return
    known = deepcopy(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != size:
        raise IdentityError(
            f"{what} has fields that this build does not know, so that its keys could not tell them apart: upgrade the"
            " agent, or let the client speak the protocol version that was negotiated"
        )


def _check_group(index: int, group: pb.Group, names: set[str]) -> None:
    where = f"identity.groups[{index}]"
    if group.kind == pb.GROUP_KIND_UNSPECIFIED or group.kind not in pb.GroupKind.values():
        raise IdentityError(f"{where}.kind {group.kind} is not one that this build knows")
    if len(group.variant.encode()) > limits.MAX_STRING_BYTES:
        raise IdentityError(f"{where}.variant is longer than {limits.MAX_STRING_BYTES} bytes")
    if group.block_size < 1:
        raise IdentityError(f"{where}.block_size is tokens, at least 1")
    if not group.layers:
        raise IdentityError(f"{where}.layers is empty: a group without layers stores nothing")
    if any(layer.stage >= limits.MAX_SHARDS for layer in group.layers):
        raise IdentityError(f"{where} names a pipeline stage of {limits.MAX_SHARDS} or more")
    if not 1 <= group.shards_per_stage or shard_count(group) > limits.MAX_SHARDS:
        raise IdentityError(
            f"{where} has {shard_count(group)} KV shards; 1 to {limits.MAX_SHARDS} are served"
        )
    for layer in group.layers:
        if not layer.name or len(layer.name.encode()) > limits.MAX_STRING_BYTES:
            raise IdentityError(
                f"{where}: a layer's name has 1 to {limits.MAX_STRING_BYTES} bytes, got {layer.name!r:.80}"
            )
        if layer.name in names:
            raise IdentityError(f"{where}: layer {layer.name!r} is named twice")
        names.add(layer.name)
        _check_tensors(f"{where} layer {layer.name!r}", layer)


def _check_tensors(where: str, layer: pb.Layer) -> None:
    if not 1 <= len(layer.tensors) <= limits.MAX_TENSORS_PER_LAYER:
        raise IdentityError(
            f"{where} has {len(layer.tensors)} tensors; 1 to {limits.MAX_TENSORS_PER_LAYER} are served"
        )
    for tensor in layer.tensors:
        if tensor.dtype not in DTYPE_BYTES:
            known = ", ".join(sorted(DTYPE_BYTES))
            raise IdentityError(f"{where}: dtype {tensor.dtype!r:.80} is unknown; known are {known}")
        if len(tensor.axes) != len(tensor.shape) or not 1 <= len(tensor.axes) <= limits.MAX_AXES:
            raise IdentityError(
                f"{where}: axes {list(tensor.axes)} and shape {list(tensor.shape)} must be equally long,"
                f" 1 to {limits.MAX_AXES}"
            )
        if len(set(tensor.axes)) != len(tensor.axes) or "" in tensor.axes or "block" in tensor.axes:
            raise IdentityError(
                f"{where}: axes {list(tensor.axes)} must differ, be named, and leave out the block's"
            )
        if any(len(axis.encode()) > limits.MAX_STRING_BYTES for axis in tensor.axes):
            raise IdentityError(
                f"{where}: the name of an axis is longer than {limits.MAX_STRING_BYTES} bytes"
            )
        if any(extent < 1 for extent in tensor.shape):
            raise IdentityError(f"{where}: shape {list(tensor.shape)} has an empty axis")
