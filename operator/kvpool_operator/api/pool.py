"""`KVStorePool`: a Mooncake store and the agents that serve it, as a user writes it down.

Promises: every field has its default here and is read by something; figures are whole numbers, sizes are quantities,
durations are strings with a unit. Refuses what decides over a node (socket root, image repositories, host network):
those are settings of the operator.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvpool_operator.api.model import AS_SET, ATOMIC, Distinct, Flag, Int32, Label, Metadata, Section
from kvpool_operator.api.placement import Affinity, LabelSelector, Resources, Toleration
from kvpool_operator.api.quantity import Amount, Duration, Size
from kvpool_operator.api.status import PoolStatus
from kvpool_operator.api.store import StoreSpec
from kvpool_operator.api.telemetry import Telemetry

KIND = "KVStorePool"
PLURAL = "kvstorepools"


class Protocol(StrEnum):
    """Transport between nodes."""

    RDMA = "RDMA"
    TCP = "TCP"


class Fallback(StrEnum):
    """What a node does whose RDMA devices cannot be used."""

    DENY = "Deny"
    ALLOW = "Allow"


class Hugepages(StrEnum):
    """Pages that a segment is made of."""

    NONE = "None"
    MEGABYTES = "2Mi"
    GIGABYTE = "1Gi"


class OnTimeout(StrEnum):
    """What follows a drain that was not done in time."""

    PROCEED = "Proceed"
    HOLD = "Hold"


class EngineVersion(StrEnum):
    """Whether engines of different versions share chunks."""

    MATCH = "Match"
    IGNORE = "Ignore"


class Integrity(StrEnum):
    """How many loaded chunks have their checksum recomputed."""

    ALWAYS = "Always"
    SAMPLED = "Sampled"
    OFF = "Off"


class Injection(StrEnum):
    """Whether labelled pods are wired to the pool."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class EngineMode(StrEnum):
    """How bytes get into an engine's blocks."""

    AUTO = "Auto"
    MAPPED = "Mapped"
    COPY = "Copy"


class NetworkAccess(StrEnum):
    """Who reaches the ports of agents and masters, which authenticate nobody."""

    AGENTS_ONLY = "AgentsOnly"
    AGENTS_AND_ENGINES = "AgentsAndEngines"
    DISABLED = "Disabled"


class DeletionPolicy(StrEnum):
    """What happens to engines and transfers when the pool is deleted."""

    DRAIN = "Drain"
    DELETE = "Delete"


class Transport(Section):
    """How bytes travel between nodes."""

    protocol: Protocol
    """RDMA, or TCP, which every cluster has. Changing it restarts masters and agents and empties the cache."""

    fallback: Fallback = Fallback.DENY
    """Deny: an agent whose RDMA devices cannot be used reports a fault. Allow: it uses TCP and says so."""

    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")], ...],
        Field(max_length=32),
        AS_SET,
        Distinct,
    ] = ()
    """RDMA devices such as `mlx5_0`; empty means all that are active."""

    gid_index: Annotated[Int32, Field(ge=0, le=255)] | None = None
    """Index of the RoCE GID; absent means Mooncake's default."""

    resource_name: Annotated[
        str,
        Field(
            max_length=253,
            pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        ),
    ] = "rdma/hca_shared_devices_a"
    """Extended resource that an RDMA device plugin offers. A node without it keeps its agent pending."""

    host_network: Flag = False
    """Agents use the node's network. Only where the operator permits it; network policies do not apply to it."""


class Segment(Section):
    """Memory of every node."""

    size: Size
    """What each node lends to the pool, at least 16Mi; 0 for agents that only use it. Changing it restarts agents."""

    hugepages: Hugepages = Hugepages.NONE
    """Pages of the segment. The node has to have that many free ones; `size` is a multiple of the page."""

    ring_size: Size = 256 << 20
    """Staging memory of one worker session (a rank), where bytes land and are verified; 1Mi to 64Gi. It holds at least
    two chunks of the engine with the largest ones, and should hold 128."""


class Drain(Section):
    """The end of an agent, planned."""

    timeout: Duration = 600_000
    """How long keys may take to move to other nodes before the agent goes; at most 24h."""

    on_timeout: OnTimeout = OnTimeout.PROCEED
    """Proceed: the agent goes, and what did not move is lost and reported. Hold: it stays, and the pool says so."""


class AgentSpec(Section):
    """The agents: one pod per node."""

    image: Annotated[str, Field(max_length=512, pattern=r"^[a-zA-Z0-9][^\s]*$")] | None = None
    """Image instead of the release's own. It has to come from a repository that the operator allows."""

    node_selector: Annotated[dict[str, Label], Field(max_length=32)] = Field(default_factory=dict)
    """Labels of the nodes that agents run on. Widening it restarts nobody."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32), ATOMIC] = ()
    """Taints that agents tolerate, such as those of GPU nodes."""

    affinity: Affinity | None = None
    """Further conditions on nodes."""

    resources: Resources = Field(default_factory=Resources)
    """CPU and memory of an agent. Memory includes the segment and the rings; absent requests are computed from them."""

    priority_class_name: (
        Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None
    ) = None
    """PriorityClass of the agents; above that of the engines, or an engine evicts its own cache."""

    drain: Drain = Field(default_factory=Drain)
    """How an agent goes when that is planned."""

    runtime_class_name: (
        Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] | None
    ) = None
    """RuntimeClass that shows the node's GPUs to the agent, such as `nvidia`; needed to map blocks of GPU engines.
    Absent: the agent sees no GPU, and engines on GPUs are served in copy mode."""


class Disruption(Section):
    """What a planned rollout, drain or master change may lose."""

    max_unavailable: Amount = 1
    """Agents that may be away at once, as a number or a share such as `10%`."""

    max_cache_loss_percent: Annotated[Int32, Field(ge=0, le=100)] = 20
    """Percent of the pool's keys that a planned change may lose; a change that would lose more waits and says so."""


