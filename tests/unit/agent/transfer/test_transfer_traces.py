"""Every log line of a traced transfer carries its trace's ids, from whichever task or thread it is written."""

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from typing_extensions import override

from kvpool_agent.pools.pool import PoolError
from kvpool_agent.store.faults import Fault, FaultKind
from kvpool_agent.store.protocol import ChunkStatus
from kvpool_agent.telemetry.logs import JsonFormatter
from kvpool_wire import agent_pb2 as pb
from support.manual_loop import manual_time
from support.transfers import FULL, PoolWrapper, Rig, failed_chunks

TOKENS, SHORT = 96, 32
TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736


def caller(trace_id: int = TRACE) -> Context:
    """The context of a caller with a sampled trace."""
    span = SpanContext(
        trace_id, 0x00F067AA0BA902B7, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(NonRecordingSpan(span), Context())


class Lines:
    """What was logged, as the agent's own formatter writes it."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def starting(self, text: str) -> list[dict[str, str]]:
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in found if line["message"].startswith(text)]


@pytest.fixture
def lines() -> Iterator[Lines]:
    written = Lines()
    handler = logging.StreamHandler(written.stream)
    handler.setFormatter(JsonFormatter({}))
    logging.getLogger().addHandler(handler)
    yield written
    logging.getLogger().removeHandler(handler)


def swap(rig: Rig) -> None:
    """Two intact chunks under each other's keys."""
    objects, one, other = rig.store.cluster.objects, rig.key(FULL, 1), rig.key(FULL, 4)
    objects[one], objects[other] = objects[other], objects[one]


@pytest.mark.parametrize("mode", ["mapped", "copy"])
@manual_time
async def test_both_lines_about_swapped_chunks_carry_the_callers_trace(lines: Lines, mode: str) -> None:
    async with await Rig.make(mode=mode) as rig:
        rig.stock(TOKENS)
        swap(rig)
        result = await rig.load(replace(rig.load_job(TOKENS), context=caller()))
        assert failed_chunks(result) == {(FULL, 1): "CORRUPT", (FULL, 4): "CORRUPT"}
    told = lines.starting("corrupt: ")
    assert len(told) == 2
    assert [line.get("trace_id") for line in told] == [f"{TRACE:032x}"] * 2
    assert all("span_id" in line for line in told)


@manual_time
async def test_transfers_side_by_side_keep_their_traces_apart_and_others_get_none(lines: Lines) -> None:
    traces = {"one": 1, "other": 2, "none": None}
    async with await Rig.make(ring_chunks=32) as rig:
        started = []
        for place, (prompt, trace_id) in enumerate(traces.items()):
            rig.stock(SHORT, prompt=prompt)
            rig.store.cluster.objects[rig.key(FULL, 0, prompt=prompt)] += b"x"
            job = rig.load_job(SHORT, prompt=prompt, request=prompt, first_block=1 + 4 * place)
            job = replace(job, context=None if trace_id is None else caller(trace_id))
            started.append(rig.manager.start_load(job)[0])
        for transfer in started:
            assert failed_chunks(await rig.result(transfer)) == {(FULL, 0): "CORRUPT"}
    told = {line["message"].split(": ")[1]: line.get("trace_id") for line in lines.starting("corrupt: ")}
    assert told == {
        rig.key(FULL, 0, prompt=prompt).decode(): None if trace_id is None else f"{trace_id:032x}"
        for prompt, trace_id in traces.items()
    }


class Unwritable(PoolWrapper):
    """A pool whose memory cannot be written."""

    @override
    def scatter(self, group: int, block: int, payload: memoryview) -> None:
        del payload  # pytest keeps the record, the record the error, the error this frame
        raise PoolError("no such page")


@manual_time
async def test_what_a_mover_thread_says_carries_the_trace(lines: Lines) -> None:
    async with await Rig.make(pool=Unwritable) as rig:
        rig.stock(TOKENS)
        result = await rig.load(replace(rig.load_job(TOKENS), context=caller()))
        assert set(failed_chunks(result).values()) == {"ENGINE_FAILED"}
    told = lines.starting("block ")
    assert len(told) == len(result.failed)
    assert {line.get("trace_id") for line in told} == {f"{TRACE:032x}"}


@manual_time
async def test_what_a_save_says_carries_the_trace(lines: Lines) -> None:
    async with await Rig.make() as rig:
        rig.compute(TOKENS)
        unordered = pb.Ordering(cuda_event=b"x" * 64)
        await rig.save(replace(rig.save_job(TOKENS), context=caller(), ordering=unordered))
    told = lines.starting("save ")
    assert [line.get("trace_id") for line in told] == [f"{TRACE:032x}"]


@manual_time
async def test_an_error_that_ends_a_transfer_carries_the_trace(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await Rig.make() as rig:
        rig.stock(TOKENS)
        rig.store.inject(
            Fault(FaultKind.STATUS, keys=frozenset({rig.key(FULL, 2)}), status=ChunkStatus.CORRUPT)
        )

        def broken(_: object) -> None:
            raise RuntimeError("no grave")

        monkeypatch.setattr(rig.tombstones, "add", broken)
        await rig.load(replace(rig.load_job(TOKENS), context=caller()))
    told = lines.starting("load 1 ended with an error")
    assert [line.get("trace_id") for line in told] == [f"{TRACE:032x}"]
