"""The messages of `kvpool.agent.v1`, built at import from the committed descriptor set.

Generated Python code is tied to protobuf releases (it refuses a runtime of another major version); a descriptor set is
not. An engine brings the protobuf that it likes, so this module uses only public calls that exist from 4.22 on.
The types are in `agent_pb2.pyi`; both come from `make proto`.
"""

from importlib import resources

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

_PROTO = "kvpool/agent/v1/agent.proto"


def _load() -> None:
    raw = resources.files("kvpool_wire").joinpath("agent.binpb").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(raw)
    # A pool of our own: another copy of this package in the process (an engine's plugin) must not collide with it.
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindFileByName(_PROTO)
    for name, message in descriptor.message_types_by_name.items():
        globals()[name] = message_factory.GetMessageClass(message)
    for name, enum in descriptor.enum_types_by_name.items():
        globals()[name] = enum_type_wrapper.EnumTypeWrapper(enum)
        for value in enum.values:
            globals()[value.name] = value.number
    globals()["DESCRIPTOR"] = descriptor


_load()
