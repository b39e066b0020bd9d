"""The definitions and the models say the same: what one accepts the other accepts, and means the same by it."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvpool_operator.api import quantity
from kvpool_operator.api.model import InvalidObjectError
from kvpool_operator.api.node import NodeStatus
from kvpool_operator.api.parse import parse_pool
from kvpool_operator.api.pool import PoolSpec
from kvpool_operator.api.status import PoolStatus
from unit.operator.api.objects import BASE, NODE, POOL, specs, value
from unit.operator.api.structural import admit

SPEC = POOL["properties"]["spec"]


def reading(model: type[Any], tree: Any) -> Any:
    """The model's reading, None where it refuses."""
    try:
        return model.model_validate(tree)
    except ValidationError:
        return None


@settings(max_examples=300)
@given(specs())
@example(BASE)
@example({**BASE, "paused": None})
@example({**BASE, "segment": {"size": True}})
@example({**BASE, "cache": {"loadTimeout": "10s\n"}})
def test_a_spec_is_accepted_by_the_model_exactly_if_by_the_schema(tree: Any) -> None:
    stored, faults = admit(SPEC, tree)
    parsed = reading(PoolSpec, tree)
    assert (parsed is not None) == (not faults), faults
    if parsed is not None:
        # The defaults of both are the same, and what the model prints is what the server would store, canonically.
        assert reading(PoolSpec, stored) == parsed
        again, faults = admit(SPEC, parsed.tree())
        assert not faults
        assert again == parsed.tree()
        assert reading(PoolSpec, again) == parsed


@settings(max_examples=200)
@given(value(POOL["properties"]["status"]))
def test_a_pool_status_is_accepted_by_the_model_exactly_if_by_the_schema(tree: Any) -> None:
    if isinstance(tree, dict):
        assert (reading(PoolStatus, tree) is not None) == (not admit(POOL["properties"]["status"], tree)[1])


@settings(max_examples=200)
@given(value(NODE["properties"]["status"]))
def test_a_node_status_is_accepted_by_the_model_exactly_if_by_the_schema(tree: Any) -> None:
    if isinstance(tree, dict):
        assert (reading(NodeStatus, tree) is not None) == (not admit(NODE["properties"]["status"], tree)[1])


@given(specs())
def test_every_refusal_names_a_field_and_a_reason_and_nothing_else_is_raised(tree: Any) -> None:
    body = {"metadata": {"name": "demo", "namespace": "default"}, "spec": tree}
    try:
        parse_pool(body)
    except InvalidObjectError as error:
        refused = error.problems
    else:
        return
    assert refused
    assert all(problem.field.startswith("spec") and problem.message for problem in refused)


@given(st.integers(0, quantity.LARGEST_SIZE))
def test_a_printed_size_is_read_back(size: int) -> None:
    assert quantity.parse_size(quantity.print_size(size)) == size


@given(st.integers(0, 9_999_999))
def test_a_printed_amount_of_cpu_is_read_back(thousandths: int) -> None:
    assert quantity.parse_cpu(quantity.print_cpu(thousandths)) == thousandths


@given(st.integers(0, 99_999 * 3_600_000))
def test_a_printed_duration_is_read_back(milliseconds: int) -> None:
    assert quantity.parse_duration(quantity.print_duration(milliseconds)) == milliseconds
