"""Everything that a pool consists of, in the order in which it is applied.

Promises: an object comes after those that it needs; what is not in the list is pruned, except what `retained` names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired import agent, config, engine, master, monitoring, network, nodes, rbac
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest
from kvpool_operator.desired.refusals import Refusal, refusals

Builder = Callable[[KVStorePool, Facts], Manifest | None]

BUILDERS: Final[tuple[Builder, ...]] = (
    # Policies first: no port is open for a moment before its policy is there.
    network.master_policy,
    network.agent_policy,
    rbac.master_account,
    rbac.agent_account,
    rbac.agent_role,
    rbac.agent_binding,
    config.config_map,
    engine.config_map,
    master.headless_service,
    master.client_service,
    master.stateful_set,
    agent.daemon_set,
    monitoring.agent_monitor,
    monitoring.master_monitor,
)

KINDS: Final = (
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("apps/v1", "StatefulSet"),
    ("apps/v1", "DaemonSet"),
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("kvpool.dev/v1alpha1", "KVStoreNode"),
    ("coordination.k8s.io/v1", "Lease"),
)
"""Kinds that a pool may ever have children of: to watch, to prune, to have rights for. Nothing cluster-wide."""


class RefusedPoolError(ValueError):
    """The pool asks for what it may not have; nothing is rendered."""

    def __init__(self, reasons: tuple[Refusal, ...]) -> None:
        super().__init__("; ".join(map(str, reasons)))
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Desired:
    """What should be.

    Attributes:
        manifests: all objects, in the order in which they are applied.
        retained: ConfigMaps of the pool that are not wanted any more and stay while a pod mounts them.
    """

    manifests: tuple[Manifest, ...]
    retained: frozenset[str]


def children(pool: KVStorePool, facts: Facts) -> Desired:
    """Everything that the pool consists of.

    Raises:
        RefusedPoolError: see `refusals`.
    """
    if reasons := refusals(pool, facts):
        raise RefusedPoolError(reasons)
    built = [manifest for build in BUILDERS if (manifest := build(pool, facts)) is not None]
    return Desired((*built, *nodes.node_objects(pool, facts)), facts.configs_in_use)
