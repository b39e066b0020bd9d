"""Conditions change as the API conventions say."""

import pytest

from kvpool_operator.api.conditions import (
    LONGEST_MESSAGE,
    Condition,
    NodeCondition,
    PoolCondition,
    Reason,
    Status,
    find,
    set_condition,
)

MONDAY, TUESDAY = "2026-11-30T10:00:00Z", "2026-12-01T10:00:00Z"


def ready(
    before: tuple[Condition, ...],
    status: Status,
    *,
    reason: Reason = Reason.ALL_UP,
    message: str = "",
    generation: int = 1,
    now: str = MONDAY,
) -> tuple[Condition, ...]:
    return set_condition(
        before, PoolCondition.READY, status, reason=reason, message=message, generation=generation, now=now
    )


def test_the_time_moves_only_with_the_status() -> None:
    first = ready((), Status.FALSE, reason=Reason.NOT_READY)
    again = ready(
        first, Status.FALSE, reason=Reason.AGENTS_MISSING, message="2 of 3", generation=2, now=TUESDAY
    )
    assert again[0].last_transition_time == MONDAY
    assert (again[0].reason, again[0].message, again[0].observed_generation) == ("AgentsMissing", "2 of 3", 2)
    assert ready(again, Status.TRUE, now=TUESDAY)[0].last_transition_time == TUESDAY


def test_a_status_without_news_is_byte_for_byte_the_old_one() -> None:
    first = ready((), Status.TRUE)
    assert ready(first, Status.TRUE, now=TUESDAY) == first


def test_a_type_appears_once_and_the_order_is_fixed() -> None:
    conditions: tuple[Condition, ...] = ()
    for kind in [*reversed(PoolCondition), *PoolCondition]:
        conditions = set_condition(
            conditions, kind, Status.UNKNOWN, reason=Reason.NOT_OBSERVED, message="", generation=1, now=MONDAY
        )
    assert [one.type for one in conditions] == [str(kind) for kind in PoolCondition]


def test_somebody_elses_condition_is_kept() -> None:
    foreign = Condition.model_validate(
        {"type": "Foreign", "status": "True", "lastTransitionTime": MONDAY, "reason": "Because"}
    )
    assert [one.type for one in ready((foreign,), Status.TRUE)] == ["Ready", "Foreign"]


def test_a_message_is_cut_where_nobody_reads_on() -> None:
    (condition,) = ready((), Status.TRUE, message="x" * (LONGEST_MESSAGE + 1))
    assert len(condition.message) == LONGEST_MESSAGE


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_one_camel_case_word(reason: Reason) -> None:
    assert ready((), Status.TRUE, reason=reason)[0].reason == reason


def test_a_condition_is_found_by_its_type() -> None:
    conditions = ready((), Status.TRUE)
    assert find(conditions, PoolCondition.READY) == conditions[0]
    assert find(conditions, NodeCondition.SEGMENT_MOUNTED) is None
