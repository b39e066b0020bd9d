"""Every number of Mooncake's becomes a status or a typed error; an unknown one is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool_agent.store.codes import (
    CODES,
    Outcome,
    error_for,
    exist_outcome,
    failure,
    get_outcome,
    put_outcome,
    remove_outcome,
)
from kvpool_agent.store.errors import StoreDeadline, StoreError, StoreMisuse, StoreRefused, StoreUnavailable
from kvpool_agent.store.protocol import ChunkStatus as S


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (-1, S.INTERNAL),
        (-10, S.INVALID),
        (-100, S.INTERNAL),
        (-101, S.PEER_FAILED),
        (-102, S.INTERNAL),
        (-103, S.MASTER_FAILED),
        (-200, S.FULL),
        (-300, S.INTERNAL),
        (-400, S.INVALID),
        (-500, S.INTERNAL),
        (-600, S.INVALID),
        (-601, S.INVALID),
        (-700, S.INTERNAL),
        (-701, S.INTERNAL),
        (-702, S.INTERNAL),
        (-703, S.NOT_READY),
        (-704, S.ABSENT),
        (-705, S.INTERNAL),
        (-706, S.LEASED),
        (-707, S.LEASE_EXPIRED),
        (-708, S.LEASED),
        (-709, S.INTERNAL),
        (-710, S.ABSENT),
        (-711, S.INTERNAL),
        (-712, S.ABSENT),
        (-713, S.ABSENT),
        (-714, S.LEASED),
        (-800, S.PEER_FAILED),
        (-801, S.CORRUPT),
        (-900, S.MASTER_FAILED),
        (-901, S.MASTER_FAILED),
        *((code, S.MASTER_FAILED) for code in range(-1007, -999)),
        (-1010, S.MASTER_FAILED),
        (-1011, S.MASTER_FAILED),
        (-1012, S.INVALID),
        *((code, S.INTERNAL) for code in range(-1106, -1099)),
        *((code, S.INTERNAL) for code in range(-1203, -1199)),
        (-1300, S.INTERNAL),
        (-1301, S.INTERNAL),
        *((code, S.INTERNAL) for code in range(-1402, -1399)),
        *((code, S.INTERNAL) for code in range(-1503, -1499)),
        *((code, S.INTERNAL) for code in range(-1603, -1599)),
    ],
)
def test_each_code_of_mooncake_has_its_status(code: int, status: S) -> None:
    outcome = failure(code)
    assert (outcome.status, outcome.code) == (status, code)
    assert code in CODES
    assert "UNKNOWN" not in outcome.name


@pytest.mark.parametrize("code", [-2, -799, -9999, -(2**40)])
def test_an_unknown_code_is_internal_and_keeps_its_number(code: int) -> None:
    outcome = failure(code)
    assert (outcome.status, outcome.code) == (S.INTERNAL, code)
    assert str(code) in outcome.name


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (4096, S.OK),
        (4095, S.BAD_SIZE),
        (4097, S.BAD_SIZE),
        (0, S.BAD_SIZE),
        (1, S.BAD_SIZE),
        (-704, S.ABSENT),
        (-600, S.BAD_SIZE),
        (-10, S.BAD_SIZE),
    ],
)
def test_a_get_is_good_only_with_exactly_the_bytes_asked_for(code: int, status: S) -> None:
    assert get_outcome(code, expected=4096).status is status


@pytest.mark.parametrize(("code", "status"), [(0, S.OK), (1, S.INTERNAL), (4096, S.INTERNAL), (-200, S.FULL)])
def test_a_put_is_good_only_with_zero(code: int, status: S) -> None:
    assert put_outcome(code).status is status


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (1, S.OK),
        (0, S.ABSENT),
        (2, S.INTERNAL),
        (-1, S.INTERNAL),
        (-900, S.MASTER_FAILED),
        (-901, S.MASTER_FAILED),
    ],
)
def test_only_one_means_present(code: int, status: S) -> None:
    assert exist_outcome(code).status is status


@pytest.mark.parametrize("judge", [put_outcome, exist_outcome, remove_outcome])
def test_refused_arguments_say_something_of_a_size_only_in_a_get(judge: Callable[[int], Outcome]) -> None:
    assert judge(-600).status is S.INVALID


def test_that_an_object_exists_already_is_good_news_for_a_put_alone() -> None:
    assert put_outcome(-705).status is S.OK
    for status in (
        get_outcome(-705, expected=4096).status,
        exist_outcome(-705).status,
        remove_outcome(-705).status,
        failure(-705).status,
    ):
        assert status is S.INTERNAL
    assert isinstance(error_for(-705, "x"), StoreRefused)


def test_a_remove_of_a_leased_key_says_so() -> None:
    assert remove_outcome(-706).status is S.LEASED
    assert remove_outcome(0).status is S.OK


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-900, StoreUnavailable),
        (-1010, StoreUnavailable),
        (-901, StoreDeadline),
        (-600, StoreMisuse),
        (-1, StoreRefused),
    ],
)
def test_a_whole_call_becomes_a_typed_error_with_its_number(code: int, kind: type[StoreError]) -> None:
    error = error_for(code, "existence of 3 keys")
    assert isinstance(error, kind)
    assert "existence of 3 keys" in str(error)
    assert str(code) in str(error)


def test_every_code_has_an_error() -> None:
    assert all(isinstance(error_for(code, "x"), StoreError) for code in [*CODES, -31337])
