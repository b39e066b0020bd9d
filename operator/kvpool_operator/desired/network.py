"""NetworkPolicies: who reaches ports that authenticate nobody.

Promises: agents reach agents and masters; the operator reaches the masters' ports and the agents' figures; Prometheus
reaches metrics; engines reach the store only with `AgentsAndEngines`; nobody else reaches anything. Whoever reaches a
client's data ports can write any buffer that it registered: isolation is the only defence.
Does not promise: anything for RDMA, which passes below IP filters, and for the node's network, where these policies do
not apply. Agents on the node's network are not known by pod labels, so the masters' RPC port is open to all then.
"""

from typing import Any

from kvpool_operator.api.placement import LabelSelector
from kvpool_operator.api.pool import KVStorePool, NetworkAccess
from kvpool_operator.api.rules import STORE_PORTS
from kvpool_operator.desired import names
from kvpool_operator.desired.agent import on_host_network
from kvpool_operator.desired.facts import Facts, Peer
from kvpool_operator.desired.master import ADMIN_PORT, RPC_PORT
from kvpool_operator.desired.meta import Manifest, metadata
from kvpool_operator.desired.names import Component

Rule = dict[str, Any]


def master_policy(pool: KVStorePool, facts: Facts) -> Manifest | None:
    """Who reaches the masters; None where the store is external or no policy is wanted."""
    if pool.spec.store.run_by_us is None or pool.spec.network_policy is NetworkAccess.DISABLED:
        return None
    operator = _pods(facts.settings.operator)
    clients = [_agents(pool), *_engines(pool), operator]
    rules = [
        _rule([] if on_host_network(pool, facts) else clients, RPC_PORT),
        _rule([operator, *_prometheus(facts)], ADMIN_PORT),
    ]
    return _policy(pool, names.master(pool), Component.MASTER, rules)


def agent_policy(pool: KVStorePool, facts: Facts) -> Manifest | None:
    """Who reaches the agents; None where no policy is wanted or none would apply."""
    if pool.spec.network_policy is NetworkAccess.DISABLED or on_host_network(pool, facts):
        return None
    # Metrics change nothing. Without a Prometheus to name, a scrape that nobody can make would be the worse default.
    scrapers = [_pods(facts.settings.operator), *(_prometheus(facts) or [{"namespaceSelector": {}}])]
    rules = [
        _rule([_agents(pool), *_engines(pool)], *STORE_PORTS),
        _rule(scrapers, pool.spec.telemetry.metrics.port),
    ]
    return _policy(pool, names.agent(pool), Component.AGENT, rules)


def _policy(pool: KVStorePool, name: str, component: Component, rules: list[Rule]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(pool, name, component),
        "spec": {
            "podSelector": {"matchLabels": names.selector(pool, component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _rule(peers: list[dict[str, Any]], port: int, last: int | None = None) -> Rule:
    """Lets peers in (an empty list: everybody) to one port or to a range."""
    ports: dict[str, Any] = {"protocol": "TCP", "port": port}
    if last is not None:
        ports["endPort"] = last
    return ({"from": peers} if peers else {}) | {"ports": [ports]}


def _agents(pool: KVStorePool) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": names.selector(pool, Component.AGENT)}}


def _pods(peer: Peer) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": peer.namespace}},
        "podSelector": {"matchLabels": dict(peer.labels)},
    }


def _prometheus(facts: Facts) -> list[dict[str, Any]]:
    return [] if facts.settings.prometheus is None else [_pods(facts.settings.prometheus)]


def _engines(pool: KVStorePool) -> list[dict[str, Any]]:
    """Pods of the pool's engine namespaces that carry its label."""
    if pool.spec.network_policy is not NetworkAccess.AGENTS_AND_ENGINES:
        return []
    labelled: dict[str, Any] = {"podSelector": {"matchLabels": {names.POOL_LABEL: pool.metadata.name}}}
    if pool.spec.engines.namespaces is not None:
        labelled["namespaceSelector"] = _selector(pool.spec.engines.namespaces)
    return [labelled]


def _selector(selector: LabelSelector) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if selector.match_labels:
        tree["matchLabels"] = dict(selector.match_labels)
    if selector.match_expressions:
        tree["matchExpressions"] = [
            {name: value for name, value in one.tree().items() if value != []}
            for one in selector.match_expressions
        ]
    return tree
