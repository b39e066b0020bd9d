"""The identity's digest: which fields are in it, which are not and why, and that neither drifts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from google.protobuf.message import Message

from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits
from kvpool_wire.identity import (
    DTYPE_BYTES,
    IdentityError,
    canonical,
    check_extras,
    check_identity,
    digest,
    extras_digest,
    group_stages,
    identity_digest,
    layout_digest,
    payload_bytes,
    shard_count,
    shard_index,
    shard_layers,
    tensor_bytes,
)
from kvpool_wire.keys import KeySpace
from support.identities import rich_extras, rich_identity

NOT_IN_THE_DIGEST = {
    "Identity.scheduler_block_size": "rounds the hit length; a block holds the same bytes",
    "Identity.use_eagle": "prunes the hit length; a block holds the same bytes",
    "Identity.partial_hits": "decides which units may end a hit; a key still names the unit that closes its chunk",
    "Identity.retention_interval": "decides which chunks are saved, not what is in them",
    "Group.eagle": "which group the drafter reads changes how long a hit is, not what a block holds",
}
"""Every other field decides what a key may hold. A new field is in the digest, or here with its reason."""


def other_value(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value + "x"
        case _:
            return value + b"x"


def _set_field(message: Message, name: str) -> None:
    setattr(message, name, other_value(getattr(message, name)))


def _set_first(values: Any) -> None:
    values[0] = other_value(values[0])


def changes(message: Message) -> Iterator[tuple[str, Callable[[], object]]]:
    """One change per field of the message and of what it holds, by the field's name; applied to the message itself."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        if not field.is_repeated:
            yield name, partial(_set_field, message, field.name)
            continue
        yield f"{name} (one less)", value.pop
        if field.message_type is None:
            yield name, partial(_set_first, value)
        else:
            yield from changes(value[0])


IDENTITY_CHANGES = [name for name, _ in changes(rich_identity())]
EXTRAS_CHANGES = [name for name, _ in changes(rich_extras())]


def test_the_changes_cover_every_field_of_the_proto() -> None:
    messages = (pb.Identity.DESCRIPTOR, pb.Group.DESCRIPTOR, pb.Layer.DESCRIPTOR, pb.TensorFormat.DESCRIPTOR)
    fields = {f"{message.name}.{field.name}" for message in messages for field in message.fields}
    assert {name.removesuffix(" (one less)") for name in IDENTITY_CHANGES} == fields
    assert set(NOT_IN_THE_DIGEST) < fields
    assert {name.removesuffix(" (one less)") for name in EXTRAS_CHANGES} == {
        f"Extras.{field.name}" for field in pb.Extras.DESCRIPTOR.fields
    }


@pytest.mark.parametrize("name", IDENTITY_CHANGES)
def test_same_identity_each_field_decides_or_says_why_not(name: str) -> None:
    identity = rich_identity()
    before = identity_digest("ns.pool", identity)
    dict(changes(identity))[name]()
    assert identity != rich_identity()
    assert (identity_digest("ns.pool", identity) == before) == (name in NOT_IN_THE_DIGEST)


@pytest.mark.parametrize("name", EXTRAS_CHANGES)
def test_same_identity_each_extra_decides(name: str) -> None:
    extras = rich_extras()
    dict(changes(extras))[name]()
    assert extras_digest(extras) != extras_digest(rich_extras())


def test_same_identity_the_pool_and_unless_ignored_the_engine_decide() -> None:
    identity, other = rich_identity(), rich_identity()
    other.engine = "vllm 0.33.0"
    assert identity_digest("ns.pool", identity) != identity_digest("ns.pool2", identity)
    assert identity_digest("p", identity) != identity_digest("p", other)
    ignored = identity_digest("p", identity, with_engine=False)
    assert ignored == identity_digest("p", other, with_engine=False)
    assert ignored != identity_digest("p", identity)


def test_golden_digests_do_not_drift() -> None:
    identity = rich_identity()
    assert identity_digest("ns.pool", identity).hex() == "2638b27a2bd3d4fe7e6fa0852b3b4945"
    assert extras_digest(rich_extras()).hex() == "43230b8cc5ab5d3755f40fa94c9905b7"
    assert [layout_digest(identity.groups[0], shard).hex() for shard in (0, 3)] == [
        "cbaec6928f81a313292dd52365a0894a",
        "ad604c7c32462e3fbfcb8413519b849c",
    ]
    assert digest("tag", b"a", "b", 3, [b"c"]).hex() == "45f9467375501bcc3ebb12d946f1adea"


