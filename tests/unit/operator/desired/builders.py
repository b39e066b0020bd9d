"""Pools and facts for tests: sane, small, and changed by keyword."""

import copy
from typing import Any

from kvpool_operator.api.parse import parse_pool
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired.facts import Facts, HostNetwork, MonitorKind, Peer, Settings, SocketPlace
from kvpool_operator.desired.meta import Manifest
from kvpool_operator.desired.releases import Feature, Release

UID = "5f1c6a52-6f0e-4a1c-9f7e-0d6d2b1f8a11"
BASE: dict[str, Any] = {"transport": {"protocol": "TCP"}, "segment": {"size": "64Gi"}}

RELEASE = Release(
    name="0.1.0",
    store_version="0.3.13.post1",
    agent_image="kvpool/agent@sha256:" + "a" * 64,
    master_image="kvpool/agent@sha256:" + "a" * 64,
    features=frozenset(Feature),
)
OPERATOR = Peer("kvpool-system", {"app.kubernetes.io/name": "kvpool-operator"})
PROMETHEUS = Peer("monitoring", {"app.kubernetes.io/name": "prometheus"})
SETTINGS = Settings(operator=OPERATOR, allowed_repositories=("kvpool/",))
SOCKET = SocketPlace(host_path="/run/kvpool/0123456789ab", gid=1_900_000_001)
ALL_MONITORS = frozenset(MonitorKind)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, at any depth."""
    tree = copy.deepcopy(base)
    for name, value in changes.items():
        below = tree.get(name)
        tree[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return tree


def pool(spec: dict[str, Any] | None = None, *, name: str = "demo", uid: str = UID) -> KVStorePool:
    """A pool; `spec` is laid over the smallest one."""
    metadata = {"name": name, "namespace": "default", "uid": uid, "generation": 1}
    return parse_pool({"metadata": metadata, "spec": merged(BASE, spec or {})})


def facts(
    *,
    settings: Settings = SETTINGS,
    release: Release = RELEASE,
    monitors: frozenset[MonitorKind] = frozenset(),
    nodes: tuple[str, ...] = (),
    configs_in_use: frozenset[str] = frozenset(),
) -> Facts:
    """What one pass saw."""
    return Facts(
        settings=settings,
        release=release,
        socket=SOCKET,
        monitor_kinds=monitors,
        nodes=nodes,
        configs_in_use=configs_in_use,
    )


def generous() -> Settings:
    """An operator that permits everything and knows its Prometheus."""
    return Settings(
        operator=OPERATOR,
        allowed_repositories=("kvpool/",),
        host_network=HostNetwork.PERMITTED,
        prometheus=PROMETHEUS,
        pull_secrets=("registry",),
    )


def find(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The one object of a kind and name."""
    (one,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"] == name
    )
    return one


def container(workload: Manifest) -> dict[str, Any]:
    """The main container of a workload."""
    (one,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(one)
