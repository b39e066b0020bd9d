"""A real API server accepts the definitions and agrees with the models, rule by rule.

Takes any cluster by KUBECONFIG and changes nothing in it but the two definitions, which it applies: every object is
sent as a dry run.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cluster.server import NEEDS_CLUSTER, Server
from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.parse import parse_pool
from unit.operator.api.broken import BROKEN, Case
from unit.operator.api.objects import BASE, specs

pytestmark = NEEDS_CLUSTER

PATH = "/apis/kvpool.dev/v1alpha1/namespaces/default/kvstorepools"

Post = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def post(served: Server) -> Post:
    """Sends a pool as a dry run; returns what the server complained about, "" for nothing."""

    def post_pool(body: dict[str, Any]) -> str:
        status, message = served.call("POST", f"{PATH}?dryRun=All&fieldValidation=Ignore", body)
        assert status in (201, 422), (status, message)
        return message

    return post_pool


def pool(spec: dict[str, Any], name: str = "kvpool-dry-run") -> dict[str, Any]:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVStorePool",
        "metadata": {"name": name, "namespace": "default"},
        "spec": copy.deepcopy(spec),
    }


def refusal(body: dict[str, Any]) -> str:
    """What our own models say, "" for nothing."""
    try:
        parse_pool(body)
    except InvalidObjectError as error:
        return str(error)
    return ""


def test_the_smallest_pool_is_accepted(post: Post) -> None:
    assert post(pool(BASE)) == ""


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_the_server_refuses_a_broken_rule_with_its_words(post: Post, case: Case) -> None:
    message = post(pool(case.spec, case.pool_name))
    assert case.says in message
    assert case.field in message.replace("[", ".").replace("]", "")


@settings(
    max_examples=int(os.environ.get("KVPOOL_FUZZ", "150")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(specs())
def test_the_server_and_the_models_accept_the_same(post: Post, spec: dict[str, Any]) -> None:
    body = pool(spec)
    ours, theirs = refusal(body), post(body)
    assert bool(ours) == bool(theirs), f"ours: {ours or 'accepted'}; theirs: {theirs or 'accepted'}"
