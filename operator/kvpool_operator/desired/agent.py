"""The agents: a DaemonSet, one pod per node.

Promises: `OnDelete` (the operator decides which agent goes when); every privilege has its field: RDMA brings root with
IPC_LOCK alone and the device, a runtime class brings GPUs, `hostNetwork` the node's network where the operator permits
it, and without them there is none of it. A node without the RDMA device keeps its agent pending instead of falling back
unseen. The socket folder is a hostPath, which no Pod Security level but `privileged` admits.

RDMA and root: a capability that a container adds reaches only root; another user would be held to the node's memlock
limit of a few megabytes and could not register the segment.
"""

import math
from typing import Any, Final

from kvpool_operator.api.placement import Affinity, Amounts, Toleration
from kvpool_operator.api.pool import EngineMode, Hugepages, KVStorePool, Protocol
from kvpool_operator.api.quantity import print_size
from kvpool_operator.api.rules import AGENT_OVERHEAD, STORE_PORTS
from kvpool_operator.desired import config, names, pod
from kvpool_operator.desired.facts import Facts, HostNetwork
from kvpool_operator.desired.meta import Manifest, metadata, template
from kvpool_operator.desired.names import Component

CONFIG_DIRECTORY: Final = "/etc/kvpool"
USUAL_RINGS: Final = 8
"""Worker sessions that memory is asked for: the ranks of a node with eight GPUs."""

AFTER_DRAIN_SECONDS: Final = 15
"""10 s for the segment and 2 s for telemetry follow the agent's drain; the rest is margin."""

VISIBLE_DEVICES: Final = (
    "AMD_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
    "MTHREADS_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
)
"""What container runtimes of GPU vendors read. A node may have one of them as its default runtime, which gives every
container all GPUs unless told otherwise."""


def daemon_set(pool: KVStorePool, facts: Facts) -> Manifest:
    """The agents."""
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(pool, names.agent(pool), Component.AGENT),
        "spec": {
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": names.selector(pool, Component.AGENT)},
            "template": template(pool, Component.AGENT, _pod(pool, facts)),
        },
    }


def on_host_network(pool: KVStorePool, facts: Facts) -> bool:
    """Whether agents use the node's network: asked for by the pool and permitted by the operator."""
    return pool.spec.transport.host_network and facts.settings.host_network is HostNetwork.PERMITTED


def user(pool: KVStorePool) -> int:
    """User of the agent's process, and owner of the socket folder."""
    return 0 if pool.spec.transport.protocol is Protocol.RDMA else pod.NOBODY


def _pod(pool: KVStorePool, facts: Facts) -> dict[str, Any]:
    agent = pool.spec.agent
    spec: dict[str, Any] = {
        "serviceAccountName": names.agent(pool),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pod.pod_security(user=user(pool), group=facts.socket.gid),
        "nodeSelector": {"kubernetes.io/os": "linux", **agent.node_selector},
        "terminationGracePeriodSeconds": grace_seconds(pool),
        "initContainers": [_socket_folder(pool, facts)],
        "containers": [_container(pool, facts)],
        "volumes": _volumes(pool, facts),
    }
    if on_host_network(pool, facts):
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if agent.tolerations:
        spec["tolerations"] = [_toleration(one) for one in agent.tolerations]
    if agent.affinity is not None:
        spec["affinity"] = _affinity(agent.affinity)
    if agent.priority_class_name is not None:
        spec["priorityClassName"] = agent.priority_class_name
    if agent.runtime_class_name is not None:
        spec["runtimeClassName"] = agent.runtime_class_name
    if facts.settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in facts.settings.pull_secrets]
    return spec


def grace_seconds(pool: KVStorePool) -> int:
    """The pod's grace period: the agent's own drain, then the segment, then telemetry."""
    return math.ceil(config.drain_milliseconds(pool) / 1000) + AFTER_DRAIN_SECONDS


def image(pool: KVStorePool, facts: Facts) -> str:
    """The agents' image: the pool's own, or the release's."""
    return pool.spec.agent.image or facts.release.agent_image


def _socket_folder(pool: KVStorePool, facts: Facts) -> dict[str, Any]:
    """Gives the folder, which the kubelet makes as root's, to the agent and the pool's group; never makes it anew."""
    return {
        "name": "socket-folder",
        **pod.pull(image(pool, facts), facts.settings.pull_policy),
        "command": ["install", "-d", "-m", "2750"],
        "args": ["-o", str(user(pool)), "-g", str(facts.socket.gid), config.SOCKET_DIRECTORY],
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi"},
            "limits": {"memory": "64Mi"},
        },
        "securityContext": {
            **pod.container_security(add=("CHOWN", "FOWNER", "FSETID")),
            "runAsUser": 0,
            "runAsNonRoot": False,
        },
        "volumeMounts": [{"name": "sockets", "mountPath": config.SOCKET_DIRECTORY}],
    }


