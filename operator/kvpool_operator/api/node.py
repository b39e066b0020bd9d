"""`KVStoreNode`: one node of one pool. The operator creates it, its agent writes the status.

Promises: bounded lists, written on change and not on a heartbeat (that is a Lease). Figures that traffic moves are in
the agent's metrics.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvpool_operator.api.conditions import Condition
from kvpool_operator.api.model import ATOMIC, Int32, Int64, Metadata, Section, as_map, unique_by
from kvpool_operator.api.pool import Protocol
from kvpool_operator.api.quantity import Size

KIND = "KVStoreNode"
PLURAL = "kvstorenodes"

Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(max_length=1024)]
Count = Annotated[Int64, Field(ge=0)]


class PortState(StrEnum):
    """Whether an RDMA port can carry traffic."""

    ACTIVE = "Active"
    DOWN = "Down"


class AttachMode(StrEnum):
    """How bytes get into an engine's blocks."""

    MAPPED = "Mapped"
    COPY = "Copy"


class CheckResult(StrEnum):
    """Outcome of one check of the preflight."""

    PASSED = "Passed"
    FAILED = "Failed"
    NOT_NEEDED = "NotNeeded"


class NodeSpec(Section):
    """Which node, of which pool."""

    pool_name: Name
    """The KVStorePool, of the same namespace."""

    node_name: Name
    """The Kubernetes node. Its agent may write the status, nobody else's."""


class RdmaDevice(Section):
    """An RDMA network device."""

    name: Name
    """Name of the device, such as `mlx5_0`."""

    state: PortState
    """State of its port."""

    gid: Text | None = None
    """GID that is used, absent where none is usable."""

    numa: Int32 | None = None
    """NUMA node; absent where it is not known."""


class GpuDevice(Section):
    """A GPU that the agent sees."""

    name: Name
    """UUID of the GPU."""

    model: Text | None = None
    """Product name."""

    numa: Int32 | None = None
    """NUMA node; absent where it is not known."""


class SegmentStatus(Section):
    """Memory that the node lends."""

    size: Size
    """Bytes that are mounted."""

    transport: Protocol
    """What it is really served by, which is not always what was asked for."""


class AttachedEngine(Section):
    """An engine that is attached on the node."""

    id: Name
    """The engine's own id, new at every start."""

    model: Text | None = None
    """Model."""

    engine: Text | None = None
    """Name and version."""

    identity: Text | None = None
    """Digest of its identity; engines with equal ones share their chunks."""

    mode: AttachMode | None = None
    """How bytes get into its blocks; absent for a scheduler."""

    workers: Annotated[Int32, Field(ge=0)] = 0
    """Ranks that are attached on this node."""


class Check(Section):
    """One check of the preflight."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    """What was checked, such as `MemlockLimit`."""

    result: CheckResult
    """Outcome."""

    found: Count | None = None
    """Number that was found."""

    needed: Count | None = None
    """Number that is needed."""

    message: Text = ""
    """What it means and how to mend it."""


class NodeStatus(Section):
    """What the agent of this node found."""

    observed_generation: Annotated[Int64, Field(ge=0)] | None = None
    """Generation of the spec that was read."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), unique_by("type"), as_map("type")] = ()
    """Statements about the node."""

    segment: SegmentStatus | None = None
    """Memory that the node lends; absent while nothing is mounted."""

    rdma_devices: Annotated[
        tuple[RdmaDevice, ...], Field(max_length=32), unique_by("name"), as_map("name")
    ] = ()
    """RDMA devices that were found."""

    gpus: Annotated[tuple[GpuDevice, ...], Field(max_length=32), unique_by("name"), as_map("name")] = ()
    """GPUs that the agent sees."""

    modes: Annotated[tuple[AttachMode, ...], Field(max_length=2), ATOMIC] = ()
    """Modes that were proven on this node."""

    engines: Annotated[tuple[AttachedEngine, ...], Field(max_length=128), unique_by("id"), as_map("id")] = ()
    """Engines that are attached."""

    preflight: Annotated[tuple[Check, ...], Field(max_length=32), unique_by("name"), as_map("name")] = ()
    """Checks of the node, made as the agent's own user."""

    agent_version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the agent."""

    store_client_version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the agent's Mooncake client."""

    last_error: Text | None = None
    """The last fault that a person should know of; absent when there was none."""


class KVStoreNode(Section):
    """One node of a KVStorePool."""

    metadata: Metadata
    """Name and namespace."""

    spec: NodeSpec
    """Which node, of which pool."""

    status: NodeStatus = Field(default_factory=NodeStatus)
    """What its agent found."""
