"""Whatever the API accepts is rendered, and the agent and the connector accept what was rendered."""

from typing import Any

import yaml
from hypothesis import given, settings

from kvpool_agent.config import AgentConfig
from kvpool_agent.server.agent import store_config
from kvpool_engine.vllm.settings import Settings
from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.parse import parse_pool
from kvpool_operator.desired import config, engine
from kvpool_operator.desired.children import KINDS, children
from kvpool_operator.desired.refusals import refusals
from unit.operator.api.objects import specs
from unit.operator.desired.builders import ALL_MONITORS, UID, facts, generous
from unit.operator.desired.test_operator_agent_config import without_unknown_features


@settings(max_examples=200)
@given(specs())
def test_whatever_is_accepted_is_rendered_and_accepted_by_its_readers(spec: dict[str, Any]) -> None:
    body = {"metadata": {"name": "demo", "namespace": "default", "uid": UID}, "spec": spec}
    try:
        pool = parse_pool(body)
    except InvalidObjectError:
        return
    seen = facts(settings=generous(), monitors=ALL_MONITORS, nodes=("node-0",))
    if refused := refusals(pool, seen):
        assert [refusal.field for refusal in refused] == ["spec.agent.image"]
        return
    manifests = children(pool, seen).manifests
    assert {(one["apiVersion"], one["kind"]) for one in manifests} <= set(KINDS)
    tree = yaml.safe_load(config.text(without_unknown_features(pool)))
    read = AgentConfig.model_validate(tree | {"node": {"name": "node-0", "ip": "10.0.0.7"}})
    assert store_config(read).segment_size == pool.spec.segment.size
    Settings.of(engine.kv_transfer_config(pool)["kv_connector_extra_config"], {})