def test_canonical_golden() -> None:
    assert canonical(b"ab", "ab", 12, [b"x"]) == (
        b"b\0\0\0\0\0\0\0\2abs\0\0\0\0\0\0\0\2abi\0\0\0\0\0\0\0\00212l\0\0\0\0\0\0\0\1b\0\0\0\0\0\0\0\1x"
    )


def test_no_extras_have_no_digest() -> None:
    assert extras_digest(pb.Extras()) == b""
    assert extras_digest(pb.Extras(cache_salt="a")) != extras_digest(pb.Extras(media=["a"]))
    assert extras_digest(pb.Extras(media=["ab"])) != extras_digest(pb.Extras(media=["a", "b"]))


def test_shards_are_numbered_stage_by_stage() -> None:
    full, window = rich_identity().groups
    assert (group_stages(full), shard_count(full)) == ([1, 2], 4)
    assert [shard_index(full, stage=stage, shard=shard) for stage in (1, 2) for shard in (0, 1)] == [
        0,
        1,
        2,
        3,
    ]
    assert shard_index(full, stage=0, shard=0) is None
    assert [layer.name for layer in shard_layers(full, 3)] == ["layers.1.attn"]
    assert (shard_count(window), shard_index(window, stage=0, shard=0)) == (1, 0)


def test_sizes_are_of_one_shard() -> None:
    full, window = rich_identity().groups
    assert tensor_bytes(full.layers[0].tensors[2]) == 16 * 2 * 4
    assert payload_bytes(full, 0) == 2 * 16 * 2 * 64 + 16 * 2 * 4
    assert payload_bytes(window, 0) == 2 * 2 * 16 * 64 * 2


def test_layout_digests_tell_stages_and_formats_apart() -> None:
    full = rich_identity().groups[0]
    digests = {layout_digest(full, shard) for shard in range(4)}
    assert len(digests) == 4
    full.layers[0].tensors[0].axes[:] = ["head", "token", "content"]
    assert layout_digest(full, 0) not in digests


def test_the_rich_identity_is_valid() -> None:
    check_identity(rich_identity())
    check_extras(rich_extras())


LONG = "x" * (limits.MAX_STRING_BYTES + 1)


def _set(path: str, value: Any) -> Callable[[pb.Identity], None]:
    def change(identity: pb.Identity) -> None:
        *parents, name = path.split(".")
        target: Any = identity
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else getattr(target, parent)
        if isinstance(value, list):
            getattr(target, name)[:] = value
        else:
            setattr(target, name, value)

    return change


def _clear(field: str) -> Callable[[pb.Identity], None]:
    return lambda identity: identity.ClearField(field)  # type: ignore[arg-type]  # named by the table below


def _more(what: str) -> Callable[[pb.Identity], None]:
    def change(identity: pb.Identity) -> None:
        group = identity.groups[0]
        if what == "groups":
            identity.groups.extend([group] * limits.MAX_GROUPS)
        elif what == "layers":
            group.layers.extend([group.layers[0]] * limits.MAX_LAYERS)
        else:
            group.layers[0].tensors.extend([group.layers[0].tensors[0]] * limits.MAX_TENSORS_PER_LAYER)

    return change


def _no_axes(identity: pb.Identity) -> None:
    identity.groups[0].layers[0].tensors[0].ClearField("axes")
    identity.groups[0].layers[0].tensors[0].ClearField("shape")


