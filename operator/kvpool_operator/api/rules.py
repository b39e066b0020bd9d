"""Rules that no single field can hold, each once as CEL for the definition and once as a Python check.

Promises: both sides of a rule say the same, and the message says how to mend it. Refuses to look at anything but the
object: what depends on the cluster is in `kvpool_operator.desired.refusals`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpool_operator.api.model import (
    LABEL_KEY_PATTERN,
    LONGEST_LABEL_KEY,
    Section,
)
from kvpool_operator.api.node import NodeSpec
from kvpool_operator.api.placement import (
    LabelRequirement,
    LabelSelector,
    NodeOperator,
    NodeRequirement,
    Resources,
    SelectorOperator,
    Toleration,
    TolerationOperator,
)
from kvpool_operator.api.pool import (
    AgentSpec,
    Cache,
    Drain,
    Fallback,
    Hugepages,
    KVStorePool,
    KvTransferConfig,
    PoolSpec,
    Protocol,
    RequiredIdentity,
    Segment,
    Transport,
)
from kvpool_operator.api.quantity import LARGEST_SIZE
from kvpool_operator.api.store import ExternalStore, HighAvailability, ManagedStore, StoreSpec
from kvpool_operator.api.telemetry import Metrics, ServiceMonitor

LONGEST_NAME: Final = 40
"""A StatefulSet's pods carry its name and a hash in a label of 63; the longest suffix of a child has 12 characters."""

SMALLEST_SEGMENT: Final = 16 << 20
AGENT_OVERHEAD: Final = 1 << 30
"""Bytes of an agent's own processes: the agent, its segment worker, its prober and eight loaders."""

PAGE: Final[Mapping[Hugepages, int]] = {
    Hugepages.NONE: 1,
    Hugepages.MEGABYTES: 2 << 20,
    Hugepages.GIGABYTE: 1 << 30,
}
STORE_PORTS: Final = (15_000, 17_000)
"""Ports that Mooncake's clients choose from."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        model: the part that it is about, wherever that occurs.
        field: the field to blame, below that part; "" blames the part itself.
        cel: true where the rule holds; `self` is the part. For rules about change, `oldSelf` is what it was.
        message: what to do about it.
        check: the same in Python; None for rules about change, which only an API server can see.
    """

    model: type[Section]
    field: str
    cel: str
    message: str
    check: Callable[[Any], bool] | None


def _size(field: str, least: int, most: int) -> str:
    value = f"quantity(string(self.{field}))"
    return f"{value}.compareTo(quantity('{least}')) >= 0 && {value}.compareTo(quantity('{most}')) <= 0"


def _span(field: str, least: str, most: str) -> str:
    return f"duration(self.{field}) >= duration('{least}') && duration(self.{field}) <= duration('{most}')"


def _takes_no_values(operator: str) -> bool:
    return operator in ("Exists", "DoesNotExist")


def _node_values_fit(one: NodeRequirement) -> bool:
    if one.operator in (NodeOperator.GT, NodeOperator.LT):
        return len(one.values) == 1 and one.values[0].isdecimal() and one.values[0].isascii()
    return bool(one.values) != _takes_no_values(one.operator)


def _label_values_fit(one: LabelRequirement) -> bool:
    return bool(one.values) != (one.operator in (SelectorOperator.EXISTS, SelectorOperator.DOES_NOT_EXIST))


def _requests_fit(one: Resources) -> bool:
    pairs = ((one.requests.cpu, one.limits.cpu), (one.requests.memory, one.limits.memory))
    return all(request is None or limit is None or request <= limit for request, limit in pairs)


def _memory_fits(spec: PoolSpec) -> bool:
    limit = spec.agent.resources.limits.memory
    if limit is None or spec.segment.hugepages is not Hugepages.NONE:
        return True
    return limit >= spec.segment.size + spec.segment.ring_size + AGENT_OVERHEAD


def _plain_label(name: str) -> bool:
    return (
        len(name) <= LONGEST_NAME
        and name.isascii()
        and name == name.lower()
        and name.replace("-", "a").isalnum()
        and name[0] != "-" != name[-1]
    )


_NAME: Final = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_NO_VALUES: Final = "(self.operator in ['Exists', 'DoesNotExist'])"


def _keys_are_labels(labels: Mapping[str, str]) -> bool:
    return all(len(key) <= LONGEST_LABEL_KEY and re.fullmatch(LABEL_KEY_PATTERN[1:-1], key) for key in labels)


