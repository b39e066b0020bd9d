"""Figures, their way out, and the traps of the SDK that they avoid."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import Counter, Histogram
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from prometheus_client.exposition import generate_latest

from kvpool_agent.telemetry import names
from kvpool_agent.telemetry.export import WithHistograms
from kvpool_agent.telemetry.logs import JsonFormatter
from kvpool_agent.telemetry.metrics import AgentMetrics, Buckets
from kvpool_agent.telemetry.names import Kind
from kvpool_agent.telemetry.setup import Telemetry, TelemetrySettings, choose_exporter

QUIET = TelemetrySettings(endpoint="", protocol="grpc", sampling=0.0, resource={"k8s.node.name": "n"})


@pytest.fixture
def telemetry() -> Any:
    figures = AgentMetrics()
    one = Telemetry(QUIET, figures, environment={})
    yield one, figures
    assert one.close()


def page(telemetry: Telemetry) -> str:
    return generate_latest(telemetry.registry).decode()


def sample(text: str, start: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(start))


def test_names_follow_the_rules() -> None:
    found = [entry.name for entry in names.METRICS]
    assert len(found) == len(set(found))
    for entry in names.METRICS:
        assert entry.name.startswith("kvpool.")
        assert "total" not in entry.name
        assert entry.name.lower() == entry.name
        series = 1
        for values in entry.attributes.values():
            series *= len(values)
        assert series < 100, "beyond 2000 the SDK folds series together silently; stay far below"
        assert bool(entry.bounds) == (entry.kind is Kind.HISTOGRAM)
        # Whole bounds are integers: `le` must read the same on both ways.
        assert not any(str(bound).endswith(".0") for bound in entry.bounds)
        assert list(entry.bounds) == sorted(entry.bounds)


def test_a_value_on_a_bound_is_below_it() -> None:
    buckets = Buckets((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5):
        buckets.record(value)
    assert buckets.counts == [2, 2, 1]
    assert buckets.total == 7.5


def test_every_series_exists_before_its_first_event(telemetry: tuple[Telemetry, AgentMetrics]) -> None:
    text = page(telemetry[0])
    for entry in names.METRICS:
        if entry.kind is Kind.GAUGE:
            continue
        for attribute, values in entry.attributes.items():
            for value in values:
                assert f'{attribute}="{value}"' in text, (entry.name, value)
    assert sample(text, 'kvpool_load_blocks_total{result="corrupt"}') == 0


def test_events_are_counted_where_they_belong(telemetry: tuple[Telemetry, AgentMetrics]) -> None:
    one, figures = telemetry
    figures.lookup_done(seconds=0.003, hit_tokens=96, miss_tokens=16, pruned_tokens=16, outcome="hit")
    figures.load_done(mode="copy", seconds=0.5, bytes_=1000, ok=5, failed=1, corrupt=2, evicted=3)
    figures.save_done(mode="mapped", seconds=0.1, bytes_=7, saved=1, already=2, failed=3, displaced=4)
    figures.store_request(operation="batch_get", status="partial", seconds=0.2, keys=32)
    figures.late_completion()
    text = page(one)
    for start, value in {
        'kvpool_lookup_duration_seconds_bucket{le="0.002",outcome="hit"}': 0,
        'kvpool_lookup_duration_seconds_bucket{le="0.005",outcome="hit"}': 1,
        'kvpool_lookup_duration_seconds_bucket{le="+Inf",outcome="hit"}': 1,
        'kvpool_lookup_duration_seconds_count{outcome="hit"}': 1,
        'kvpool_lookup_tokens_total{result="hit"}': 96,
        'kvpool_lookup_tokens_total{result="pruned"}': 16,
        'kvpool_load_blocks_total{result="evicted"}': 3,
        'kvpool_load_blocks_total{result="corrupt"}': 2,
        'kvpool_load_bytes_total{mode="copy"}': 1000,
        'kvpool_save_blocks_total{result="stored"}': 2,
        'kvpool_save_blocks_total{result="displaced"}': 4,
        'kvpool_store_request_keys_total{operation="batch_get"}': 32,
        'kvpool_store_request_duration_seconds_count{operation="batch_get",status="partial"}': 1,
        "kvpool_transfer_late_total": 1,
    }.items():
        assert sample(text, start) == value, start


def test_an_unknown_attribute_value_opens_no_series() -> None:
    figures = AgentMetrics()
    before = {entry: set(series) for entry, series in figures.histograms.items()}
    figures.lookup_done(seconds=1, hit_tokens=0, miss_tokens=1, pruned_tokens=0, outcome="a request id")
    figures.store_request(operation="batch_get", status="weird", seconds=1, keys=1)
    assert {entry: set(series) for entry, series in figures.histograms.items()} == before
    assert figures.histograms[names.STORE_DURATION]["batch_get", "error"].counts[-1] == 0
    assert sum(figures.histograms[names.STORE_DURATION]["batch_get", "error"].counts) == 1


def test_gauges_are_read_when_asked_and_absent_when_unknown(
    telemetry: tuple[Telemetry, AgentMetrics],
) -> None:
    one, figures = telemetry
    figures.watch(lambda: {names.INFLIGHT: {(): 3}, names.ENGINE_ATTACHED: {("copy",): 2}})
    text = page(one)
    assert sample(text, "kvpool_transfer_inflight") == 3
    assert sample(text, 'kvpool_engine_attached{role="copy"}') == 2
    assert "kvpool_store_success_age_seconds{" not in text.replace("# ", "")
    assert not any(line.startswith("kvpool_store_success_age_seconds") for line in text.splitlines())


def test_no_series_carries_scope_labels_and_repeated_scrapes_are_not_stale(
    telemetry: tuple[Telemetry, AgentMetrics],
) -> None:
    one, figures = telemetry
    for round_ in range(1, 4):
        figures.late_completion()
        text = page(one)
        assert "otel_scope" not in text
        lines = [line for line in text.splitlines() if line.startswith("kvpool_transfer_late_total")]
        assert lines == [f"kvpool_transfer_late_total {round_}.0"]


def test_exponential_aggregation_by_environment_does_not_break_a_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "base2_exponential_bucket_histogram"
    )
    settings = TelemetrySettings("http://127.0.0.1:1", "http/protobuf", 0.0, {})
    one = Telemetry(settings, AgentMetrics(), environment={})
    one.meters.get_meter("t").create_histogram("other.histogram", unit="s").record(0.2)
    text = page(one)
    assert "kvpool_lookup_duration_seconds_bucket" in text
    assert 'other_histogram_seconds_bucket{le="' in text
    one.close(0.1)


class Kept(MetricExporter):
    """Keeps what it is given."""

    def __init__(self, temporality: AggregationTemporality) -> None:
        super().__init__(preferred_temporality={Histogram: temporality, Counter: temporality})
        self.data: list[MetricsData] = []

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any
    ) -> MetricExportResult:
        self.data.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("temporality", "counts"),
    [(AggregationTemporality.CUMULATIVE, [1, 3]), (AggregationTemporality.DELTA, [1, 2])],
)
def test_histograms_are_pushed_in_the_temporality_that_is_wanted(
    temporality: AggregationTemporality, counts: list[int]
) -> None:
    figures, kept = AgentMetrics(), Kept(temporality)
    exporter = WithHistograms(kept, figures, Resource({}))
    seen = []
    for events in (1, 2):
        for _ in range(events):
            figures.lookup_done(seconds=0.001, hit_tokens=0, miss_tokens=0, pruned_tokens=0, outcome="miss")
        exporter.export(MetricsData([]))
        (metric,) = [
            metric
            for resource in kept.data[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "kvpool.lookup.duration"
        ]
        data: Any = metric.data
        assert data.aggregation_temporality == temporality
        (point,) = [point for point in data.data_points if point.attributes["outcome"] == "miss"]
        assert sum(point.bucket_counts) == point.count
        seen.append(point.count)
    assert seen == counts


@pytest.mark.parametrize(
    ("endpoint", "environment", "chosen"),
    [
        ("", {}, "none"),
        ("http://c:4317", {}, "otlp"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, "otlp"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, "otlp"),
        ("http://c:4317", {"OTEL_TRACES_EXPORTER": "none"}, "none"),
        ("", {"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ("", {"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ("", {"OTEL_TRACES_EXPORTER": "prometheus,otlp"}, "otlp"),
    ],
)
def test_standard_variables_win(endpoint: str, environment: dict[str, str], chosen: str) -> None:
    settings = TelemetrySettings(endpoint, "grpc", 0.0, {})
    assert choose_exporter(settings, environment, "TRACES") == chosen


def test_a_callers_sampling_decision_is_followed_and_our_own_share_is_ours() -> None:
    one = Telemetry(QUIET, AgentMetrics(), environment={})
    assert isinstance(one.tracers.sampler, ParentBased)
    tracer = one.tracers.get_tracer("t")
    assert not tracer.start_span("root").is_recording()
    parent = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    below = tracer.start_span("child", context=trace.set_span_in_context(NonRecordingSpan(parent)))
    assert below.is_recording()
    one.close()


def test_the_sampler_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    one = Telemetry(QUIET, AgentMetrics(), environment={"OTEL_TRACES_SAMPLER": "traceidratio"})
    assert isinstance(one.tracers.sampler, TraceIdRatioBased)
    one.close()


def test_a_disabled_sdk_leaves_the_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    one = Telemetry(QUIET, AgentMetrics(), environment={})
    assert "kvpool_lookup_duration_seconds_bucket" in page(one)
    assert one.close()


def test_close_is_bounded_whatever_the_exporter_does() -> None:
    class Hanging(SpanProcessor):
        def __init__(self) -> None:
            self.entered = threading.Event()
            self.leave = threading.Event()

        def shutdown(self) -> None:
            self.entered.set()
            self.leave.wait(30)

    one = Telemetry(QUIET, AgentMetrics(), environment={})
    hanging = Hanging()
    one.tracers.add_span_processor(hanging)
    begun = time.monotonic()
    assert one.close(0.2) is False
    assert time.monotonic() - begun < 2
    assert hanging.entered.is_set()
    hanging.leave.set()


def test_log_lines_carry_trace_ids_and_extras_and_stay_one_line() -> None:
    formatter = JsonFormatter({"pool": "default.p"})
    record = logging.getLogger("x").makeRecord(
        "x", logging.WARNING, "f", 1, "two\nlines %s", ("a",), None, extra={"session": 7, "odd": {1}}
    )
    with trace.use_span(TracerProvider().get_tracer("t").start_span("s")) as span:
        line = formatter.format(record)
        context = span.get_span_context()
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "two\nlines a"
    assert (fields["level"], fields["pool"], fields["session"], fields["odd"]) == (
        "warning",
        "default.p",
        7,
        "{1}",
    )
    assert fields["trace_id"] == f"{context.trace_id:032x}"
    assert fields["span_id"] == f"{context.span_id:016x}"
    assert "trace_id" not in json.loads(formatter.format(record))


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "failed", (), info)
    line = JsonFormatter({}).format(record)
    assert "\n" not in line
    assert "ValueError: boom" in json.loads(line)["exception"]
