"""Mistakes that other operators of KV caches made, each with the test that would have caught it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvpool_operator.api import crd
from kvpool_operator.api.conditions import Reason
from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired import agent, config, monitoring, names
from kvpool_operator.desired.children import children
from kvpool_operator.desired.facts import MonitorKind
from kvpool_operator.desired.meta import is_owned, revision
from kvpool_operator.desired.refusals import refusals
from unit.operator.desired.builders import (
    ALL_MONITORS,
    RELEASE,
    UID,
    container,
    facts,
    find,
    generous,
    merged,
    pool,
)
from unit.operator.desired.cases import CASES, ETCD, RDMA

EVERY = pytest.mark.parametrize("case", CASES)


# ------------------------------------------------------------------------- a monitor that scrapes a port nobody opens


@EVERY
def test_every_monitor_leads_to_a_port_that_a_container_opens(case: str) -> None:
    one, seen = CASES[case]
    for monitor in children(one, replace(seen, settings=generous(), monitor_kinds=ALL_MONITORS)).manifests:
        if monitor["kind"] == "PodMonitor":
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            workload = agent.daemon_set(one, seen)
            ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
            assert ports[endpoint["port"]] == config.agent_config(one)["telemetry"]["port"]
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            assert wanted <= workload["spec"]["template"]["metadata"]["labels"].items()


def test_the_masters_monitor_leads_over_its_service_to_the_port_of_its_metrics() -> None:
    manifests = children(pool(), facts(settings=generous(), monitors=ALL_MONITORS)).manifests
    monitor = find(manifests, "ServiceMonitor", "demo-master")
    service = find(manifests, "Service", "demo-master")
    main = container(find(manifests, "StatefulSet", "demo-master"))
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    # The headless Service has the same pods: only one of the two may be scraped.
    headless = find(manifests, "Service", "demo-masters")
    assert not monitor["spec"]["selector"]["matchLabels"].items() <= headless["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (target,) = (port["targetPort"] for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
    (number,) = (port["containerPort"] for port in main["ports"] if port["name"] == target)
    assert f"--metrics_port={number}" in main["args"]
    assert "--metrics_host=$(POD_IP)" in main["args"]


def test_probes_ask_ports_that_are_open_and_pages_that_are_there() -> None:
    for case in CASES:
        for workload in children(*CASES[case]).manifests:
            if workload["kind"] not in ("DaemonSet", "StatefulSet"):
                continue
            main = container(workload)
            ports = {port["name"] for port in main["ports"]}
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = main.get(name, {})
                asked = probe.get("httpGet") or probe.get("tcpSocket")
                assert asked is None or asked["port"] in ports
                assert asked is None or asked.get("path", "/health") in ("/healthz", "/readyz", "/health")


def test_a_monitor_is_made_only_where_the_cluster_has_the_kind_and_prometheus_gets_through() -> None:
    only_pods = facts(monitors=frozenset({MonitorKind.POD_MONITOR}))
    assert monitoring.agent_monitor(pool(), facts()) is None
    assert monitoring.agent_monitor(pool(), only_pods) is not None
    off = pool({"telemetry": {"metrics": {"serviceMonitor": {"mode": "Disabled"}}}})
    assert monitoring.agent_monitor(off, only_pods) is None
    # Metrics and administration of a master share a port: without a known Prometheus nobody is let in, so none scrapes.
    assert monitoring.master_monitor(pool(), facts(monitors=ALL_MONITORS)) is None
    assert monitoring.master_monitor(pool(), facts(settings=generous(), monitors=ALL_MONITORS)) is not None


# --------------------------------------------------------------------------------- a field that nothing reads

READ_BY_RECONCILE = {
    "version": "resolves the release",
    "agent.drain.onTimeout": "decides what follows a drain",
    "disruption.maxUnavailable": "paces rollouts",
    "disruption.maxCacheLossPercent": "paces rollouts",
    "engines.inject": "read by injection",
    "deletionPolicy": "read on deletion",
    "paused": "read before anything is applied",
}

# Values other than the default, and what a field needs beside it to mean anything.
ALTERNATIVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "version": ("0.2.0", {}),
    "store.managed.replicas": (5, ETCD),
    "store.managed.ha": ("Etcd", {}),
    "store.managed.etcd.endpoints": (["other:2379"], ETCD),
    "store.managed.evictionHighWatermark": (60, {}),
    "store.managed.leaseTTL": ("50s", {}),
    "store.external.masterAddress": ("other:50051", {}),
    "store.external.leaseTTL": ("20s", {"store": {"external": {"masterAddress": "m:1"}}}),
    "transport.devices": (["mlx5_9"], RDMA),
    "transport.gidIndex": (7, RDMA),
    "transport.resourceName": ("rdma/other", RDMA),
    "transport.fallback": ("Allow", RDMA),
    "transport.hostNetwork": (True, {}),
    "segment.hugepages": ("1Gi", {}),
    "agent.image": ("kvpool/other:1", {}),
    "agent.nodeSelector": ({"zone": "a"}, {}),
    "agent.tolerations": ([{"operator": "Exists"}], {}),
    "agent.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms": (
        [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}],
        {},
    ),
    "disruption.maxUnavailable": ("50%", {}),
    "engines.namespaces.matchLabels": ({"team": "a"}, {"networkPolicy": "AgentsAndEngines"}),
    "engines.namespaces.matchExpressions": (
        [{"key": "team", "operator": "Exists"}],
        {"networkPolicy": "AgentsAndEngines"},
    ),
    "telemetry.otlp.endpoint": ("http://other:4317", {}),
    "telemetry.otlp.protocol": ("HTTP", {"telemetry": {"otlp": {"endpoint": "http://c:4317"}}}),
    "telemetry.otlp.sampling": ("0.5", {"telemetry": {"otlp": {"endpoint": "http://c:4317"}}}),
    "telemetry.metrics.serviceMonitor.labels": ({"release": "x"}, {}),
    "compatibility.require.model": ("m", {}),
    "compatibility.require.fingerprint": ("f", {}),
    "compatibility.require.engine": ("e", {}),
}
# What a value cannot do without.
COMPANIONS: dict[str, dict[str, Any]] = {
    "store.managed.ha": {"store": {"managed": {"etcd": {"endpoints": ["etcd:2379"]}}}},
}
BY_KIND: dict[str, Any] = {"integer": 77, "boolean": True, "string": "kvpool-other"}
BY_PATTERN = (
    ("cpu", "3"),
    ("memory", "300Gi"),
    ("imeout", "7s"),
    ("interval", "45s"),
    ("ize", "128Mi"),
    ("port", 9555),
)

SPEC = crd.definitions()["kvpool.dev_kvstorepools.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"][
    "properties"
]["spec"]


def leaves(schema: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, below in schema["properties"].items():
        where = f"{place}.{name}".lstrip(".")
        if "properties" in below:
            yield from leaves(below, where)
        else:
            yield where, below


def alternative(place: str, schema: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A value for a field that is not its default, and what it needs beside it."""
    if place in ALTERNATIVES:
        return ALTERNATIVES[place]
    if "enum" in schema:
        return next(value for value in schema["enum"] if value not in (schema.get("default"), "TCP")), {}
    for end, value in BY_PATTERN:
        if place.endswith(end):
            return value, {}
    return BY_KIND[schema["type"]], {}