def _label_keys(model: type[Section], field: str, labels: Callable[[Any], Mapping[str, str]]) -> Rule:
    return Rule(
        model,
        field,
        f"self.{field}.all(key, size(key) <= {LONGEST_LABEL_KEY} && key.matches('{LABEL_KEY_PATTERN}'))",
        "every key is the name of a label, such as zone or example.com/zone",
        lambda one: _keys_are_labels(labels(one)),
    )


_CONNECTOR_TIMEOUTS: Final[Mapping[str, Callable[[KvTransferConfig], bool]]] = {
    "lookupTimeout": lambda config: 1 <= config.lookup_timeout <= 600_000,
    "saveTimeout": lambda config: 1 <= config.save_timeout <= 600_000,
}

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        KVStorePool,
        "metadata.name",
        f"size(self.metadata.name) <= {LONGEST_NAME} && self.metadata.name.matches('{_NAME}')",
        f"a pool's name is part of keys and of its children's names: at most {LONGEST_NAME} lower-case letters, digits"
        " and '-', without a dot",
        lambda pool: _plain_label(pool.metadata.name),
    ),
    Rule(
        StoreSpec,
        "",
        "!(has(self.managed) && has(self.external))",
        "managed and external exclude each other: leave one of them out",
        lambda store: not (store.managed and store.external),
    ),
    Rule(
        ManagedStore,
        "etcd",
        "(self.ha == 'Etcd') == has(self.etcd)",
        "etcd and `ha: Etcd` belong together: write both or neither",
        lambda store: (store.ha is HighAvailability.ETCD) == (store.etcd is not None),
    ),
    Rule(
        ManagedStore,
        "replicas",
        "self.replicas == 1 || self.ha == 'Etcd'",
        "more than one master needs `ha: Etcd`: without it each would hold an index of its own",
        lambda store: store.replicas == 1 or store.ha is HighAvailability.ETCD,
    ),
    Rule(
        ManagedStore,
        "leaseTTL",
        _span("leaseTTL", "1s", "1h"),
        "from 1s to 1h",
        lambda store: 1000 <= store.lease_ttl <= 3_600_000,
    ),
    Rule(
        ExternalStore,
        "leaseTTL",
        _span("leaseTTL", "1s", "1h"),
        "from 1s to 1h",
        lambda store: 1000 <= store.lease_ttl <= 3_600_000,
    ),
    Rule(
        Transport,
        "devices",
        "self.protocol == 'RDMA' || size(self.devices) == 0",
        "devices are RDMA devices: leave them out, or set `protocol: RDMA`",
        lambda transport: transport.protocol is Protocol.RDMA or not transport.devices,
    ),
    Rule(
        Transport,
        "gidIndex",
        "self.protocol == 'RDMA' || !has(self.gidIndex)",
        "a GID index is for RDMA: leave it out, or set `protocol: RDMA`",
        lambda transport: transport.protocol is Protocol.RDMA or transport.gid_index is None,
    ),
    Rule(
        Transport,
        "fallback",
        "self.protocol == 'RDMA' || self.fallback == 'Deny'",
        "there is nothing to fall back to from TCP: leave it out, or set `protocol: RDMA`",
        lambda transport: transport.protocol is Protocol.RDMA or transport.fallback is Fallback.DENY,
    ),
    Rule(
        Segment,
        "size",
        "quantity(string(self.size)).compareTo(quantity('0')) == 0 ||"
        f" ({_size('size', SMALLEST_SEGMENT, LARGEST_SIZE)})",
        "0, or from 16Mi to 64Ti: Mooncake mounts nothing smaller",
        lambda segment: segment.size == 0 or SMALLEST_SEGMENT <= segment.size <= LARGEST_SIZE,
    ),
    Rule(
        Segment,
        "ringSize",
        _size("ringSize", 1 << 20, 64 << 30),
        "from 1Mi to 64Gi",
        lambda segment: 1 << 20 <= segment.ring_size <= 64 << 30,
    ),
    Rule(
        Segment,
        "hugepages",
        "self.hugepages == 'None' || !quantity(string(self.size)).isInteger() ||"
        " quantity(string(self.size)).asInteger() % (self.hugepages == '2Mi' ? 2097152 : 1073741824) == 0",
        "the segment's size has to be a multiple of the page: round it",
        lambda segment: segment.size % PAGE[segment.hugepages] == 0,
    ),
    Rule(
        Drain,
        "timeout",
        _span("timeout", "0s", "24h"),
        "at most 24h",
        lambda drain: drain.timeout <= 86_400_000,
    ),
    Rule(
        Cache,
        "loadTimeout",
        _span("loadTimeout", "1ms", "10m"),
        "more than 0s and at most 10m",
        lambda cache: 1 <= cache.load_timeout <= 600_000,
    ),
    *(
        Rule(
            KvTransferConfig,
            name,
            _span(name, "1ms", "10m"),
            "more than 0s and at most 10m",
            check,
        )
        for name, check in _CONNECTOR_TIMEOUTS.items()
    ),
    Rule(
        PoolSpec,
        "cache.loadTimeout",
        "duration(self.cache.loadTimeout) <= (has(self.store.external) ? duration(self.store.external.leaseTTL) :"
        " has(self.store.managed) ? duration(self.store.managed.leaseTTL) : duration('30s'))",
        "a load that outlives its lease is thrown away: no longer than the store's leaseTTL (30s if none is written)",
        lambda spec: spec.cache.load_timeout <= spec.store.lease_ttl,
    ),
    Rule(
        PoolSpec,
        "agent.resources.limits.memory",
        "self.segment.hugepages != 'None' || !has(self.agent.resources.limits.memory) ||"
        " quantity(string(self.agent.resources.limits.memory)).compareTo(quantity(string(self.segment.size))"
        f".add(quantity(string(self.segment.ringSize))).add(quantity('{AGENT_OVERHEAD}'))) >= 0",
        "the segment and the rings are the agent's memory: at least segment.size + segment.ringSize + 1Gi, better one"
        " ring for each rank of the node; or leave the limit out",
        _memory_fits,
    ),
    Rule(
        Resources,
        "requests",
        " && ".join(
            f"(!has(self.requests.{name}) || !has(self.limits.{name}) ||"
            f" quantity(string(self.requests.{name})).compareTo(quantity(string(self.limits.{name}))) <= 0)"
            for name in ("cpu", "memory")
        ),
        "a request is no larger than its limit",
        _requests_fit,
    ),
    Rule(
        RequiredIdentity,
        "",
        "has(self.model) || has(self.fingerprint) || has(self.engine)",
        "an empty requirement asks nothing: name model, fingerprint or engine, or leave `require` out",
        lambda one: bool(one.model or one.fingerprint or one.engine),
    ),
    Rule(
        Metrics,
        "port",
        f"self.port < {STORE_PORTS[0]} || self.port > {STORE_PORTS[1]}",
        f"ports {STORE_PORTS[0]} to {STORE_PORTS[1]} are the store's: choose another",
        lambda metrics: not STORE_PORTS[0] <= metrics.port <= STORE_PORTS[1],
    ),
    Rule(
        ServiceMonitor,
        "interval",
        _span("interval", "5s", "1h") + " && duration(self.interval).getMilliseconds() % 1000 == 0",
        "whole seconds, from 5s to 1h",
        lambda monitor: 5000 <= monitor.interval <= 3_600_000 and monitor.interval % 1000 == 0,
    ),
    Rule(
        Toleration,
        "key",
        "has(self.key) || self.operator == 'Exists'",
        "a toleration without a key needs operator Exists: it tolerates every taint",
        lambda one: one.key is not None or one.operator is TolerationOperator.EXISTS,
    ),
    Rule(
        Toleration,
        "value",
        "self.operator == 'Equal' || !has(self.value) || self.value == ''",
        "operator Exists compares no value: leave it out, or use Equal",
        lambda one: one.operator is TolerationOperator.EQUAL or not one.value,
    ),
    Rule(
        Toleration,
        "tolerationSeconds",
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        "only a NoExecute taint is tolerated for a time: set effect NoExecute, or leave it out",
        lambda one: one.toleration_seconds is None or one.effect == "NoExecute",
    ),
    Rule(
        NodeRequirement,
        "values",
        "self.operator in ['Gt', 'Lt'] ? (size(self.values) == 1 && self.values[0].matches('^[0-9]+$')) :"
        f" (size(self.values) == 0) == {_NO_VALUES}",
        "In and NotIn need values, Gt and Lt one whole number, Exists and DoesNotExist take none",
        _node_values_fit,
    ),
    Rule(
        LabelRequirement,
        "values",
        f"(size(self.values) == 0) == {_NO_VALUES}",
        "In and NotIn need values, Exists and DoesNotExist take none",
        _label_values_fit,
    ),
    _label_keys(AgentSpec, "nodeSelector", lambda agent: agent.node_selector),
    _label_keys(LabelSelector, "matchLabels", lambda selector: selector.match_labels),
    _label_keys(ServiceMonitor, "labels", lambda monitor: monitor.labels),
    Rule(
        NodeSpec,
        "",
        "self == oldSelf",
        "a KVStoreNode stays with its pool and node: delete it, the operator makes another",
        None,
    ),
)
