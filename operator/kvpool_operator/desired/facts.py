"""What the builders may know beside the pool: the operator's settings and what was seen of the cluster.

Promises: gathered once, then passed around; what decides over a node is in `Settings` and nowhere in a pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from kvpool_operator.desired.releases import Release


class HostNetwork(Enum):
    """Whether pools may put their agents into the node's network."""

    FORBIDDEN = "forbidden"
    PERMITTED = "permitted"


class MonitorKind(StrEnum):
    """Kinds of the Prometheus operator that a cluster may have."""

    POD_MONITOR = "PodMonitor"
    SERVICE_MONITOR = "ServiceMonitor"


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods that a NetworkPolicy lets in: those with `labels` in the namespace called `namespace`."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the operator; Helm's, never a namespaced user's.

    Attributes:
        operator: the operator's own pods; they probe masters and read the agents' figures.
        socket_root: folder on every node under which each pool has its own; short, as socket paths are.
        allowed_repositories: image repositories that `spec.agent.image` may name; one ending in `/` allows all below.
        host_network: whether pools may ask for it.
        prometheus: who scrapes; without it agents' metrics are open inside the cluster and the master's to nobody.
        pull_policy: of all images.
        pull_secrets: names of Secrets, in the pool's namespace, that hold registry credentials.
    """

    operator: Peer
    socket_root: str = "/run/kvpool"
    allowed_repositories: tuple[str, ...] = ()
    host_network: HostNetwork = HostNetwork.FORBIDDEN
    prometheus: Peer | None = None
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SocketPlace:
    """Where the pool's sockets are on every node, and the group that may use them."""

    host_path: str
    gid: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What one pass saw.

    Attributes:
        settings: the operator's.
        release: what the pool holds.
        socket: the pool's, from its status once it has been allotted.
        monitor_kinds: kinds of the Prometheus operator that the cluster serves.
        nodes: names of the nodes that should run an agent.
        configs_in_use: names of agent ConfigMaps that a live pod mounts; they stay until it is gone.
    """

    settings: Settings
    release: Release
    socket: SocketPlace
    monitor_kinds: frozenset[MonitorKind] = frozenset()
    nodes: tuple[str, ...] = ()
    configs_in_use: frozenset[str] = field(default_factory=frozenset)
