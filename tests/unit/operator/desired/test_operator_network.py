"""Who reaches which port, as sets of peers: nobody beyond those that have to."""

from typing import Any

import pytest

from kvpool_operator.desired import network
from kvpool_operator.desired.facts import Facts
from kvpool_operator.desired.meta import Manifest
from unit.operator.desired.builders import OPERATOR, PROMETHEUS, facts, generous, pool
from unit.operator.desired.cases import EXTERNAL

AGENTS = {
    "podSelector": {
        "matchLabels": {
            "app.kubernetes.io/name": "kvpool",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": "agent",
        }
    }
}
ENGINES = {"podSelector": {"matchLabels": {"kvpool.dev/pool": "demo"}}}


def peer(namespace: str, labels: Any) -> dict[str, Any]:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": dict(labels)},
    }


THE_OPERATOR = peer(OPERATOR.namespace, OPERATOR.labels)
THE_PROMETHEUS = peer(PROMETHEUS.namespace, PROMETHEUS.labels)


def admitted(policy: Manifest | None) -> dict[int, Any]:
    """Peers by first port; "all" where there is no restriction."""
    assert policy is not None
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    return {rule["ports"][0]["port"]: rule.get("from", "all") for rule in policy["spec"]["ingress"]}


def master(changes: dict[str, Any], seen: Facts | None = None) -> dict[int, Any]:
    return admitted(network.master_policy(pool(changes), seen or facts()))


def agents(changes: dict[str, Any], seen: Facts | None = None) -> dict[int, Any]:
    return admitted(network.agent_policy(pool(changes), seen or facts()))


def test_by_default_agents_and_the_operator_reach_a_master_and_the_operator_alone_its_administration() -> (
    None
):
    assert master({}) == {50051: [AGENTS, THE_OPERATOR], 9003: [THE_OPERATOR]}


def test_by_default_only_agents_reach_what_can_write_memory() -> None:
    found = agents({})
    assert found[15_000] == [AGENTS]
    policy = network.agent_policy(pool(), facts())
    assert policy is not None
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 15_000, "endPort": 17_000}]


def test_metrics_are_prometheus_alone_where_it_is_known() -> None:
    known = facts(settings=generous())
    assert agents({}, known)[9400] == [THE_OPERATOR, THE_PROMETHEUS]
    assert agents({})[9400] == [THE_OPERATOR, {"namespaceSelector": {}}]
    assert master({}, known)[9003] == [THE_OPERATOR, THE_PROMETHEUS]


def test_engines_reach_the_store_only_when_asked_for_and_never_its_administration() -> None:
    asked = {"networkPolicy": "AgentsAndEngines"}
    assert ENGINES in master(asked)[50051]
    assert ENGINES in agents(asked)[15_000]
    assert ENGINES not in master(asked)[9003]
    assert ENGINES not in master({})[50051]


@pytest.mark.parametrize(
    ("selector", "rendered"),
    [
        ({}, {}),
        ({"matchLabels": {"team": "chat"}}, {"matchLabels": {"team": "chat"}}),
        (
            {"matchExpressions": [{"key": "team", "operator": "Exists"}]},
            {"matchExpressions": [{"key": "team", "operator": "Exists"}]},
        ),
    ],
)
def test_engines_of_other_namespaces_need_the_label_of_the_pool_too(selector: Any, rendered: Any) -> None:
    asked = {"networkPolicy": "AgentsAndEngines", "engines": {"namespaces": selector}}
    assert ENGINES | {"namespaceSelector": rendered} in master(asked)[50051]


def test_agents_on_the_nodes_network_are_let_in_by_no_label_and_bound_by_no_policy() -> None:
    one, seen = pool({"transport": {"hostNetwork": True}}), facts(settings=generous())
    assert network.agent_policy(one, seen) is None
    assert admitted(network.master_policy(one, seen)) == {50051: "all", 9003: [THE_OPERATOR, THE_PROMETHEUS]}


def test_there_may_be_none() -> None:
    off = pool({"networkPolicy": "Disabled"})
    assert network.master_policy(off, facts()) is None
    assert network.agent_policy(off, facts()) is None
    assert network.master_policy(pool(EXTERNAL), facts()) is None
