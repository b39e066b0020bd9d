"""What a real agent tells: metrics that match the catalogue, spans below the caller's, on both ways of OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool_agent.telemetry import names
from kvpool_agent.telemetry.names import Kind
from kvpool_wire import agent_pb2 as pb
from support import hybrid_engine as model
from support.agents import AgentProcess
from support.engine_on_wire import EngineOnWire, engine_on_wire
from support.otlp_double import Collector, collector

MakeAgent = Callable[..., AgentProcess]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_metrics_are_the_catalogue_and_nothing_else(agent: AgentProcess) -> None:
    families = {one.name: one for one in text_string_to_metric_families(agent.get("/metrics")[1])}
    assert (
        set(families)
        - {"target_info"}
        - {entry.prometheus_name.removesuffix("_total") for entry in names.METRICS}
        == set()
    )
    for entry in names.METRICS:
        family = families[entry.prometheus_name.removesuffix("_total")]
        assert family.type == entry.kind.value
        labels = {key for sample in family.samples for key in sample.labels}
        assert labels - {"le"} == set(entry.attributes), "scope labels would double every series"


async def test_a_save_and_a_load_are_counted(agent: AgentProcess) -> None:
    loaded = agent.metric("kvpool_load_blocks_total", result="ok")
    async with engine_on_wire(agent.directory, "engine-count") as engine:
        await engine.save("count", 6, list(range(1, 7)))
        assert agent.metric("kvpool_engine_attached", role="mapped") >= 2
        plan = (await engine.lookup("count", 6)).plan
        await engine.load("count", plan, list(range(20, 25)))
    assert agent.metric("kvpool_load_blocks_total", result="ok") >= loaded + 10
    assert agent.metric("kvpool_load_duration_seconds_count", mode="mapped") >= 2
    assert agent.metric("kvpool_lookup_tokens_total", result="pruned") >= model.BLOCK
    assert agent.metric("kvpool_lookup_duration_seconds_count", outcome="hit") >= 1
    assert agent.metric("kvpool_segment_bytes", state="mounted") == 64 << 20
    assert agent.metric("kvpool_transfer_inflight") == 0


async def test_scrapes_side_by_side_show_every_series_once(agent: AgentProcess) -> None:
    pages = await asyncio.gather(*(asyncio.to_thread(agent.get, "/metrics") for _ in range(6)))
    for status, page in pages:
        assert status == 200
        series = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
        assert len(series) == len(set(series))


async def traced(engine: EngineOnWire, prompt: str, *, sampled: bool) -> None:
    """A lookup, a save and a load of a caller with a trace of its own."""
    parent = (("traceparent", f"00-{TRACE}-{PARENT}-{'01' if sampled else '00'}"),)
    chain = b"".join(model.hashes(prompt, 6))
    save = pb.SaveRequest(
        request_id=prompt,
        hash_size=32,
        hashes=chain,
        end=6 * model.BLOCK,
        blocks=[model.ids(list(range(1, 7)))] * 2,
        ordering=pb.Ordering(synchronised=True),
    )
    for ranked in engine.ranks:
        started = await ranked.client.call("Save", save, more=parent)
        assert not (await asyncio.wait_for(ranked.result(started.transfer), 20)).failed
    request = pb.LookupRequest(request_id=prompt, total_hashes=6, hash_size=32, hashes=chain, max_length=96)
    found = await engine.scheduler.call("Lookup", request, more=parent)
    for ranked in engine.ranks:
        load = engine.load_request(prompt, found.plan, list(range(20, 25)))
        started = await ranked.client.call("Load", load, more=parent)
        await asyncio.wait_for(ranked.result(started.transfer), 20)


def span_ids(otlp: Collector, parent: str) -> dict[str, set[str]]:
    """Ids of the spans right below `parent`, by name."""
    found: dict[str, set[str]] = {}
    for span in otlp.spans():
        if span.parent_span_id.hex() == parent:
            found.setdefault(span.name, set()).add(span.span_id.hex())
    return found


def below(otlp: Collector, parents: set[str]) -> dict[str, set[str]]:
    """Names of the spans right below any of `parents`, with those of them that have such a one."""
    found: dict[str, set[str]] = {}
    for span in otlp.spans():
        if span.parent_span_id.hex() in parents:
            found.setdefault(span.name, set()).add(span.parent_span_id.hex())
    return found


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_spans_and_histograms_reach_a_collector(make_agent: MakeAgent, protocol: str) -> None:
    with collector() as otlp:
        endpoint = otlp.grpc if protocol == "grpc" else otlp.http
        agent = make_agent(
            segment={"size": "32Mi"},
            telemetry={"port": 0, "otlp": {"endpoint": endpoint, "protocol": protocol, "sampling": 0.0}},
            environment={
                "OTEL_BSP_SCHEDULE_DELAY": "50",
                "OTEL_METRIC_EXPORT_INTERVAL": "200",
                "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=agent-x",
                "OTEL_SERVICE_NAME": "named-by-the-environment",
                "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED": "true",
                "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
            },
        ).start()
        async with engine_on_wire(agent.directory, "engine-trace") as engine:
            await traced(engine, f"{protocol} unsampled", sampled=False)
            await traced(engine, f"{protocol} sampled", sampled=True)
        # One lookup; a save and a load on each of two ranks.
        wanted = {"kvpool.lookup": 1, "kvpool.save": 2, "kvpool.load": 2}
        await asyncio.to_thread(
            otlp.wait, lambda: wanted == {name: len(ids) for name, ids in span_ids(otlp, PARENT).items()}
        )
        assert {span.trace_id.hex() for span in otlp.spans()} == {TRACE}, "an unsampled caller costs no span"
        ours = span_ids(otlp, PARENT)
        assert {name: set(below(otlp, ids)) for name, ids in ours.items()} == {
            "kvpool.lookup": {"mooncake.batch_is_exist"},
            "kvpool.save": {"mooncake.batch_is_exist", "mooncake.batch_put"},
            "kvpool.load": {"mooncake.batch_get"},
        }
        for name, parents in (("kvpool.save", "mooncake.batch_put"), ("kvpool.load", "mooncake.batch_get")):
            assert below(otlp, ours[name])[parents] == ours[name], "each transfer has a request of its own"
        known = {entry.name: set(entry.attributes) for entry in names.SPANS}
        for span in otlp.spans():
            assert {attribute.key for attribute in span.attributes} == known[span.name]
            assert not span.links
        await asyncio.to_thread(
            otlp.wait, lambda: set(otlp.metrics()) >= {entry.name for entry in names.METRICS}
        )
        for entry in names.METRICS:
            metric = otlp.metrics()[entry.name]
            kind = {Kind.COUNTER: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}[entry.kind]
            assert (metric.WhichOneof("data"), metric.unit) == (kind, entry.unit)
        await asyncio.to_thread(
            otlp.wait,
            lambda: sum(p.count for p in otlp.metrics()["kvpool.lookup.duration"].histogram.data_points) >= 2,
        )
        resource = otlp.resources()[0]
        assert resource["service.name"] == "named-by-the-environment"
        assert (resource["k8s.node.name"], resource["k8s.pod.name"]) == ("node-a", "agent-x")
        assert resource["kvpool.pool"] == "default.pool"
        # The exponential aggregation above is what breaks a scrape when it is set by a view: here it must not.
        status, page = agent.get("/metrics")
        assert status == 200
        assert "otel_sdk_processor_span_processed" in page
        assert agent.stop() == 0
