"""Plans, handles, the breaker, backoff: values and small machines."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvpool_engine import failures as memory
from kvpool_engine.breaker import COOLDOWN, THRESHOLD, Breaker
from kvpool_engine.errors import PlanError
from kvpool_engine.failures import Failures, failed_at
from kvpool_engine.link import Backoff
from kvpool_engine.plan import Plan
from kvpool_engine.transfer import Transfer
from kvpool_engine.types import ChunkFailure, FailReason, Geometry, MissReason, TransferKind, TransferResult
from kvpool_wire import agent_pb2 as pb
from unit.engine import samples

GEOMETRY = Geometry((4, 8), 8)


def test_a_plan_survives_its_travel() -> None:
    plan = samples.plan([[1, 0, 1, 1, 1, 0, 0, 1, 1], [1]], 36, pruned=4)
    copy = Plan.from_bytes(plan.to_bytes())
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert [mask.tolist() for mask in copy.masks] == [
        [True, False, True, True, True, False, False, True, True],
        [True],
    ]
    assert (copy.hit_length, copy.pruned_tokens, copy.good_until) == (36, 4, 1.5)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff\xff", "no plan"),
        (pb.Plan(version=2).SerializeToString(), "version 2"),
        (pb.Plan(version=1, groups=[pb.GroupPlan(blocks=9, mask=b"x")]).SerializeToString(), "group 0"),
    ],
)
def test_bytes_that_are_no_plan_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_bytes(raw)


@pytest.mark.parametrize(
    ("start", "wanted"), [(0, [[0, 2], [1]]), (4, [[2], [1]]), (11, [[2], [1]]), (16, [[], []])]
)
def test_a_load_brings_what_ends_past_its_start(start: int, wanted: list[list[int]]) -> None:
    plan = samples.plan([[1, 0, 1, 0], [0, 1]], 16)
    assert [chunks.tolist() for chunks in plan.chunks_from(start, GEOMETRY, [True, True])] == wanted
    assert plan.chunks_from(start, GEOMETRY, [True, False])[1].size == 0


def test_a_miss_loads_nothing() -> None:
    miss = Plan.miss(MissReason.DEADLINE)
    assert [chunks.size for chunks in miss.chunks_from(0, GEOMETRY, [True, True])] == [0, 0]


def handle(kind: TransferKind = TransferKind.LOAD, number: int = 0) -> Transfer:
    chunks = [np.array([1, 2]), np.array([0])]
    transfer = Transfer(kind=kind, request_id="r", chunks=chunks, blocks=[], fallback_length=8, deadline=5)
    transfer.id = number
    return transfer


def test_loaded_or_reported_a_handle_resolves_once_and_names_every_chunk() -> None:
    transfer = handle()
    with pytest.raises(RuntimeError, match="still under way"):
        transfer.result()
    assert transfer.fail_all(FailReason.TIMED_OUT, "late")
    assert not transfer.resolve(TransferResult(transfer=1, kind=TransferKind.LOAD, request_id="r", good=3))
    assert transfer.result().failed == tuple(
        ChunkFailure(*at, FailReason.TIMED_OUT) for at in ((0, 1), (0, 2), (1, 0))
    )
    assert transfer.result().resume_length == 8
    assert transfer.wait(0) is transfer.result()


def test_waiting_on_the_loop_that_resolves_is_refused() -> None:
    with pytest.raises(RuntimeError, match="await the transfer"):
        handle().wait(1)


def test_bounded_waiting_ends_even_if_the_loop_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_engine.transfer.GRACE", 0.0)
    chunks: list[Any] = []
    made = []

    def on_its_own_thread() -> None:
        made.append(
            Transfer(
                kind=TransferKind.LOAD,
                request_id="r",
                chunks=chunks,
                blocks=[],
                fallback_length=0,
                deadline=0.05,
            )
        )

    thread = threading.Thread(target=on_its_own_thread)
    thread.start()
    thread.join()
    with pytest.raises(TimeoutError):
        made[0].wait()


def test_a_reason_of_a_newer_agent_is_a_failure_all_the_same() -> None:
    assert FailReason(99) is FailReason.UNSPECIFIED


def failure(*places: tuple[int, int], error: str = "") -> TransferResult:
    failed = tuple(ChunkFailure(group, chunk, FailReason.CORRUPT) for group, chunk in places)
    return TransferResult(transfer=1, kind=TransferKind.LOAD, request_id="r", failed=failed, error=error)


def test_a_load_failed_at_its_first_missing_chunk_or_at_its_start_where_nothing_is_known() -> None:
    assert failed_at(failure(), 4, GEOMETRY) is None
    assert failed_at(failure((0, 6), (1, 2)), 4, GEOMETRY) == 16
    assert failed_at(failure((0, 6), (1, 2), error="timed out"), 4, GEOMETRY) == 4


def test_no_save_after_failure_cuts_at_the_first_failed_token_until_a_higher_attempt() -> None:
    failures = Failures()
    failures.note("r", 0, 16)
    assert failures.clip("r", 40, 0) == 16
    assert failures.clip("r", 8, 0) == 8
    assert failures.clip("other", 40, 0) == 40
    assert failures.clip("r", 40, 1) == 40
    failures.note("r", 3, 24)
    assert [failures.clip("r", 40, attempt) for attempt in range(5)] == [16, 24, 24, 24, 40]


def test_no_save_after_failure_all_clients_of_an_engine_in_a_process_share_one_memory() -> None:
    first, second, other = memory.join("e"), memory.join("e"), memory.join("another")
    first.note("r", 0, 0)
    assert second.clip("r", 8, 0) == 0
    assert other.clip("r", 8, 0) == 8
    memory.leave("e")
    assert memory.join("e") is first
    for engine in ("e", "e", "another"):
        memory.leave(engine)
    fresh = memory.join("e")
    memory.leave("e")
    assert fresh is not first


def test_the_breaker_opens_after_deadlines_in_a_row_and_tries_once_a_cooldown() -> None:
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    for _ in range(THRESHOLD - 1):
        breaker.missed()
    breaker.answered()
    for _ in range(THRESHOLD):
        assert breaker.allows()
        breaker.missed()
    assert not breaker.allows()
    now[0] += COOLDOWN
    assert [breaker.allows(), breaker.allows()] == [True, False]
    breaker.answered()
    assert breaker.allows()


def test_backoff_grows_with_jitter_between_its_bounds() -> None:
    backoff, rng = Backoff(first=0.1, longest=2.0), random.Random(1)
    delays = [[backoff.delay(attempt, rng) for _ in range(200)] for attempt in (0, 3, 10**6)]
    for some, ceiling in zip(delays, (0.1, 0.8, 2.0), strict=True):
        assert 0.05 <= min(some) < max(some) <= ceiling
    assert len({round(delay, 6) for delay in delays[2]}) > 100


@pytest.mark.parametrize(("start", "length"), [(0, 0), (8, 8), (4, 0), (16, 16)])
def test_local_resume_is_a_boundary_of_every_group_or_nothing(start: int, length: int) -> None:
    assert GEOMETRY.local_resume(start) == length


def test_geometry_reads_the_identity() -> None:
    identity: Any = samples.identity()
    assert Geometry.of(identity) == Geometry((4, 4), 4)