class RequiredIdentity(Section):
    """What an engine has to be; a field that is absent is not asked."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model's name as the engine gives it."""

    fingerprint: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The fingerprint of its weights."""

    engine: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The engine's name and version, such as `vllm 0.32.0`."""


class Compatibility(Section):
    """Which engines share, and which are refused. Engines of different identities never read each other's chunks."""

    engine_version: EngineVersion = EngineVersion.MATCH
    """Match: the engine's name and version are part of every key. Ignore: versions share chunks, on your word that
    their KV is the same."""

    require: RequiredIdentity | None = None
    """Engines that are anything else are refused at attach."""


class Cache(Section):
    """How chunks are trusted, kept and waited for."""

    integrity: Integrity = Integrity.ALWAYS
    """Always: every loaded chunk's checksum is recomputed. Sampled and Off give up the promise that a loaded chunk
    holds what was saved, and the status says so."""

    retention_interval: Annotated[Int32, Field(ge=0, le=1 << 20)] | None = None
    """Tokens between the places in a sliding window's past from which a prompt can be taken up again; 0 keeps none.
    Absent: every block. Passed to engines."""

    load_timeout: Duration = 10_000
    """Longest load, more than 0s and at most 10m; what has not arrived by then is recomputed."""


class KvTransferConfig(Section):
    """Settings of the connector in the rendered `--kv-transfer-config`."""

    lookup_timeout: Duration = 1000
    """After which a lookup counts as a miss; more than 0s and at most 10m."""

    save_timeout: Duration = 10_000
    """After which a save is given up; more than 0s and at most 10m."""


class Engines(Section):
    """Who may use the pool, and how."""

    namespaces: LabelSelector | None = None
    """Namespaces whose engines may be wired to the pool; absent means the pool's own."""

    inject: Injection = Injection.ENABLED
    """Enabled: pods of those namespaces that carry the pool's label are wired to it."""

    mode: EngineMode = EngineMode.AUTO
    """Auto: mapped where the engine's memory can be mapped, else copy. Mapped or Copy: that alone."""

    kv_transfer_config: KvTransferConfig = Field(default_factory=KvTransferConfig)
    """Settings of the connector in the rendered `--kv-transfer-config`."""


class PoolSpec(Section):
    """What the pool should be."""

    version: (
        Annotated[str, Field(max_length=32, pattern=r"^[0-9A-Za-z]([-+.0-9A-Za-z]*[0-9A-Za-z])?$")] | None
    ) = None
    """Release of store and agent images that this pool runs. Absent: the operator's own when the pool is created,
    held from then on: a newer operator changes nothing until this field does."""

    store: StoreSpec = Field(default_factory=StoreSpec)
    """The Mooncake master."""

    transport: Transport
    """How bytes travel between nodes."""

    segment: Segment
    """Memory of every node."""

    agent: AgentSpec = Field(default_factory=AgentSpec)
    """The agents: one pod per node."""

    disruption: Disruption = Field(default_factory=Disruption)
    """What a planned change may lose."""

    compatibility: Compatibility = Field(default_factory=Compatibility)
    """Which engines share, and which are refused."""

    cache: Cache = Field(default_factory=Cache)
    """How chunks are trusted, kept and waited for."""

    engines: Engines = Field(default_factory=Engines)
    """Who may use the pool, and how."""

    telemetry: Telemetry = Field(default_factory=Telemetry)
    """What agents tell, and to whom."""

    network_policy: NetworkAccess = NetworkAccess.AGENTS_ONLY
    """Who reaches the ports of agents and masters, which authenticate nobody. AgentsAndEngines opens them to the pods
    of `engines.namespaces`, for engines that bring a Mooncake client of their own. Disabled: no NetworkPolicy."""

    deletion_policy: DeletionPolicy = DeletionPolicy.DRAIN
    """Drain: engines are detached and saves finished before the agents go. Delete: all goes at once."""

    paused: Flag = False
    """The operator leaves the pool as it is, until this is false again or the pool is deleted."""


class KVStorePool(Section):
    """A shared KV cache: a Mooncake store and the node agents that serve it."""

    metadata: Metadata
    """Name, namespace and uid."""

    spec: PoolSpec
    """What the pool should be."""

    status: PoolStatus = Field(default_factory=PoolStatus)
    """What the operator saw."""

    @property
    def full_name(self) -> str:
        """`namespace.name`, as keys and metrics spell it."""
        return f"{self.metadata.namespace}.{self.metadata.name}"
