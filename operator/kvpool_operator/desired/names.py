"""Names and labels of everything that the operator makes. The only place that spells them.

Promises: two pools, or two nodes of a pool, never get one name: a child's name ends in a word of its own without '-',
and a pool's name has no dot. All names fit, pod labels of a StatefulSet included, since a pool's name is at most
`rules.LONGEST_NAME` long. Labels in selectors never change in the life of a child.
"""

import hashlib
from enum import StrEnum
from typing import Final

from kvpool_operator.api.pool import KVStorePool

MANAGER: Final = "kvpool-operator"
"""Field manager of server-side apply, and the value of `app.kubernetes.io/managed-by`."""

POOL_LABEL: Final = "kvpool.dev/pool"
"""Label of an engine's pod: wire it to this pool."""

REVISION: Final = "kvpool.dev/revision"
"""Annotation of a pod: what it was made from. The operator replaces pods whose revision is no longer the wanted one."""

SERVICE: Final = "kvpool.dev/service"
"""Label that tells a component's Services apart, for monitors."""

LONGEST_OBJECT_NAME: Final = 253


class Component(StrEnum):
    """What a child belongs to."""

    MASTER = "master"
    AGENT = "agent"
    ENGINE = "engine"


def master(pool: KVStorePool) -> str:
    """StatefulSet, client Service and ServiceAccount of the masters."""
    return f"{pool.metadata.name}-master"


def master_pods(pool: KVStorePool) -> str:
    """Headless Service that gives each master a name."""
    return f"{pool.metadata.name}-masters"


def agent(pool: KVStorePool) -> str:
    """DaemonSet, ServiceAccount and Role of the agents."""
    return f"{pool.metadata.name}-agent"


def agent_config(pool: KVStorePool, text: str) -> str:
    """ConfigMap of one agent configuration: another text is another object, so that no running pod's file changes."""
    return f"{agent(pool)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def engine(pool: KVStorePool) -> str:
    """ConfigMap for engines."""
    return f"{pool.metadata.name}-engine"


def node_object(pool: KVStorePool, node: str) -> str:
    """KVStoreNode and heartbeat Lease of one node: `pool.node`.

    A pool's name has no dot, so the first dot tells where the node's begins. A node's name of more than 212 characters
    is cut and told apart by a hash; its agent cannot work that out and leaves the status empty.
    """
    name = f"{pool.metadata.name}.{node}"
    if len(name) <= LONGEST_OBJECT_NAME:
        return name
    tag = hashlib.sha256(node.encode()).hexdigest()[:16]
    return f"{name[: LONGEST_OBJECT_NAME - 17].rstrip('.-')}-{tag}"


def selector(pool: KVStorePool, component: Component) -> dict[str, str]:
    """Labels that select a component's pods."""
    return {
        "app.kubernetes.io/name": "kvpool",
        "app.kubernetes.io/instance": pool.metadata.name,
        "app.kubernetes.io/component": str(component),
    }


def labels(pool: KVStorePool, component: Component) -> dict[str, str]:
    """Labels of a child."""
    return {
        **selector(pool, component),
        "app.kubernetes.io/part-of": "kvpool",
        "app.kubernetes.io/managed-by": MANAGER,
    }
