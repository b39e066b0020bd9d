"""Monitors for the Prometheus operator, where the cluster has its kinds.

Promises: a monitor names a port by the name that a container opens, on an address that is not loopback (a test follows
it down to the agent's own configuration). The masters' metrics share a port with their administration, so they are
scraped only where the policy knows who scrapes.
"""

from typing import Any

from kvpool_operator.api.pool import KVStorePool, NetworkAccess
from kvpool_operator.api.quantity import print_duration
from kvpool_operator.api.telemetry import Monitor
from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts, MonitorKind
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component

API_VERSION = "monitoring.coreos.com/v1"


def agent_monitor(pool: KVStorePool, facts: Facts) -> Manifest | None:
    """PodMonitor of the agents; None where it is not wanted or the cluster has no such kind."""
    if not _wanted(pool, facts, MonitorKind.POD_MONITOR):
        return None
    return {
        "apiVersion": API_VERSION,
        "kind": str(MonitorKind.POD_MONITOR),
        "metadata": metadata(pool, names.agent(pool), Component.AGENT, _labels(pool)),
        "spec": {
            "selector": {"matchLabels": names.selector(pool, Component.AGENT)},
            "podMetricsEndpoints": [_endpoint(pool, "metrics")],
        },
    }


def master_monitor(pool: KVStorePool, facts: Facts) -> Manifest | None:
    """ServiceMonitor of the masters; None also where the store is external or its policy would turn Prometheus away."""
    reachable = facts.settings.prometheus is not None or pool.spec.network_policy is NetworkAccess.DISABLED
    managed = pool.spec.store.run_by_us is not None
    if not (managed and reachable and _wanted(pool, facts, MonitorKind.SERVICE_MONITOR)):
        return None
    labels = names.selector(pool, Component.MASTER) | {names.SERVICE: "client"}
    return {
        "apiVersion": API_VERSION,
        "kind": str(MonitorKind.SERVICE_MONITOR),
        "metadata": metadata(pool, names.master(pool), Component.MASTER, _labels(pool)),
        "spec": {"selector": {"matchLabels": labels}, "endpoints": [_endpoint(pool, "admin")]},
    }


def _wanted(pool: KVStorePool, facts: Facts, kind: MonitorKind) -> bool:
    mode = pool.spec.telemetry.metrics.service_monitor.mode
    return mode is Monitor.AUTO and kind in facts.monitor_kinds


def _labels(pool: KVStorePool) -> dict[str, str]:
    return dict(pool.spec.telemetry.metrics.service_monitor.labels)


def _endpoint(pool: KVStorePool, port: str) -> dict[str, Any]:
    interval = print_duration(pool.spec.telemetry.metrics.service_monitor.interval)
    return {"port": port, "path": "/metrics", "interval": interval}
