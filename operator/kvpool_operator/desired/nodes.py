"""The operator's part of what is kept per node: a KVStoreNode, and the Lease that its agent's heartbeat renews.

Promises: one of each per node, owned by the pool. Refuses to touch what the agent writes: the status of the one, the
holder and the time of the other.
"""

from typing import Final

from kvpool_operator.api.model import API_VERSION
from kvpool_operator.api.node import KIND
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component

LEASE_SECONDS: Final = 60
"""After which an agent that has not renewed its Lease is taken for silent."""


def node_objects(pool: KVStorePool, facts: Facts) -> list[Manifest]:
    """KVStoreNode and Lease of every node, in the order of their names."""
    return [
        manifest for node in sorted(set(facts.nodes)) for manifest in (_node(pool, node), _lease(pool, node))
    ]


def _node(pool: KVStorePool, node: str) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata(pool, names.node_object(pool, node), Component.AGENT),
        "spec": {"poolName": pool.metadata.name, "nodeName": node},
    }


def _lease(pool: KVStorePool, node: str) -> Manifest:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata(pool, names.node_object(pool, node), Component.AGENT),
        "spec": {"leaseDurationSeconds": LEASE_SECONDS},
    }