def outcome(one: KVStorePool) -> str:
    seen = facts(settings=generous(), monitors=ALL_MONITORS)
    return str(children(one, seen).manifests)


LEAVES = dict(leaves(SPEC))


@pytest.mark.parametrize("place", LEAVES)
def test_every_field_changes_what_is_rendered_or_is_known_to_be_read_elsewhere(place: str) -> None:
    value, beside = alternative(place, LEAVES[place])
    change = value
    for name in reversed(place.split(".")):
        change = {name: change}
    try:
        before, after = pool(beside), pool(merged(merged(beside, change), COMPANIONS.get(place, {})))
    except InvalidObjectError as error:
        pytest.fail(f"{place} = {value!r}: {error}")
    assert (outcome(before) == outcome(after)) == (place in READ_BY_RECONCILE), place


def test_what_is_read_elsewhere_is_a_field() -> None:
    assert set(READ_BY_RECONCILE) <= set(LEAVES)


# ------------------------------------------------------------------------------------------ foreign objects taken over


@EVERY
def test_every_child_goes_with_its_pool_and_belongs_to_nobody_else(case: str) -> None:
    one, seen = CASES[case]
    other = pool(uid="another-uid")
    for manifest in children(one, seen).manifests:
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("KVStorePool", UID, True)
        assert is_owned(manifest, one)
        assert not is_owned(manifest, other)


