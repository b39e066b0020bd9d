"""Each rule refuses its own breach, names the field, and says how to mend it."""

import pytest

from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.parse import parse_node, parse_pool
from kvpool_operator.api.rules import RULES
from unit.operator.api.broken import BROKEN, Case
from unit.operator.api.objects import BASE


def body(spec: object, name: str = "demo") -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def test_the_smallest_pool_is_right() -> None:
    pool = parse_pool(body(BASE))
    assert pool.full_name == "default.demo"
    assert pool.spec.store.run_by_us is not None
    assert pool.spec.store.lease_ttl == 30_000


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_broken_rule_is_the_only_problem(case: Case) -> None:
    with pytest.raises(InvalidObjectError) as error:
        parse_pool(body(case.spec, case.pool_name))
    (problem,) = error.value.problems
    assert case.field in problem.field
    assert case.says in problem.message


def test_every_rule_that_a_spec_can_break_has_a_case() -> None:
    words = [rule.message for rule in RULES if rule.check is not None]
    for message in set(words):
        cases = [case for case in BROKEN if case.says in message]
        assert len(cases) >= words.count(message), message


def test_every_rule_names_a_field_that_is_there() -> None:
    for rule in RULES:
        model = rule.model
        for name in filter(None, rule.field.split(".")):
            fields = {field.alias: field for field in model.model_fields.values()}
            assert name in fields, f"{rule.model.__name__} has no {rule.field}"
            model = fields[name].annotation  # type: ignore[assignment]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidObjectError) as error:
        parse_pool(body({"transport": {"protocol": "UDP"}, "segment": {"size": "lots"}, "paused": "yes"}))
    assert [problem.field for problem in error.value.problems] == [
        "spec.transport.protocol",
        "spec.segment.size",
        "spec.paused",
    ]


@pytest.mark.parametrize(
    "wrong", [None, [], "x", {}, {"metadata": None, "spec": BASE}, {"metadata": {}, "spec": BASE}]
)
def test_what_is_no_pool_is_refused_and_not_crashed_over(wrong: object) -> None:
    with pytest.raises(InvalidObjectError):
        parse_pool(wrong)


def test_a_field_of_a_newer_release_is_ignored_as_an_api_server_would_prune_it() -> None:
    pool = parse_pool(body({**BASE, "sideways": {"fast": True}}))
    assert "sideways" not in pool.spec.tree()


def test_a_node_names_its_pool_and_node() -> None:
    node = parse_node(
        {
            "metadata": {"name": "demo.node-0", "namespace": "default"},
            "spec": {"poolName": "demo", "nodeName": "node-0"},
        }
    )
    assert node.spec.node_name == "node-0"
    with pytest.raises(InvalidObjectError, match="spec.nodeName: is required"):
        parse_node({"metadata": {"name": "n", "namespace": "d"}, "spec": {"poolName": "demo"}})
