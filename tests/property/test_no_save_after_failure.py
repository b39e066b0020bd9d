"""NO_SAVE_AFTER_FAILURE: the ledger against the obvious list of all failures, and whole sessions against it."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_agent.transfer.ledger import FailureLedger
from support.manual_loop import ManualLoop
from support.transfers import BLOCK_SIZES, Rig

TOKENS = 96
failures = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), max_size=30)


def obvious(seen: list[tuple[int, int]], recomputed_after: int) -> int | None:
    return min((position for transfer, position in seen if transfer > recomputed_after), default=None)


@given(failures, st.integers(0, 41))
def test_no_save_after_failure_the_ledger_never_allows_more_than_the_list_of_all_failures(
    seen: list[tuple[int, int]], recomputed_after: int
) -> None:
    ledger = FailureLedger(capacity=4)
    for transfer, position in seen:
        ledger.record(request_id="r", transfer=transfer, position=position)
    barrier = ledger.barrier(request_id="r", recomputed_after=recomputed_after)
    expected = obvious(seen, recomputed_after)
    if expected is None:
        assert barrier is None or len(seen) > 8
    else:
        assert barrier is not None
        assert barrier[1] <= expected
        assert barrier[0] > recomputed_after


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), max_size=8), st.integers(0, 41))
def test_no_save_after_failure_few_failures_are_remembered_exactly(
    seen: list[tuple[int, int]], recomputed_after: int
) -> None:
    ledger = FailureLedger(capacity=4)
    for transfer, position in seen:
        ledger.record(request_id="r", transfer=transfer, position=position)
    barrier = ledger.barrier(request_id="r", recomputed_after=recomputed_after)
    assert (None if barrier is None else barrier[1]) == obvious(seen, recomputed_after)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20))
def test_bounded_the_newest_failed_requests_are_remembered(requests: list[str]) -> None:
    ledger = FailureLedger(capacity=3)
    for transfer, request in enumerate(requests, 1):
        ledger.record(request_id=request, transfer=transfer, position=7)
    newest = list(dict.fromkeys(reversed(requests)))[:3]
    assert len(ledger) == len(newest)
    assert all(ledger.barrier(request_id=request, recomputed_after=0) is not None for request in newest)


@settings(max_examples=40)
@given(
    lost=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11)), min_size=1, max_size=3),
    start=st.sampled_from([0, 16, 48, 80]),
    end=st.sampled_from([48, 64, 88, 96]),
    acknowledge=st.integers(0, 2),
)
def test_no_save_after_failure_no_session_ever_stores_what_a_failed_load_forbids(
    lost: list[tuple[int, int]], start: int, end: int, acknowledge: int
) -> None:
    async def scenario() -> None:
        async with await Rig.make() as rig:
            seen: list[tuple[int, int]] = []
            for group, chunk in lost:
                rig.stock(TOKENS)
                rig.store.cluster.objects.pop(rig.key(group, chunk), None)
                result = await rig.load(rig.load_job(TOKENS))
                if result.failed:
                    first = min(failure.chunk * BLOCK_SIZES[failure.group] for failure in result.failed)
                    seen.append((result.transfer, first))
            rig.store.cluster.objects.clear()
            rig.compute(TOKENS)
            job = rig.save_job(max(start, end), start=start, recomputed_after=acknowledge)
            begun = rig.manager.start_save(job)
            if begun.transfer:
                await rig.result(begun.transfer)
            barrier = obvious(seen, acknowledge)
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
