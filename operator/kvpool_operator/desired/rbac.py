"""Identities of masters and agents.

Promises: a master has no right at all; an agent may read its pool's KVStoreNodes, patch their status and renew their
Leases, in its own namespace. Which one of them is its own is held by the chart's ValidatingAdmissionPolicy, since a
Role cannot tell nodes apart. Refuses Secrets, wildcards and everything cluster-wide.
"""

from kvpool_operator.api.model import GROUP
from kvpool_operator.api.node import PLURAL
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired import names
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component


def master_account(pool: KVStorePool, _: Facts) -> Manifest | None:
    """The masters' ServiceAccount, None where the store is external."""
    if pool.spec.store.run_by_us is None:
        return None
    return _account(pool, names.master(pool), Component.MASTER)


def agent_account(pool: KVStorePool, _: Facts) -> Manifest:
    """The agents' ServiceAccount."""
    return _account(pool, names.agent(pool), Component.AGENT)


def _account(pool: KVStorePool, name: str, component: Component) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(pool, name, component),
        "automountServiceAccountToken": False,
    }


def agent_role(pool: KVStorePool, _: Facts) -> Manifest:
    """What an agent may do: tell its node's status."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(pool, names.agent(pool), Component.AGENT),
        "rules": [
            {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get"]},
            {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status"], "verbs": ["patch"]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "patch"]},
        ],
    }


def agent_binding(pool: KVStorePool, _: Facts) -> Manifest:
    """Gives the agents their Role."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(pool, names.agent(pool), Component.AGENT),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": names.agent(pool)},
        "subjects": [
            {"kind": "ServiceAccount", "name": names.agent(pool), "namespace": pool.metadata.namespace}
        ],
    }
