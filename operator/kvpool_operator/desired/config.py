"""The agents' configuration file, in the agent's own words.

Promises: only fields that the release's agents know (a test reads the result with the agent's own model); what differs
from node to node comes from the pod's environment. The ConfigMap is immutable and named after its content, so that a
container that restarts reads what its pod was made with.
"""

from typing import Any, Final

import yaml

from kvpool_operator.api.pool import Fallback, Hugepages, KVStorePool
from kvpool_operator.api.quantity import print_duration, print_size
from kvpool_operator.api.telemetry import OtlpProtocol
from kvpool_operator.desired import master, names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component

FILE: Final = "agent.yaml"
SOCKET_DIRECTORY: Final = "/run/kvpool"
"""Where the pool's socket folder is mounted, in agents and in engines."""

LONGEST_DRAIN: Final = 30_000
"""Milliseconds after SIGTERM for transfers under way. By then the operator has drained the node's keys already."""

_OTLP: Final = {OtlpProtocol.GRPC: "grpc", OtlpProtocol.HTTP: "http/protobuf"}


def drain_milliseconds(pool: KVStorePool) -> int:
    """How long transfers may take after SIGTERM."""
    return min(pool.spec.agent.drain.timeout, LONGEST_DRAIN)


def agent_config(pool: KVStorePool) -> dict[str, Any]:
    """The file as a tree, without the node's own part."""
    spec = pool.spec
    connector = spec.engines.kv_transfer_config
    return {
        "pool": {"namespace": pool.metadata.namespace, "name": pool.metadata.name},
        "socket": {"directory": SOCKET_DIRECTORY},
        "store": _store(pool),
        "segment": _segment(pool),
        "engines": _engines(pool),
        "cache": {
            "integrity": str(spec.cache.integrity),
            "lookupTimeout": print_duration(connector.lookup_timeout),
            "loadTimeout": print_duration(spec.cache.load_timeout),
            "saveTimeout": print_duration(connector.save_timeout),
            "leaseTTL": print_duration(spec.store.lease_ttl),
        },
        "telemetry": _telemetry(pool),
        "drain": {"timeout": print_duration(drain_milliseconds(pool))},
    }


def _store(pool: KVStorePool) -> dict[str, Any]:
    transport = pool.spec.transport
    tree: dict[str, Any] = {
        "masterAddress": master.address(pool),
        "protocol": str(transport.protocol),
        "devices": list(transport.devices),
        "clusterId": master.cluster_id(pool),
    }
    if transport.fallback is not Fallback.DENY:
        tree["fallback"] = str(transport.fallback)
    return tree


def _segment(pool: KVStorePool) -> dict[str, Any]:
    segment = pool.spec.segment
    tree = {"size": print_size(segment.size), "ringSize": print_size(segment.ring_size)}
    if segment.hugepages is not Hugepages.NONE:
        tree["hugepages"] = str(segment.hugepages)
    return tree


def _engines(pool: KVStorePool) -> dict[str, Any]:
    spec = pool.spec
    tree: dict[str, Any] = {
        "engineVersion": str(spec.compatibility.engine_version),
        "mode": str(spec.engines.mode),
    }
    if spec.compatibility.require is not None:
        tree["require"] = spec.compatibility.require.tree()
    return tree


def _telemetry(pool: KVStorePool) -> dict[str, Any]:
    telemetry = pool.spec.telemetry
    tree: dict[str, Any] = {"port": telemetry.metrics.port}
    if telemetry.otlp is not None:
        tree["otlp"] = {
            "endpoint": telemetry.otlp.endpoint,
            "protocol": _OTLP[telemetry.otlp.protocol],
            "sampling": float(telemetry.otlp.sampling),
        }
    return tree


def text(pool: KVStorePool) -> str:
    """The file."""
    return yaml.safe_dump(agent_config(pool), sort_keys=False, width=118)


def config_map(pool: KVStorePool, _: Facts) -> Manifest:
    """The ConfigMap that agents mount."""
    content = text(pool)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(pool, names.agent_config(pool, content), Component.AGENT),
        "immutable": True,
        "data": {FILE: content},
    }
