"""The agent's configuration: one file, overridden by environment variables, every field explained.

Promises: a field that is unknown, mistyped or out of range is refused with its place, what is wrong and how to mend it,
all faults at once; what is not written has the default that `--print-default-config` shows. Names in the file are
camelCase, as in a KVStorePool. An override is `KVPOOL_AGENT__<SECTION>__<FIELD>` (any case, underscores inside a name
do not matter: `KVPOOL_AGENT__STORE__MASTER_ADDRESS`), its value is read as YAML.
Refuses: to read anything at import, to guess, and to know the operator's resources.
"""

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from kvpool_agent.config_types import Duration, Size
from kvpool_agent.store.address import address_fault, through_etcd
from kvpool_agent.telemetry.logs import LogFormat
from kvpool_wire import limits
from kvpool_wire.identity import IdentityError
from kvpool_wire.keys import check_pool_name


class Protocol(StrEnum):
    """Transport of the store. There is no silent fallback from one to the other."""

    RDMA = "RDMA"
    TCP = "TCP"


class EngineVersion(StrEnum):
    """Whether engines of different versions share chunks."""

    MATCH = "Match"
    IGNORE = "Ignore"


class EngineMode(StrEnum):
    """How bytes get into an engine's blocks."""

    AUTO = "Auto"
    MAPPED = "Mapped"
    COPY = "Copy"


class Integrity(StrEnum):
    """How many loaded chunks have their checksum recomputed."""

    ALWAYS = "Always"
    SAMPLED = "Sampled"
    OFF = "Off"


class OtlpProtocol(StrEnum):
    """Wire format of OTLP."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Section(BaseModel):
    """A part of the file. Frozen; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True
    )


class PoolSection(Section):
    """Which pool this agent serves."""

    namespace: str
    """Kubernetes namespace of the KVStorePool. It is part of every key."""

    name: str
    """Name of the KVStorePool. It is part of every key."""

    @model_validator(mode="after")
    def _fits_a_key(self) -> "PoolSection":
        try:
            check_pool_name(self.full_name)
        except IdentityError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def full_name(self) -> str:
        """`namespace.name`, as keys, metrics and clients spell it."""
        return f"{self.namespace}.{self.name}"


