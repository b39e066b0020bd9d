"""One spec for each rule, broken in that rule alone, with the field and the words that its author gets to read."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A pool that breaks one rule."""

    name: str
    field: str
    says: str
    spec: dict[str, Any]
    pool_name: str = "kvpool-dry-run"


def rdma(**parts: Any) -> dict[str, Any]:
    return {"transport": {"protocol": "RDMA"}, "segment": {"size": "1Gi"}, **parts}


def tcp(**transport: Any) -> dict[str, Any]:
    return {"transport": {"protocol": "TCP", **transport}, "segment": {"size": "1Gi"}}


def tolerating(**toleration: Any) -> dict[str, Any]:
    return rdma(agent={"tolerations": [toleration]})


def on_nodes(**requirement: Any) -> dict[str, Any]:
    terms = [{"matchExpressions": [requirement]}]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    return rdma(agent={"affinity": affinity})


ETCD = {"endpoints": ["etcd:2379"]}

BROKEN = (
    Case("a-dotted-name", "", "without a dot", rdma(), pool_name="a.b"),
    Case("a-long-name", "", "at most 40", rdma(), pool_name="a" * 41),
    Case(
        "two-stores",
        "spec.store",
        "exclude each other",
        rdma(store={"managed": {}, "external": {"masterAddress": "m:50051"}}),
    ),
    Case(
        "ha-without-etcd",
        "spec.store.managed.etcd",
        "belong together",
        rdma(store={"managed": {"ha": "Etcd"}}),
    ),
    Case(
        "etcd-without-ha",
        "spec.store.managed.etcd",
        "belong together",
        rdma(store={"managed": {"etcd": ETCD}}),
    ),
    Case(
        "two-lone-masters",
        "spec.store.managed.replicas",
        "an index of its own",
        rdma(store={"managed": {"replicas": 2}}),
    ),
    Case(
        "a-short-lease",
        "spec.store.managed.leaseTTL",
        "from 1s",
        rdma(store={"managed": {"leaseTTL": "10ms"}}, cache={"loadTimeout": "5ms"}),
    ),
    Case(
        "a-long-lease",
        "spec.store.external.leaseTTL",
        "to 1h",
        rdma(store={"external": {"masterAddress": "m:1", "leaseTTL": "2h"}}),
    ),
    Case("devices-on-tcp", "spec.transport.devices", "RDMA devices", tcp(devices=["mlx5_0"])),
    Case("a-gid-on-tcp", "spec.transport.gidIndex", "for RDMA", tcp(gidIndex=3)),
    Case("fallback-from-tcp", "spec.transport.fallback", "nothing to fall back to", tcp(fallback="Allow")),
    Case("a-tiny-segment", "spec.segment.size", "from 16Mi", rdma(segment={"size": "15Mi"})),
    Case("a-huge-segment", "spec.segment.size", "to 64Ti", rdma(segment={"size": "65Ti"})),
    Case(
        "a-tiny-ring", "spec.segment.ringSize", "from 1Mi", rdma(segment={"size": "1Gi", "ringSize": "1Ki"})
    ),
    Case(
        "half-a-page",
        "spec.segment.hugepages",
        "multiple of the page",
        rdma(segment={"size": "1537Mi", "hugepages": "1Gi"}),
    ),
    Case(
        "an-endless-drain",
        "spec.agent.drain.timeout",
        "at most 24h",
        rdma(agent={"drain": {"timeout": "25h"}}),
    ),
    Case("no-time-to-load", "spec.cache.loadTimeout", "more than 0s", rdma(cache={"loadTimeout": "0s"})),
    Case(
        "a-load-beyond-its-lease", "spec.cache.loadTimeout", "thrown away", rdma(cache={"loadTimeout": "31s"})
    ),
    Case(
        "no-time-to-look-up",
        "spec.engines.kvTransferConfig.lookupTimeout",
        "more than 0s",
        rdma(engines={"kvTransferConfig": {"lookupTimeout": "0s"}}),
    ),
    Case(
        "endless-saves",
        "spec.engines.kvTransferConfig.saveTimeout",
        "at most 10m",
        rdma(engines={"kvTransferConfig": {"saveTimeout": "11m"}}),
    ),
    Case(
        "memory-without-the-segment",
        "spec.agent.resources.limits.memory",
        "the segment and the rings",
        rdma(agent={"resources": {"limits": {"memory": "2Gi"}}}),
    ),
    Case(
        "a-request-above-its-limit",
        "spec.agent.resources.requests",
        "no larger than its limit",
        rdma(agent={"resources": {"requests": {"cpu": "1.5"}, "limits": {"cpu": "1400m"}}}),
    ),
    Case(
        "an-empty-requirement",
        "spec.compatibility.require",
        "asks nothing",
        rdma(compatibility={"require": {}}),
    ),
    Case(
        "a-port-of-the-store",
        "spec.telemetry.metrics.port",
        "the store's",
        rdma(telemetry={"metrics": {"port": 16_000}}),
    ),
    Case(
        "scrapes-by-the-millisecond",
        "spec.telemetry.metrics.serviceMonitor.interval",
        "whole seconds",
        rdma(telemetry={"metrics": {"serviceMonitor": {"interval": "5500ms"}}}),
    ),
    Case(
        "a-toleration-of-nothing",
        "spec.agent.tolerations.0.key",
        "without a key",
        tolerating(effect="NoSchedule"),
    ),
    Case(
        "a-value-for-exists",
        "spec.agent.tolerations.0.value",
        "compares no value",
        tolerating(key="a", operator="Exists", value="b"),
    ),
    Case(
        "seconds-of-noschedule",
        "spec.agent.tolerations.0.tolerationSeconds",
        "NoExecute",
        tolerating(key="a", effect="NoSchedule", tolerationSeconds=5),
    ),
    Case("in-nothing", "values", "need values", on_nodes(key="zone", operator="In")),
    Case("exists-with-values", "values", "take none", on_nodes(key="zone", operator="Exists", values=["a"])),
    Case(
        "greater-than-a-word",
        "values",
        "one whole number",
        on_nodes(key="cores", operator="Gt", values=["many"]),
    ),
    Case(
        "namespaces-in-nothing",
        "values",
        "need values",
        rdma(engines={"namespaces": {"matchExpressions": [{"key": "team", "operator": "In"}]}}),
    ),
    Case(
        "a-selector-that-is-no-label",
        "spec.agent.nodeSelector",
        "name of a label",
        rdma(agent={"nodeSelector": {"a b": "c"}}),
    ),
    Case(
        "namespaces-by-no-label",
        "spec.engines.namespaces.matchLabels",
        "name of a label",
        rdma(engines={"namespaces": {"matchLabels": {"-": "c"}}}),
    ),
    Case(
        "a-monitor-of-no-label",
        "spec.telemetry.metrics.serviceMonitor.labels",
        "name of a label",
        rdma(telemetry={"metrics": {"serviceMonitor": {"labels": {"x/": "c"}}}}),
    ),
)
