"""Pieces that pods of masters and agents share: privileges, resources, placement, probes.

Promises: everything restricted that can be (no privilege escalation, no capabilities, a read-only root file system, the
runtime's seccomp profile); what is given beyond that is named by the caller. Refuses privileged containers.
"""

from collections.abc import Mapping
from typing import Any, Final

from kvpool_operator.api.placement import Amounts, Resources
from kvpool_operator.api.quantity import print_cpu, print_size

NOBODY: Final = 65_532
"""User and group of processes that need no privilege; the `nonroot` of common base images."""


def container_security(*, add: tuple[str, ...] = ()) -> dict[str, Any]:
    """A container's security context, with capabilities beyond none."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if add:
        capabilities["add"] = list(add)
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": capabilities,
    }


def pod_security(*, user: int, group: int) -> dict[str, Any]:
    """A pod's security context."""
    return {
        "runAsUser": user,
        "runAsGroup": group,
        "runAsNonRoot": user != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def resources(given: Resources, *, requests: Amounts, extended: Mapping[str, str]) -> dict[str, Any]:
    """A container's resources.

    Args:
        given: what the pool says.
        requests: what is asked for where the pool says nothing; capped by the pool's limits.
        extended: resources that are asked for and limited alike: devices and huge pages.
    """
    asked = {
        "cpu": _asked(given.requests.cpu, given.limits.cpu, requests.cpu),
        "memory": _asked(given.requests.memory, given.limits.memory, requests.memory),
    }
    limits = {"cpu": given.limits.cpu, "memory": given.limits.memory}
    tree = {"requests": _amounts(asked) | dict(extended), "limits": _amounts(limits) | dict(extended)}
    return {name: amounts for name, amounts in tree.items() if amounts}


def _asked(request: int | None, limit: int | None, computed: int | None) -> int | None:
    if request is not None or computed is None:
        return request
    return computed if limit is None else min(computed, limit)


def _amounts(amounts: Mapping[str, int | None]) -> dict[str, str]:
    printers = {"cpu": print_cpu, "memory": print_size}
    return {name: printers[name](amount) for name, amount in amounts.items() if amount is not None}


def field_variable(name: str, path: str) -> dict[str, Any]:
    """An environment variable from the pod's own object."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def quoted_variable(name: str, source: str) -> dict[str, Any]:
    """A variable that holds another as a YAML string: agents read overrides as YAML, and a node may be called `1e3`."""
    return {"name": name, "value": f'"$({source})"'}


def http_probe(path: str, port: str, *, period: int, failures: int, timeout: int = 5) -> dict[str, Any]:
    """A probe over HTTP; times in seconds."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def tcp_probe(port: str, *, period: int, failures: int, timeout: int = 5) -> dict[str, Any]:
    """A probe that connects; times in seconds."""
    return {
        "tcpSocket": {"port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def pull(image: str, policy: str) -> dict[str, str]:
    """Image and pull policy of a container."""
    return {"image": image, "imagePullPolicy": policy}
