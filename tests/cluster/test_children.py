"""A real API server takes every child as it is rendered, and Pod Security says of the masters what we say.

Children are sent as dry runs; two namespaces are made, and removed again.
"""

import copy
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.server import NEEDS_CLUSTER, Server
from kvpool_operator.desired.children import children
from unit.operator.desired.cases import CASES

pytestmark = NEEDS_CLUSTER

PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ConfigMap": "configmaps",
    "Service": "services",
    "StatefulSet": "statefulsets",
    "DaemonSet": "daemonsets",
    "KVStoreNode": "kvstorenodes",
    "Lease": "leases",
}
OF_THE_PROMETHEUS_OPERATOR = {"PodMonitor", "ServiceMonitor"}


def path(manifest: dict[str, Any]) -> str:
    group, namespace = manifest["apiVersion"], manifest["metadata"]["namespace"]
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    return f"{root}/namespaces/{namespace}/{PLURALS[manifest['kind']]}/{manifest['metadata']['name']}"


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_every_child_as_it_is(served: Server, case: str) -> None:
    for manifest in children(*CASES[case]).manifests:
        if manifest["kind"] not in OF_THE_PROMETHEUS_OPERATOR:
            status, message = served.apply(path(manifest), manifest, "&dryRun=All&fieldValidation=Strict")
            assert status in (200, 201), f"{manifest['kind']}: {message}"


@pytest.fixture(scope="module", params=["restricted", "privileged"])
def guarded(server: Server, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A level of Pod Security, and a namespace that enforces it."""
    name = f"kvpool-test-{uuid.uuid4().hex[:12]}"
    labels = {"pod-security.kubernetes.io/enforce": request.param}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    status, message = server.apply(f"/api/v1/namespaces/{name}", namespace)
    assert status in (200, 201), message
    deadline, pause = time.monotonic() + 30, threading.Event()
    while server.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")[0] != 200:
        assert time.monotonic() < deadline, "the namespace got no default account in 30 s"
        pause.wait(0.2)
    yield request.param, name
    server.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.mark.parametrize("case", ["tcp", "rdma", "etcd"])
def test_masters_are_restricted_and_only_agents_need_more(
    server: Server, guarded: tuple[str, str], case: str
) -> None:
    level, namespace = guarded
    for manifest in children(*CASES[case]).manifests:
        template = manifest.get("spec", {}).get("template")
        if template is None:
            continue
        spec = copy.deepcopy(template["spec"])
        spec |= {"serviceAccountName": "default", "automountServiceAccountToken": False}
        spec.pop("runtimeClassName", None)  # the cluster need not have it
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"}, "spec": spec}
        status, message = server.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        if manifest["kind"] == "DaemonSet" and level == "restricted":
            assert status == 403, "an agent with a hostPath would be admitted"
            assert "restricted volume types" in message
        else:
            assert status == 201, message
