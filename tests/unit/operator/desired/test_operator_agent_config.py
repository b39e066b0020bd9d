"""The agents' configuration is one that the agent itself accepts, whatever a pool says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_agent.config import AgentConfig
from kvpool_agent.config_load import load_config
from kvpool_agent.store.config import StoreConfig
from kvpool_operator.api import crd
from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.pool import KVStorePool
from kvpool_operator.desired import agent, config, master
from kvpool_operator.desired.children import children
from kvpool_operator.desired.releases import Feature
from unit.operator.desired.builders import container, facts, find, merged, pool
from unit.operator.desired.cases import CASES

SPEC = crd.definitions()["kvpool.dev_kvstorepools.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"][
    "properties"
]["spec"]

FIELDS_OF_FEATURES = {
    Feature.HUGEPAGES: ("segment", "hugepages"),
    Feature.FALLBACK: ("store", "fallback"),
    Feature.REQUIRED_IDENTITY: ("engines", "require"),
}


def agent_knows(feature: Feature) -> bool:
    """Whether the agent of this checkout has the field that a feature renders."""
    section, field = FIELDS_OF_FEATURES[feature]
    kind: Any = AgentConfig.model_fields[section].annotation
    return field in kind.model_fields


def without_unknown_features(one: KVStorePool) -> KVStorePool:
    """The pool, less what this checkout's agent has no field for; a release without the feature refuses those."""
    spec = one.spec.tree()
    if not agent_knows(Feature.HUGEPAGES):
        spec["segment"].pop("hugepages", None)
    if not agent_knows(Feature.FALLBACK):
        spec["transport"].pop("fallback", None)
    if not agent_knows(Feature.REQUIRED_IDENTITY):
        spec["compatibility"].pop("require", None)
    return pool(spec)


def environment(one: KVStorePool, *, node: str = "node-0", ip: str = "10.0.0.7") -> dict[str, str]:
    """What the kubelet makes of the container's environment."""
    found: dict[str, str] = {}
    fields = {"spec.nodeName": node, "status.podIP": ip}
    for variable in container(agent.daemon_set(one, facts()))["env"]:
        if "valueFrom" in variable:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = variable["value"]
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[variable["name"]] = value
    return found


def read(one: KVStorePool, tmp_path: Path, **node: str) -> AgentConfig:
    """The rendered file and environment through the agent's own reader."""
    path = tmp_path / config.FILE
    path.write_text(config.text(one))
    return load_config(path, environment(one, **node))


@pytest.mark.parametrize("case", CASES)
def test_the_agent_accepts_its_configuration(case: str, tmp_path: Path) -> None:
    one = without_unknown_features(CASES[case][0])
    found = read(one, tmp_path)
    assert found.pool.full_name == one.full_name
    assert found.segment.size == one.spec.segment.size
    assert found.segment.ring_size == one.spec.segment.ring_size
    assert found.store.master_address == master.address(one)
    assert found.cache.load_timeout * 1000 == one.spec.cache.load_timeout
    assert found.cache.lease_ttl * 1000 == one.spec.store.lease_ttl
    assert found.telemetry.port == one.spec.telemetry.metrics.port


def choices(schema: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every value of every enumeration of the spec that is not inside a list."""
    for name, below in schema.get("properties", {}).items():
        for value in below.get("enum", ()):
            yield (*place, name), value
        yield from choices(below, (*place, name))


@pytest.mark.parametrize(
    ("place", "value"), list(choices(SPEC)), ids=lambda one: one if isinstance(one, str) else ".".join(one)
)
def test_every_choice_that_the_definition_offers_is_rendered_and_accepted(
    place: tuple[str, ...], value: str, tmp_path: Path
) -> None:
    """A peer's definition offers an eviction policy that its own controller refuses."""
    change: Any = value
    for name in reversed(place):
        change = {name: change}
    partner: dict[str, Any] = {"transport": {"protocol": "RDMA"}}
    if value == "Etcd":
        partner = {"store": {"managed": {"etcd": {"endpoints": ["etcd:2379"]}}}}
    if place[-1] == "protocol" and place[0] == "telemetry":
        partner = {"telemetry": {"otlp": {"endpoint": "http://collector:4317"}}}
    try:
        one = pool(merged(partner, change))
    except InvalidObjectError as error:
        pytest.fail(f"{'.'.join(place)}: {value} is offered and refused: {error}")
    assert children(one, facts()).manifests
    read(without_unknown_features(one), tmp_path)


@pytest.mark.parametrize("node", ["node-0", "1e3", "null", "007", "on", "a.b.c"])
def test_a_node_may_be_called_what_yaml_takes_for_something_else(node: str, tmp_path: Path) -> None:
    assert read(pool(), tmp_path, node=node).node.name == node


@pytest.mark.parametrize("ip", ["10.0.0.7", "fd00::7"])
def test_metrics_are_served_on_the_pods_own_address(ip: str, tmp_path: Path) -> None:
    """A peer's monitor scrapes a port of a server that listens on loopback."""
    found = read(pool(), tmp_path, ip=ip)
    assert (found.telemetry.host, found.node.ip) == (ip, ip)


def test_the_agents_drain_fits_into_the_pods_grace_period(tmp_path: Path) -> None:
    for timeout in ("0s", "500ms", "20s", "10m", "24h"):
        one = pool({"agent": {"drain": {"timeout": timeout}}})
        grace = agent.daemon_set(one, facts())["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        # 10 s for the segment and 2 s for telemetry come after it (the agent's own documentation of drain.timeout).
        assert read(one, tmp_path).drain.timeout + 10 + 2 < grace


def test_a_writer_that_died_is_discarded_by_the_master_before_the_agent_counts_on_it() -> None:
    assert StoreConfig("m:1", "10.0.0.1").put_discard_timeout > master.PUT_DISCARD_SECONDS


def test_another_configuration_is_another_object_and_the_old_one_stays_while_a_pod_mounts_it() -> None:
    before, after = pool(), pool({"cache": {"loadTimeout": "5s"}})
    old, new = (config.config_map(one, facts())["metadata"]["name"] for one in (before, after))
    assert old != new
    desired = children(after, facts(configs_in_use=frozenset({old})))
    assert desired.retained == {old}
    daemon_set = find(desired.manifests, "DaemonSet", "demo-agent")
    (volume,) = (one for one in daemon_set["spec"]["template"]["spec"]["volumes"] if one["name"] == "config")
    assert volume["configMap"]["name"] == new
    assert find(desired.manifests, "ConfigMap", new)["immutable"] is True