@pytest.mark.parametrize(
    "live",
    [
        {},
        {"metadata": {}},
        {"metadata": {"ownerReferences": None}},
        {"metadata": {"ownerReferences": [{"uid": UID}]}},
        {"metadata": {"ownerReferences": [{"uid": UID, "controller": False}]}},
        {"metadata": {"ownerReferences": [{"uid": "other", "controller": True}]}},
        {"metadata": {"labels": {"app.kubernetes.io/managed-by": "kvpool-operator"}}},
    ],
)
def test_a_name_or_a_label_makes_no_object_ours(live: dict[str, Any]) -> None:
    assert not is_owned(live, pool())


def test_selectors_name_the_kind_of_child_and_never_a_release() -> None:
    """A peer's selectors have no kind in them, and two of its resources of one name share pods."""
    agents, masters = (
        names.selector(pool(), component) for component in (names.Component.AGENT, names.Component.MASTER)
    )
    assert agents != masters
    assert not any("version" in key for key in agents)


# ------------------------------------------------------------------------- everything restarted at once


@EVERY
def test_no_change_restarts_an_agent_by_itself(case: str) -> None:
    """A peer deletes all members of a group when one field changes, with everything that they cached."""
    assert agent.daemon_set(*CASES[case])["spec"]["updateStrategy"] == {"type": "OnDelete"}


def of(changes: dict[str, Any]) -> str:
    template = agent.daemon_set(pool(changes), facts())["spec"]["template"]
    return str(template["metadata"]["annotations"][names.REVISION])


def test_growing_a_pool_restarts_nobody() -> None:
    for changes in (
        {"agent": {"nodeSelector": {"zone": "a"}}},
        {"agent": {"tolerations": [{"operator": "Exists"}]}},
        {"networkPolicy": "Disabled"},
        {"disruption": {"maxUnavailable": "50%"}},
        {"cache": {"retentionInterval": 64}},
    ):
        assert of(changes) == of({}), changes


def test_what_an_agent_is_made_from_changes_its_revision() -> None:
    seen = {of({})}
    for changes in (
        {"segment": {"size": "1Gi"}},
        {"cache": {"loadTimeout": "5s"}},
        {"agent": {"image": "kvpool/agent:2"}},
        {"agent": {"runtimeClassName": "nvidia"}},
        {"transport": {"protocol": "RDMA"}},
    ):
        assert of(changes) not in seen, changes
        seen.add(of(changes))


def test_a_newer_operator_restarts_nobody_while_the_pool_holds_its_release() -> None:
    newer = replace(RELEASE, name="0.2.0")
    assert agent.daemon_set(pool(), facts(release=newer)) == agent.daemon_set(pool(), facts())


def test_the_order_of_keys_is_no_change() -> None:
    assert revision({"a": 1, "b": {"c": 2, "d": 3}}) == revision({"b": {"d": 3, "c": 2}, "a": 1})


# ------------------------------------------------------------------- a rendered setting that the program refuses


def test_an_older_agent_never_gets_a_field_that_it_does_not_know() -> None:
    older = facts(release=replace(RELEASE, features=frozenset()))
    asked = pool(
        merged(
            RDMA,
            {
                "segment": {"hugepages": "2Mi"},
                "transport": {"fallback": "Allow"},
                "compatibility": {"require": {"model": "m"}},
            },
        )
    )
    found = refusals(asked, older)
    assert [one.field for one in found] == [
        "spec.segment.hugepages",
        "spec.transport.fallback",
        "spec.compatibility.require",
    ]
    assert {one.reason for one in found} == {Reason.RELEASE_LACKS_FEATURE}
    assert refusals(asked, facts()) == ()
    plain = config.agent_config(pool(RDMA))
    assert "hugepages" not in plain["segment"]
    assert "fallback" not in plain["store"]
    assert "require" not in plain["engines"]


def test_no_image_floats() -> None:
    for case in CASES:
        for workload in children(*CASES[case]).manifests:
            if "template" in workload.get("spec", {}):
                assert not container(workload)["image"].endswith(("latest", "agent"))