class NodeSection(Section):
    """Where this agent runs."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the Kubernetes node; in metrics, logs and status."""

    ip: str
    """Address under which agents of other nodes reach this one (the pod's, or the node's with hostNetwork). Never a
    wildcard; a loopback address serves one machine only."""

    @field_validator("ip")
    @classmethod
    def _reachable(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not an IP address; set it from status.podIP") from error
        if address.is_unspecified:
            raise ValueError(f"{value} is a wildcard; other nodes cannot reach it, set it from status.podIP")
        return value


class SocketSection(Section):
    """The Unix sockets that engines of this node connect to."""

    directory: Path
    """Folder of `agent.sock` and `fd.sock`; it has to exist, and its permissions decide who may connect. Its path is
    short: a socket's path has at most 107 bytes."""

    allowed_uids: tuple[int, ...] = ()
    """User ids that may connect; empty admits whoever the folder's permissions admit."""

    token_timeout: Duration = 10.0
    """How long a connection on `fd.sock` may wait before its Attach, and an Attach for its descriptors."""

    max_connections: Annotated[int, Field(ge=1, le=65536)] = 256
    """Connections on `fd.sock`, sessions included: one a scheduler and one a rank. More are turned away."""


class StoreSection(Section):
    """The Mooncake store."""

    master_address: str
    """`host:port` of the master's RPC, or `etcd://` and every member of the etcd in which several masters elect a
    leader, joined by `;`: `etcd://etcd-0.etcd:2379;etcd-1.etcd:2379`."""

    protocol: Protocol = Protocol.TCP
    """Transport between nodes. RDMA without a usable device is an error, never TCP."""

    devices: tuple[str, ...] = ()
    """RDMA devices (`mlx5_0`, ...); empty lets Mooncake choose among all that are active."""

    rpc_timeout: Duration = 3.0
    """For one answer of the master."""

    cluster_id: str = ""
    """With `etcd://` only: the masters' `--cluster_id`, under which etcd knows their leader. Empty is Mooncake's own
    default, `mooncake_cluster`."""

    @field_validator("master_address")
    @classmethod
    def _can_be_found(cls, value: str) -> str:
        if fault := address_fault(value):
            raise ValueError(fault)
        return value

    @model_validator(mode="after")
    def _cluster_is_in_etcd(self) -> "StoreSection":
        if self.cluster_id and not through_etcd(self.master_address):
            raise ValueError(
                f"clusterId {self.cluster_id!r} is read only with a masterAddress etcd://...; leave it out"
            )
        return self


class SegmentSection(Section):
    """Memory of this node."""

    size: Size = 1 << 30
    """The node's share of the pool: memory that holds chunks for everybody. 0 = none; otherwise at least 16Mi."""

    ring_size: Size = 256 << 20
    """Staging memory of one worker session, where bytes land and are verified. It has to hold at least two chunks of
    the engine with the largest ones, and should hold 128: that is two batches."""

    @model_validator(mode="after")
    def _not_too_small(self) -> "SegmentSection":
        if self.size and self.size < 16 << 20:
            raise ValueError(
                "segment.size: Mooncake mounts nothing under 16Mi; write 0 for no segment at all"
            )
        if self.ring_size < 1 << 20:
            raise ValueError("segment.ringSize: at least 1Mi")
        return self


class EnginesSection(Section):
    """What engines may do."""

    engine_version: EngineVersion = EngineVersion.MATCH
    """Match: name and version of the engine are part of every key, so that versions never read each other's chunks.
    Ignore: they share chunks, on the operator's word that their KV is the same."""

    mode: EngineMode = EngineMode.AUTO
    """Auto: mapped where the engine's memory can be mapped, else copy. Mapped or Copy: that alone."""

    max_sessions: Annotated[int, Field(ge=1, le=4096)] = 128
    """Scheduler and worker sessions together. Each worker session costs a ring and a loader process."""

    max_queued: Annotated[int, Field(ge=1, le=65536)] = 256
    """Transfers that one worker session may have accepted and not yet reported; more are turned away."""

    max_lookups: Annotated[int, Field(ge=1, le=65536)] = 256
    """Lookups under way at once, all engines together; more are turned away."""


class CacheSection(Section):
    """How chunks are trusted, and how long anybody waits for them."""

    integrity: Integrity = Integrity.ALWAYS
    """Always: every loaded chunk's checksum is recomputed. Sampled and Off recompute some or none: then the promise
    that a loaded chunk holds what was saved is not kept, and the status says so."""

    lookup_timeout: Duration = 0.5
    """Longest lookup; a caller may ask for less. A late answer is a miss."""

    load_timeout: Duration = 10.0
    """Longest load; a caller may ask for less. What has not landed by then is reported failed."""

    save_timeout: Duration = 30.0
    """Longest save; a caller may ask for less."""

    lease_ttl: Duration = Field(default=10.0, alias="leaseTTL")
    """The master's `default_kv_lease_ttl`: so long what a lookup saw cannot be evicted, and so long a plan is good."""


class OtlpSection(Section):
    """Where traces and metrics are pushed. `OTEL_*` variables win over all of it."""

    endpoint: str = ""
    """URL of the collector, such as `http://collector:4317`; empty pushes nothing."""

    protocol: OtlpProtocol = OtlpProtocol.GRPC
    """Wire format."""

    sampling: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of traces that begin here and are kept; a caller's own decision is always followed."""


class TelemetrySection(Section):
    """What the agent tells."""

    host: str = "127.0.0.1"
    """Address of `/metrics`, `/healthz` and `/readyz`; in a pod the pod's own address."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9400
    """Port of the same; 0 takes a free one, which the log names."""

    otlp: OtlpSection = OtlpSection()
    """Push of traces and metrics."""


class LogSection(Section):
    """The agent's own log, on standard error."""

    level: LogLevel = LogLevel.INFO
    """Least severity."""

    format: LogFormat = LogFormat.JSON
    """json: one object a line, with trace ids. text: for a person at a terminal."""


class DrainSection(Section):
    """The end of the process."""

    timeout: Duration = 30.0
    """After SIGTERM: how long transfers under way may take. Together with 10 s for the segment and 2 s for telemetry
    it has to fit into the pod's grace period. A second signal ends the wait."""


class AgentConfig(Section):
    """The whole file."""

    pool: PoolSection
    """Which pool this agent serves."""

    node: NodeSection
    """Where this agent runs."""

    socket: SocketSection
    """The Unix sockets that engines of this node connect to."""

    store: StoreSection
    """The Mooncake store."""

    segment: SegmentSection = Field(default_factory=SegmentSection)
    """Memory of this node."""

    engines: EnginesSection = Field(default_factory=EnginesSection)
    """What engines may do."""

    cache: CacheSection = Field(default_factory=CacheSection)
    """How chunks are trusted, and how long anybody waits for them."""

    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    """What the agent tells."""

    log: LogSection = Field(default_factory=LogSection)
    """The agent's own log, on standard error."""

    drain: DrainSection = Field(default_factory=DrainSection)
    """The end of the process."""

    @model_validator(mode="after")
    def _deadlines_fit(self) -> "AgentConfig":
        longest = limits.MAX_DEADLINE_MS / 1000
        for name in ("lookup_timeout", "load_timeout", "save_timeout"):
            if not 0 < getattr(self.cache, name) <= longest:
                raise ValueError(f"cache.{to_camel(name)}: more than 0s and at most {longest:.0f}s")
        return self
