"""The messages are what the .proto says, load without generated code, and carry the limits that are promised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

import kvpool_wire
from kvpool_wire import agent_pb2 as pb
from kvpool_wire import limits, rpc

ROOT = Path(__file__).resolve().parents[3]


def test_committed_descriptors_and_stub_are_what_the_proto_says() -> None:
    command = [sys.executable, str(ROOT / "tools" / "gen_proto.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_every_message_and_enum_of_the_proto_can_be_used() -> None:
    for name in pb.DESCRIPTOR.message_types_by_name:
        assert getattr(pb, name)() == getattr(pb, name).FromString(b"")
    for name, enum in pb.DESCRIPTOR.enum_types_by_name.items():
        wrapper = getattr(pb, name)
        for value in enum.values:
            assert wrapper.Value(value.name) == getattr(pb, value.name) == value.number


def test_the_messages_live_in_a_pool_of_their_own() -> None:
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("kvpool/agent/v1/agent.proto")


def test_the_service_is_named_as_both_sides_spell_it() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == rpc.SERVICE
    methods = {method.name for method in service.methods}
    assert methods == {"Attach", "Lookup", "Resume", "NoteFailure", "Load", "Save", "Release", "Status"}
    assert rpc.path("Load") == "/kvpool.agent.v1.Agent/Load"


def test_every_enum_has_an_unspecified_zero() -> None:
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        zero = enum.values_by_number[0].name
        assert "UNSPECIFIED" in zero, zero


def test_no_field_number_is_used_twice_and_none_was_moved() -> None:
    # A field's number is the wire format: whoever changes one of these breaks every deployed client.
    golden = {
        "Identity": "model=1 fingerprint=2 engine=3 hash_algorithm=4 hash_seed=5 hash_block_size=6"
        " scheduler_block_size=7 use_eagle=8 partial_hits=9 retention_interval=10 groups=11",
        "Group": "kind=1 block_size=2 sliding_window=3 chunk_size=4 eagle=5 variant=6 layers=7 shards_per_stage=8",
        "Layer": "name=1 tensors=2 stage=3",
        "TensorFormat": "dtype=1 axes=2 shape=3",
        "Extras": "lora_name=1 lora_revision=2 cache_salt=3 media=4",
        "Tensor": "group=1 layer=2 part=3 storage=4 offset=5 shape=6 strides=7 block_axis=8",
        "Storage": "size=1 device=2 device_uuid=3 handle=4 handle_offset=5",
    }
    for name, fields in golden.items():
        found = pb.DESCRIPTOR.message_types_by_name[name].fields
        assert " ".join(f"{field.name}={field.number}" for field in found) == fields


def test_a_plan_of_the_largest_prompt_fits_a_message() -> None:
    assert limits.MAX_HASH_UNITS * limits.MAX_HASH_SIZE + (1 << 24) < limits.MAX_MESSAGE_BYTES


def test_the_limits_fit_together() -> None:
    assert 0 < limits.MIN_HASH_SIZE <= limits.MAX_HASH_SIZE
    assert limits.FIRST_HASHES <= limits.MAX_HASH_UNITS
    assert limits.MAX_BLOCKS == 2**31 - 1  # block ids are int32 on the wire
    assert limits.MAX_CHUNK_BYTES < limits.MAX_STORAGE_BYTES < 2**62  # offsets never leave 64 bits
    assert limits.MAX_SHARDS < 2**16


def test_the_version_is_the_distributions() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{kvpool_wire.VERSION}"' in text
    assert kvpool_wire.PROTOCOL == max(kvpool_wire.PROTOCOLS)
