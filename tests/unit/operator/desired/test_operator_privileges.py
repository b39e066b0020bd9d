"""Least privilege: everything restricted that can be, and each thing beyond it has the one field that asks for it."""

from typing import Any

import pytest

from kvpool_operator.api.conditions import Reason
from kvpool_operator.desired import agent, pod
from kvpool_operator.desired.children import KINDS, RefusedPoolError, children
from kvpool_operator.desired.meta import Manifest
from kvpool_operator.desired.refusals import is_allowed, refusals, repository
from unit.operator.desired.builders import RELEASE, SETTINGS, SOCKET, container, facts, generous, pool
from unit.operator.desired.cases import CASES, RDMA

EVERY = pytest.mark.parametrize("case", CASES)


def manifests(case: str) -> tuple[Manifest, ...]:
    return children(*CASES[case]).manifests


def pods(case: str) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in manifests(case) if "template" in one.get("spec", {})]


def pod_of(changes: dict[str, Any]) -> dict[str, Any]:
    daemon_set = agent.daemon_set(pool(changes), facts())
    return dict(daemon_set["spec"]["template"]["spec"])


@EVERY
def test_no_container_is_privileged_or_may_become_so(case: str) -> None:
    for one in pods(case):
        assert one["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC", "shareProcessNamespace"} & set(one)
        for each in [*one["containers"], *one.get("initContainers", ())]:
            security = each["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in security


@EVERY
def test_masters_are_fit_for_the_restricted_level(case: str) -> None:
    for one in pods(case):
        if one["serviceAccountName"].endswith("-master"):
            assert one["securityContext"]["runAsNonRoot"] is True
            assert one["automountServiceAccountToken"] is False
            assert all("hostPath" not in volume for volume in one["volumes"])
            assert all("add" not in each["securityContext"]["capabilities"] for each in one["containers"])


def test_an_agent_without_rdma_is_nobody_and_has_no_capability() -> None:
    one = pod_of({})
    assert one["securityContext"]["runAsUser"] == pod.NOBODY
    assert "add" not in one["containers"][0]["securityContext"]["capabilities"]
    assert "runtimeClassName" not in one
    assert "hostNetwork" not in one


def test_rdma_brings_root_with_ipc_lock_alone_and_the_device() -> None:
    one = pod_of(RDMA)
    (main,) = one["containers"]
    # A capability that is added reaches only root: another user would meet the node's memlock limit.
    assert one["securityContext"]["runAsUser"] == 0
    assert main["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    for amounts in (main["resources"]["requests"], main["resources"]["limits"]):
        assert amounts["rdma/hca_shared_devices_a"] == "1"


def test_a_node_without_the_device_keeps_its_agent_pending_instead_of_falling_back() -> None:
    assert "rdma/hca_shared_devices_a" in pod_of(RDMA)["containers"][0]["resources"]["limits"]
    assert "rdma/hca_shared_devices_a" not in str(pod_of({}))


def test_the_socket_folder_is_the_agents_and_the_groups_and_is_never_made_anew() -> None:
    for changes, owner in (({}, pod.NOBODY), (RDMA, 0)):
        one = pod_of(changes)
        (init,) = one["initContainers"]
        line = " ".join([*init["command"], *init["args"]])
        assert line == f"install -d -m 2750 -o {owner} -g {SOCKET.gid} /run/kvpool"
        assert init["securityContext"]["capabilities"]["add"] == ["CHOWN", "FOWNER", "FSETID"]
        assert one["securityContext"]["runAsUser"] == owner
        assert one["securityContext"]["runAsGroup"] == SOCKET.gid
        (host,) = (volume["hostPath"] for volume in one["volumes"] if "hostPath" in volume)
        assert host == {"path": SOCKET.host_path, "type": "DirectoryOrCreate"}


def environment(changes: dict[str, Any]) -> dict[str, str]:
    one = container(agent.daemon_set(pool(changes), facts()))
    return {variable["name"]: variable.get("value", "") for variable in one["env"]}


@pytest.mark.parametrize("variable", agent.VISIBLE_DEVICES)
def test_an_agent_that_needs_no_gpu_sees_none_whatever_the_nodes_default_runtime(variable: str) -> None:
    assert environment({})[variable] == "void"
    assert (
        environment({"agent": {"runtimeClassName": "nvidia"}, "engines": {"mode": "Copy"}})[variable]
        == "void"
    )
    assert environment({"agent": {"runtimeClassName": "nvidia"}})[variable] == "all"


@EVERY
def test_no_gpu_is_ever_taken_from_the_scheduler(case: str) -> None:
    for one in pods(case):
        for each in one["containers"]:
            asked = {name for amounts in each["resources"].values() for name in amounts}
            assert not [name for name in asked if "gpu" in name]


def test_huge_pages_are_asked_for_in_place_of_memory() -> None:
    (main,) = pod_of({"segment": {"hugepages": "1Gi"}})["containers"]
    plain = pod_of({})["containers"][0]
    assert main["resources"]["limits"] == {"hugepages-1Gi": "64Gi"}
    assert plain["resources"]["requests"]["memory"] == "67Gi"
    assert main["resources"]["requests"] == {"cpu": "1", "memory": "3Gi", "hugepages-1Gi": "64Gi"}


def test_memory_is_asked_for_from_the_segment_and_the_rings_and_not_limited() -> None:
    (main,) = pod_of({"segment": {"size": "1Ti", "ringSize": "1Gi"}})["containers"]
    assert main["resources"] == {"requests": {"cpu": "1", "memory": "1033Gi"}}


def test_what_is_computed_never_exceeds_what_is_limited() -> None:
    limits = {"agent": {"resources": {"limits": {"cpu": "500m", "memory": "66Gi"}}}}
    (main,) = pod_of(limits)["containers"]
    assert main["resources"]["requests"] == {"cpu": "500m", "memory": "66Gi"}


def test_an_agents_role_is_its_status_and_nothing_else() -> None:
    """A peer's operator reads every Secret of the cluster."""
    (role,) = (one for one in manifests("everything") if one["kind"] == "Role")
    assert role["rules"] == [
        {"apiGroups": ["kvpool.dev"], "resources": ["kvstorenodes"], "verbs": ["get"]},
        {"apiGroups": ["kvpool.dev"], "resources": ["kvstorenodes/status"], "verbs": ["patch"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "patch"]},
    ]


@EVERY
def test_nothing_is_cluster_wide_or_in_another_namespace(case: str) -> None:
    for one in manifests(case):
        assert one["metadata"]["namespace"] == "default"
        assert (one["apiVersion"], one["kind"]) in KINDS
    assert not {kind for _, kind in KINDS} & {
        "Secret",
        "ClusterRole",
        "ClusterRoleBinding",
        "Namespace",
        "Pod",
    }


def test_host_network_is_the_operators_to_permit() -> None:
    asked = pool({"transport": {"hostNetwork": True}})
    (refusal,) = refusals(asked, facts())
    assert (refusal.reason, refusal.field) == (Reason.HOST_NETWORK_FORBIDDEN, "spec.transport.hostNetwork")
    with pytest.raises(RefusedPoolError, match="does not permit it"):
        children(asked, facts())
    # Even where somebody renders without asking first.
    assert "hostNetwork" not in agent.daemon_set(asked, facts())["spec"]["template"]["spec"]
    permitted = agent.daemon_set(asked, facts(settings=generous()))
    assert permitted["spec"]["template"]["spec"]["hostNetwork"] is True
    assert container(permitted)["ports"][0]["hostPort"] == 9400


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("kvpool/agent", "kvpool/agent"),
        ("kvpool/agent:1", "kvpool/agent"),
        ("kvpool/agent:1@sha256:ab", "kvpool/agent"),
        ("host:5000/kvpool/agent", "host:5000/kvpool/agent"),
        ("host:5000/kvpool/agent:1", "host:5000/kvpool/agent"),
    ],
)
def test_a_repository_is_read_from_an_image(image: str, name: str) -> None:
    assert repository(image) == name


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("kvpool/agent:1", True),
        ("kvpool/deep/agent", True),
        ("exact/agent@sha256:ab", True),
        ("exact/agent2", False),
        ("exact/agent/more", False),
        ("kvpool", False),
        ("kvpoolx/agent", False),
        ("evil/kvpool/agent", False),
        ("kvpool/../evil", False),
    ],
)
def test_an_image_has_to_come_from_an_allowed_repository(image: str, allowed: bool) -> None:
    assert is_allowed(image, ("kvpool/", "exact/agent")) is allowed


def test_an_image_from_elsewhere_is_refused_with_what_is_allowed() -> None:
    (refusal,) = refusals(pool({"agent": {"image": "evil/agent:1"}}), facts())
    assert refusal.reason is Reason.IMAGE_NOT_ALLOWED
    assert "evil/agent is not one of the repositories" in refusal.message
    assert str(SETTINGS.allowed_repositories[0]) in refusal.message


def test_the_releases_image_needs_no_permission() -> None:
    assert refusals(pool(), facts()) == ()
    assert container(agent.daemon_set(pool(), facts()))["image"] == RELEASE.agent_image
