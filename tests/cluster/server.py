"""A real API server, for tests that take one by KUBECONFIG."""

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvpool_operator.api import crd

if TYPE_CHECKING:
    from kubernetes import client

NEEDS_CLUSTER = [
    pytest.mark.skipif(
        not os.environ.get("KUBECONFIG"),
        reason="needs a cluster: set KUBECONFIG to one that you may try things on",
    ),
    pytest.mark.filterwarnings("default"),  # the client's own deprecation warnings are not ours
]
MANAGER = "kvpool-test"
APPLY = "application/apply-patch+yaml"


class Server:
    """Plain calls: method, path and JSON in; status and the server's complaint out, "" for none."""

    def __init__(self, api: "client.ApiClient") -> None:
        self._api = api

    def call(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> tuple[int, str]:
        """One request."""
        headers = {"Content-Type": content, "Accept": "application/json"}
        request = self._api.param_serialize(
            method, path, body=body, header_params=headers, auth_settings=["BearerToken"]
        )
        answer = self._api.call_api(*request)
        text = str(answer.read(), "utf-8", "replace")  # type: ignore[no-untyped-call]
        return answer.status, "" if answer.status < 300 else _complaint(text)

    def apply(self, path: str, body: Any, options: str = "") -> tuple[int, str]:
        """Server-side apply."""
        return self.call("PATCH", f"{path}?fieldManager={MANAGER}&force=true{options}", body, APPLY)

    def install_definitions(self) -> None:
        """Apply the definitions and wait until both kinds are served."""
        for definition in crd.definitions().values():
            name = definition["metadata"]["name"]
            status, message = self.apply(
                f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", definition
            )
            assert status in (200, 201), message
        deadline, pause = time.monotonic() + 20, threading.Event()
        for plural in ("kvstorepools", "kvstorenodes"):
            while self.call("GET", f"/apis/kvpool.dev/v1alpha1/{plural}")[0] != 200:
                assert time.monotonic() < deadline, f"{plural} are not served after 20 s"
                pause.wait(0.2)


def _complaint(text: str) -> str:
    """A refusal's message; what is not served at all is answered with plain text."""
    try:
        return str(json.loads(text).get("message", text))
    except json.JSONDecodeError:
        return text
