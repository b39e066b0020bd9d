"""Hands the agent's own histograms to Prometheus and to OTLP as true histograms.

OpenTelemetry has no observable histogram, and a recorded one costs 10 to 20 microseconds a value. So the counts are
kept in `metrics.py` and joined to what the SDK gives at the two public seams: a collector in the Prometheus registry,
and an exporter that adds them to what it passes on. Both spell one name (`kvpool_lookup_duration_seconds_bucket` in
PromQL whichever way it came). Refuses exponential buckets: `OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION`
has no effect on these histograms. Delta temporality is honoured.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from kvpool_agent.telemetry.metrics import AgentMetrics, Buckets
from kvpool_agent.telemetry.names import MetricEntry
from kvpool_wire import VERSION

SCOPE: Final = InstrumentationScope("kvpool.agent.histograms", VERSION)


class HistogramCollector(Collector):
    """Gives the histograms to a `prometheus_client` registry."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics

    @override
    def collect(self) -> Iterable[HistogramMetricFamily]:
        """One family per histogram of the catalogue."""
        for entry, series in self._metrics.histograms.items():
            family = HistogramMetricFamily(
                entry.name.replace(".", "_"), entry.meaning, labels=list(entry.attributes), unit="seconds"
            )
            for label, buckets in series.items():
                counts, total = list(buckets.counts), buckets.total
                family.add_metric(list(label), _cumulative(entry.bounds, counts), sum_value=total)
            yield family


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    running, rows = 0, []
    for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
        running += count
        rows.append((str(bound), float(running)))
    return rows


@dataclass(slots=True)
class _Seen:
    """What a series had at the last export, for delta temporality."""

    counts: list[int]
    total: float


class WithHistograms(MetricExporter):
    """Passes the SDK's metrics on to `inner`, the agent's histograms added.

    Args:
        inner: the exporter that speaks OTLP.
        metrics: where the histograms are.
        resource: what the SDK's own metrics carry.
    """

    def __init__(self, inner: MetricExporter, metrics: AgentMetrics, resource: Resource) -> None:
        super().__init__(
            preferred_temporality=inner._preferred_temporality,  # noqa: SLF001 - the reader reads it just so
            preferred_aggregation=inner._preferred_aggregation,  # noqa: SLF001 - the same
        )
        self._inner = inner
        self._metrics = metrics
        self._resource = resource
        wanted = (inner._preferred_temporality or {}).get(HistogramInstrument)  # noqa: SLF001 - the same
        self._delta = wanted == AggregationTemporality.DELTA
        self._begun = self._last = time.time_ns()
        self._seen: dict[tuple[MetricEntry, tuple[str, ...]], _Seen] = {}

    @override
    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export both together."""
        now = time.time_ns()
        own = ScopeMetrics(SCOPE, [self._metric(entry, now) for entry in self._metrics.histograms], "")
        self._last = now
        # Under one resource, and in a scope of their own: the encoder keeps the last of two that are equal.
        scopes = [scope for one in metrics_data.resource_metrics for scope in one.scope_metrics]
        joined = MetricsData([ResourceMetrics(self._resource, [*scopes, own], "")])
        return self._inner.export(joined, timeout_millis=timeout_millis, **kwargs)

    @override
    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """As the inner exporter does."""
        return self._inner.force_flush(timeout_millis=timeout_millis)

    @override
    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """As the inner exporter does."""
        self._inner.shutdown(timeout_millis=timeout_millis, **kwargs)

    def _metric(self, entry: MetricEntry, now: int) -> Metric:
        points = [self._point(entry, label, now) for label in self._metrics.histograms[entry]]
        temporality = AggregationTemporality.DELTA if self._delta else AggregationTemporality.CUMULATIVE
        return Metric(entry.name, entry.meaning, entry.unit, Histogram(points, temporality))

    def _point(self, entry: MetricEntry, label: tuple[str, ...], now: int) -> HistogramDataPoint:
        counts, total = self._since(entry, label, self._metrics.histograms[entry][label])
        return HistogramDataPoint(
            attributes=dict(zip(entry.attributes, label, strict=True)),
            start_time_unix_nano=self._last if self._delta else self._begun,
            time_unix_nano=now,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=[float(bound) for bound in entry.bounds],
            # Extremes are not kept. The encoder hands None to an optional field of the message: it stays unset.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )

    def _since(self, entry: MetricEntry, label: tuple[str, ...], now: Buckets) -> tuple[list[int], float]:
        counts, total = list(now.counts), now.total
        if not self._delta:
            return counts, total
        before = self._seen.get((entry, label))
        self._seen[entry, label] = _Seen(counts, total)
        if before is None:
            return counts, total
        return [new - old for new, old in zip(counts, before.counts, strict=True)], total - before.total
