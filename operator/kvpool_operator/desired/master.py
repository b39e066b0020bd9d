"""The masters: a StatefulSet with its Services and ServiceAccount, or nothing where somebody else runs the store.

Promises: only flags that `mooncake_master` of the release accepts (a test starts the real one with them); metadata
always peer to peer, no snapshots (a restore can hand out another key's bytes), no tenants; each replica under its own
address, since two that call themselves 0.0.0.0 both lead. `OnDelete`: a master without HA takes the whole index with
it, so the operator decides when.

Refuses a PodDisruptionBudget: only the leader is ever ready, so one would block every drain.
"""

from typing import Any, Final

from kvpool_operator.api.placement import Amounts
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.api.store import HighAvailability, ManagedStore
from kvpool_operator.desired import names, pod
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest, metadata, template
from kvpool_operator.desired.names import Component

RPC_PORT: Final = 50_051
ADMIN_PORT: Final = 9003
"""Metrics, but also drains and removal of all keys, without authentication."""

CLIENT_TTL_SECONDS: Final = 10
PUT_DISCARD_SECONDS: Final = 30
"""How long the keys of a writer that died stay blocked; the agent counts on it (its `put_discard_timeout` is 31 s)."""

OPLOG_POLL_MILLISECONDS: Final = 200
DEFAULT_REQUESTS: Final = Amounts.model_validate({"cpu": "500m", "memory": "1Gi"})
"""A million keys take about 1 GiB."""


def address(pool: KVStorePool) -> str:
    """Where clients find the master: `host:port`, or `etcd://...` where several elect a leader."""
    external, managed = pool.spec.store.external, pool.spec.store.run_by_us
    if external is not None:
        return external.master_address
    if managed is not None and managed.etcd is not None:
        return "etcd://" + ";".join(managed.etcd.endpoints)
    return f"{names.master(pool)}.{pool.metadata.namespace}.svc:{RPC_PORT}"


def cluster_id(pool: KVStorePool) -> str:
    """Name of the cluster of masters in etcd, "" without HA.

    Made from the uid: a pool that is made anew under an old name must not find its predecessor's index.
    """
    managed = pool.spec.store.run_by_us
    return f"kvpool-{pool.metadata.uid}" if managed is not None and managed.etcd is not None else ""


def arguments(pool: KVStorePool, managed: ManagedStore) -> list[str]:
    """Command line of a master; `$(POD_IP)` is the kubelet's to fill in."""
    flags: dict[str, object] = {
        "rpc_address": "$(POD_IP)",
        "rpc_port": RPC_PORT,
        "metrics_host": "$(POD_IP)",
        "metrics_port": ADMIN_PORT,
        "client_ttl": CLIENT_TTL_SECONDS,
        "default_kv_lease_ttl": managed.lease_ttl,
        "eviction_high_watermark_ratio": f"{managed.eviction_high_watermark / 100:.2f}",
        "put_start_discard_timeout_sec": PUT_DISCARD_SECONDS,
    }
    if managed.ha is HighAvailability.ETCD and managed.etcd is not None:
        flags |= {
            "enable_ha": "true",
            "ha_backend_type": "etcd",
            "ha_backend_connstring": ";".join(managed.etcd.endpoints),
            "cluster_id": cluster_id(pool),
            "enable_oplog": "true",
            "oplog_poll_interval_ms": OPLOG_POLL_MILLISECONDS,
        }
    return [f"--{name}={value}" for name, value in flags.items()]


def stateful_set(pool: KVStorePool, facts: Facts) -> Manifest | None:
    """The masters, None where the store is external."""
    managed = pool.spec.store.run_by_us
    if managed is None:
        return None
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pool, names.master(pool), Component.MASTER),
        "spec": {
            "replicas": managed.replicas,
            "serviceName": names.master_pods(pool),
            # A standby is never ready, so an ordered start would wait for ever at the second one.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": names.selector(pool, Component.MASTER)},
            "template": template(pool, Component.MASTER, _pod(pool, managed, facts)),
        },
    }


def _pod(pool: KVStorePool, managed: ManagedStore, facts: Facts) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "serviceAccountName": names.master(pool),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod.pod_security(user=pod.NOBODY, group=pod.NOBODY),
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": 10,
        "containers": [_container(pool, managed, facts)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if managed.replicas > 1:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.selector(pool, Component.MASTER)},
            }
        ]
    if facts.settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in facts.settings.pull_secrets]
    return spec


def _container(pool: KVStorePool, managed: ManagedStore, facts: Facts) -> dict[str, Any]:
    return {
        "name": "master",
        **pod.pull(facts.release.master_image, facts.settings.pull_policy),
        "command": ["mooncake_master"],
        "args": arguments(pool, managed),
        "env": [pod.field_variable("POD_IP", "status.podIP")],
        "ports": [
            {"name": "rpc", "containerPort": RPC_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        # The admin port's health page says 200 on a standby too; its RPC port is open on the leader alone.
        "readinessProbe": pod.tcp_probe("rpc", period=2, failures=2),
        "livenessProbe": pod.http_probe("/health", "admin", period=10, failures=6),
        "resources": pod.resources(managed.resources, requests=DEFAULT_REQUESTS, extended={}),
        "securityContext": pod.container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a path in a container
        "workingDir": "/tmp",  # noqa: S108 - the same
    }


def client_service(pool: KVStorePool, _: Facts) -> Manifest | None:
    """What clients connect to, None where the store is external: the master that is ready, which is the leader."""
    if pool.spec.store.run_by_us is None:
        return None
    ports = (("rpc", RPC_PORT), ("admin", ADMIN_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, names.master(pool), Component.MASTER, {names.SERVICE: "client"}),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(pool, Component.MASTER),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports
            ],
        },
    }


def headless_service(pool: KVStorePool, _: Facts) -> Manifest | None:
    """Names of the single masters, standbys too; None where the store is external."""
    if pool.spec.store.run_by_us is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, names.master_pods(pool), Component.MASTER, {names.SERVICE: "pods"}),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(pool, Component.MASTER),
            "ports": [{"name": "rpc", "port": RPC_PORT, "targetPort": "rpc", "protocol": "TCP"}],
        },
    }