def _container(pool: KVStorePool, facts: Facts) -> dict[str, Any]:
    port: dict[str, Any] = {
        "name": "metrics",
        "containerPort": pool.spec.telemetry.metrics.port,
        "protocol": "TCP",
    }
    if on_host_network(pool, facts):
        port["hostPort"] = port["containerPort"]
    rdma = pool.spec.transport.protocol is Protocol.RDMA
    return {
        "name": "agent",
        **pod.pull(image(pool, facts), facts.settings.pull_policy),
        "command": ["python", "-m", "kvpool_agent"],
        "args": ["--config", f"{CONFIG_DIRECTORY}/{config.FILE}"],
        "env": _environment(pool),
        "ports": [port],
        # Huge pages of a large segment are cleared before the first answer: a second for every 4 GiB.
        "startupProbe": pod.http_probe(
            "/healthz", "metrics", period=5, failures=max(24, pool.spec.segment.size // (20 << 30))
        ),
        "readinessProbe": pod.http_probe("/readyz", "metrics", period=5, failures=2),
        "livenessProbe": pod.http_probe("/healthz", "metrics", period=10, failures=6),
        "resources": _resources(pool),
        "securityContext": pod.container_security(add=("IPC_LOCK",) if rdma else ()),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
            {"name": "sockets", "mountPath": config.SOCKET_DIRECTORY},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a path in a container
        ],
    }


def _environment(pool: KVStorePool) -> list[dict[str, Any]]:
    """The node's own part of the configuration, ports of the store, and which GPUs are seen."""
    variables: dict[str, str] = {
        "MC_MIN_RPC_PORT": str(STORE_PORTS[0]),
        "MC_MAX_RPC_PORT": str(STORE_PORTS[1]),
        **_gpus(pool),
    }
    if pool.spec.transport.gid_index is not None:
        variables["MC_GID_INDEX"] = str(pool.spec.transport.gid_index)
    return [
        pod.field_variable("KVPOOL_NODE_NAME", "spec.nodeName"),
        pod.field_variable("KVPOOL_POD_IP", "status.podIP"),
        {"name": "KVPOOL_NODE_OBJECT", "value": f"{pool.metadata.name}.$(KVPOOL_NODE_NAME)"},
        pod.quoted_variable("KVPOOL_AGENT__NODE__NAME", "KVPOOL_NODE_NAME"),
        pod.quoted_variable("KVPOOL_AGENT__NODE__IP", "KVPOOL_POD_IP"),
        pod.quoted_variable("KVPOOL_AGENT__TELEMETRY__HOST", "KVPOOL_POD_IP"),
        *({"name": name, "value": value} for name, value in variables.items()),
    ]


def sees_gpus(pool: KVStorePool) -> bool:
    """Whether agents map blocks of GPU engines: a runtime class shows the GPUs, and mapping is not ruled out."""
    return pool.spec.agent.runtime_class_name is not None and pool.spec.engines.mode is not EngineMode.COPY


def _gpus(pool: KVStorePool) -> dict[str, str]:
    variables = dict.fromkeys(VISIBLE_DEVICES, "void")
    if sees_gpus(pool):
        # The runtime class decides whose GPUs these are; other vendors' runtimes do not run the pod.
        variables = dict.fromkeys(VISIBLE_DEVICES, "all") | {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    return variables


def _resources(pool: KVStorePool) -> dict[str, Any]:
    segment, transport = pool.spec.segment, pool.spec.transport
    extended: dict[str, str] = {}
    memory = AGENT_OVERHEAD + USUAL_RINGS * segment.ring_size
    if segment.hugepages is Hugepages.NONE:
        memory += segment.size
    elif segment.size:
        extended[f"hugepages-{segment.hugepages}"] = print_size(segment.size)
    if transport.protocol is Protocol.RDMA:
        extended[transport.resource_name] = "1"
    return pod.resources(
        pool.spec.agent.resources,
        requests=Amounts.model_validate({"cpu": "1", "memory": print_size(memory)}),
        extended=extended,
    )


def _volumes(pool: KVStorePool, facts: Facts) -> list[dict[str, Any]]:
    name = names.agent_config(pool, config.text(pool))
    return [
        {"name": "config", "configMap": {"name": name}},
        {"name": "sockets", "hostPath": {"path": facts.socket.host_path, "type": "DirectoryOrCreate"}},
        {"name": "tmp", "emptyDir": {}},
    ]


def _toleration(one: Toleration) -> dict[str, Any]:
    return one.tree()


def _affinity(affinity: Affinity) -> dict[str, Any]:
    tree = affinity.tree()
    for term in tree["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]:
        for requirement in term["matchExpressions"]:
            if not requirement["values"]:
                del requirement["values"]
    return dict(tree)