TENSOR = "groups.0.layers.0.tensors.0"
REFUSED: dict[str, tuple[Callable[[pb.Identity], None], str]] = {
    "no model": (_clear("model"), "identity.model is empty"),
    "no fingerprint": (_clear("fingerprint"), "identity.fingerprint is empty"),
    "no engine": (_clear("engine"), "identity.engine is empty"),
    "no hash algorithm": (_clear("hash_algorithm"), "identity.hash_algorithm is empty"),
    "long model": (_set("model", LONG), "identity.model is longer"),
    "long seed": (_set("hash_seed", LONG.encode()), "identity.hash_seed is longer"),
    "no hash unit": (_set("hash_block_size", 0), "at least 1"),
    "no scheduler block": (_set("scheduler_block_size", 0), "at least 1"),
    "no groups": (_clear("groups"), "identity.groups has 0 entries"),
    "too many groups": (_more("groups"), "identity.groups has 66 entries"),
    "too many layers": (_more("layers"), "more than 4096 layers"),
    "no kind": (_set("groups.1.kind", 0), r"identity.groups\[1\].kind 0"),
    "kind of the future": (_set("groups.1.kind", 9), r"identity.groups\[1\].kind 9"),
    "no block size": (_set("groups.1.block_size", 0), r"groups\[1\].block_size"),
    "long variant": (_set("groups.1.variant", LONG), r"groups\[1\].variant"),
    "no layers": (lambda identity: identity.groups[1].ClearField("layers"), r"groups\[1\].layers is empty"),
    "far stage": (_set("groups.0.layers.0.stage", limits.MAX_SHARDS), "pipeline stage of 4096"),
    "no shards": (_set("groups.1.shards_per_stage", 0), "has 0 KV shards"),
    "too many shards": (_set("groups.0.shards_per_stage", 2049), "has 4098 KV shards"),
    "unnamed layer": (_set("groups.0.layers.0.name", ""), "a layer's name has 1 to"),
    "long layer name": (_set("groups.0.layers.0.name", LONG), "a layer's name has 1 to"),
    "layer named twice": (_set("groups.1.layers.0.name", "layers.0.attn"), "'layers.0.attn' is named twice"),
    "no tensors": (lambda identity: identity.groups[1].layers[0].ClearField("tensors"), "has 0 tensors"),
    "too many tensors": (_more("tensors"), "has 19 tensors"),
    "unknown dtype": (_set(f"{TENSOR}.dtype", "float7"), "dtype 'float7' is unknown; known are bfloat16"),
    "axes and shape differ": (_set(f"{TENSOR}.axes", ["token"]), "must be equally long"),
    "no axes": (_no_axes, "equally long, 1 to 8"),
    "axis twice": (_set(f"{TENSOR}.axes", ["token", "head", "head"]), "must differ"),
    "unnamed axis": (_set(f"{TENSOR}.axes", ["token", "", "head"]), "be named"),
    "block axis": (_set(f"{TENSOR}.axes", ["block", "token", "head"]), "leave out the block's"),
    "long axis": (_set(f"{TENSOR}.axes", ["token", "head", LONG]), "name of an axis"),
    "empty axis": (_set(f"{TENSOR}.shape", [16, 0, 64]), "has an empty axis"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(case: str) -> None:
    identity = rich_identity()
    change, message = REFUSED[case]
    change(identity)
    with pytest.raises(IdentityError, match=message):
        check_identity(identity)


FUTURE_FIELD = b"\xfa\x7f\x01x"  # field 2047, one byte of text


def test_same_identity_fields_of_a_newer_client_are_refused_wherever_they_are() -> None:
    check_identity(pb.Identity.FromString(rich_identity().SerializeToString()))
    with pytest.raises(IdentityError, match="does not know"):
        check_identity(pb.Identity.FromString(rich_identity().SerializeToString() + FUTURE_FIELD))
    nested = rich_identity()
    nested.groups[1].layers[0].tensors[0].MergeFromString(FUTURE_FIELD)
    with pytest.raises(IdentityError, match="does not know"):
        check_identity(nested)
    with pytest.raises(IdentityError, match="extras has fields"):
        extras_digest(pb.Extras.FromString(FUTURE_FIELD))


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (pb.Extras(cache_salt=LONG), "longer than 1024"),
        (pb.Extras(lora_name=LONG), "longer than 1024"),
        (pb.Extras(lora_name="a", lora_revision=LONG), "longer than 1024"),
        (pb.Extras(media=["ok", LONG]), "longer than 1024"),
        (pb.Extras(media=["m"] * (limits.MAX_MEDIA + 1)), "4097 media items"),
        (pb.Extras(lora_revision="r"), "lora_revision without lora_name"),
    ],
)
def test_extras_that_cannot_be_part_of_a_key_are_refused(extras: pb.Extras, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        KeySpace.of("p", rich_identity()).prefixes(0, extras)


def test_dtypes_have_the_sizes_that_torch_gives_them() -> None:
    for name, size in DTYPE_BYTES.items():
        assert getattr(torch, name).itemsize == size, name
