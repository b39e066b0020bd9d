"""NO_SAVE_AFTER_FAILURE: the memory of failures against the obvious list of all of them, and sessions against it."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_wire.attempts import Barrier, FailedAttempts
from support.manual_loop import ManualLoop
from support.transfers import BLOCK_SIZES, Rig

TOKENS = 96
attempts = st.integers(0, 12)
failures = st.lists(st.tuples(attempts, st.integers(0, 20)), max_size=30)


def obvious(seen: list[tuple[int, int]], attempt: int) -> int | None:
    return min((position for failed, position in seen if failed >= attempt), default=None)


def remember(seen: list[tuple[int, int]]) -> FailedAttempts:
    memory = FailedAttempts(clock=lambda: 0.0, capacity=4)
    for attempt, position in seen:
        assert not memory.record(request_id="r", attempt=attempt, position=position)
    return memory


@given(failures, attempts)
def test_no_save_after_failure_the_memory_never_allows_more_than_the_list_of_all_failures(
    seen: list[tuple[int, int]], attempt: int
) -> None:
    barrier = remember(seen).barrier(request_id="r", attempt=attempt)
    expected = obvious(seen, attempt)
    if expected is None:
        assert barrier is None
    else:
        assert barrier is not None
        assert barrier.position <= expected
        assert barrier.attempt >= attempt


@given(st.lists(st.tuples(attempts, st.integers(0, 20)), max_size=8), attempts)
def test_no_save_after_failure_few_failures_are_remembered_exactly(
    seen: list[tuple[int, int]], attempt: int
) -> None:
    barrier = remember(seen).barrier(request_id="r", attempt=attempt)
    assert (None if barrier is None else barrier.position) == obvious(seen, attempt)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20))
def test_bounded_the_newest_failed_requests_are_remembered(requests: list[str]) -> None:
    memory = FailedAttempts(clock=lambda: 0.0, capacity=3)
    for request in requests:
        memory.record(request_id=request, attempt=0, position=7)
    newest = list(dict.fromkeys(reversed(requests)))[:3]
    assert len(memory) == len(newest)
    assert all(memory.barrier(request_id=request, attempt=0) is not None for request in newest)


@given(
    seen=st.lists(st.tuples(st.sampled_from("abcdef"), attempts, st.integers(0, 20)), max_size=20),
    request=st.sampled_from("abcdefg"),
    attempt=attempts,
)
def test_no_save_after_failure_nothing_is_allowed_because_it_was_forgotten(
    seen: list[tuple[str, int, int]], request: str, attempt: int
) -> None:
    memory = FailedAttempts(clock=lambda: 0.0, capacity=2)
    forgot = [memory.record(request_id=name, attempt=k, position=p) for name, k, p in seen]
    barrier = memory.barrier(request_id=request, attempt=attempt)
    expected = obvious([(k, p) for name, k, p in seen if name == request], attempt)
    if expected is not None:
        assert barrier is not None
        assert barrier.position <= expected
    if not any(forgot):
        assert (None if barrier is None else barrier.position) == expected


def test_bounded_a_floor_ends_when_what_was_forgotten_has_become_old() -> None:
    now = 0.0
    memory = FailedAttempts(clock=lambda: now, capacity=1, keep_seconds=10)
    assert not memory.record(request_id="a", attempt=2, position=32)
    now = 4.0
    assert memory.record(request_id="b", attempt=0, position=64)
    assert memory.barrier(request_id="a", attempt=2) == Barrier(2, 32)
    assert memory.barrier(request_id="never failed", attempt=0) == Barrier(2, 32)
    assert memory.barrier(request_id="never failed", attempt=3) is None
    assert memory.barrier(request_id="b", attempt=0) == Barrier(0, 64), "what is known counts as it is"
    now = 10.0
    assert memory.barrier(request_id="never failed", attempt=0) is None
    now = 14.0
    assert not memory.record(request_id="c", attempt=0, position=0), "old enough to be forgotten in silence"


@settings(max_examples=40)
@given(
    lost=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11)), min_size=1, max_size=3),
    start=st.sampled_from([0, 16, 48, 80]),
    end=st.sampled_from([48, 64, 88, 96]),
    attempt=st.integers(0, 3),
    other_rank=st.booleans(),
)
def test_no_save_after_failure_no_session_ever_stores_what_a_failed_load_forbids(
    lost: list[tuple[int, int]], start: int, end: int, attempt: int, other_rank: bool
) -> None:
    async def scenario() -> None:
        async with await Rig.make() as rig, await Rig.make(beside=rig) as beside:
            seen: list[tuple[int, int]] = []
            for of_attempt, (group, chunk) in enumerate(lost):
                rig.stock(TOKENS)
                rig.store.cluster.objects.pop(rig.key(group, chunk), None)
                result = await rig.load(rig.load_job(TOKENS, attempt=of_attempt))
                if result.failed:
                    first = min(failure.chunk * BLOCK_SIZES[failure.group] for failure in result.failed)
                    seen.append((of_attempt, first))
            rig.store.cluster.objects.clear()
            saver = beside if other_rank else rig
            saver.compute(TOKENS)
            job = saver.save_job(max(start, end), start=start, attempt=attempt)
            begun = saver.manager.start_save(job)
            if begun.transfer:
                await saver.result(begun.transfer)
            barrier = obvious(seen, attempt)
            stored = {
                (group, chunk)
                for group, size in enumerate(BLOCK_SIZES)
                for chunk in range(TOKENS // size)
                if rig.key(group, chunk) in rig.store.cluster.objects
            }
            assert len(stored) == begun.chunks
            for group, chunk in stored:
                assert barrier is None or (chunk + 1) * BLOCK_SIZES[group] <= barrier
            assert bool(begun.skipped) <= (barrier is not None)

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        runner.run(scenario())
