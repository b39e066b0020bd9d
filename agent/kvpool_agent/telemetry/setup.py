"""Builds the OpenTelemetry SDK for one agent: traces and metrics to OTLP, metrics to Prometheus at the same time.

Promises: standard `OTEL_*` variables win over the configuration; nothing is exported where nobody named an endpoint;
`close` takes at most two seconds, also with a dead collector (whose own shutdown takes up to 14 s at the defaults).
Refuses: views (one exponential view breaks every scrape), `force_flush` of the meter provider (it makes the next scrape
show stale series twice), and scope labels on every series.
"""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from kvpool_agent.telemetry.export import HistogramCollector, WithHistograms
from kvpool_agent.telemetry.metrics import AgentMetrics
from kvpool_wire import VERSION

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 2.0
"""What the end of the process gives to the last export."""

EXPORT_SECONDS: Final = 2
"""Timeout of one export unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise; the SDK's 10 s outlast a grace period."""


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What the agent's configuration says; the environment may say otherwise.

    Attributes:
        endpoint: OTLP endpoint, "" = export nothing.
        protocol: "grpc" or "http/protobuf".
        sampling: share of root spans that are kept, 0 to 1; a caller's own decision is followed.
        resource: attributes of everything that is exported.
    """

    endpoint: str
    protocol: str
    sampling: float
    resource: Mapping[str, str]


class Telemetry:
    """The providers of one agent and the registry that `/metrics` prints."""

    def __init__(
        self,
        settings: TelemetrySettings,
        figures: AgentMetrics,
        *,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.registry = CollectorRegistry()
        self.resource = _resource(settings)
        readers: list[MetricReader] = [
            PrometheusMetricReader(scope_info_enabled=False, registry=self.registry)
        ]
        exporter = _metric_exporter(settings, environment)
        if exporter is not None:
            readers.append(PeriodicExportingMetricReader(WithHistograms(exporter, figures, self.resource)))
        self.registry.register(HistogramCollector(figures))
        self.meters = MeterProvider(readers, resource=self.resource, shutdown_on_exit=False)
        figures.instrument(self.meters.get_meter("kvpool.agent", VERSION))
        self.tracers = TracerProvider(
            sampler=_sampler(settings, environment), resource=self.resource, shutdown_on_exit=False
        )
        spans = _span_exporter(settings, environment)
        if spans is not None:
            self.tracers.add_span_processor(BatchSpanProcessor(spans, meter_provider=self.meters))

    def install(self) -> None:
        """Make the providers global, meters first: the span processor's own metrics go through them."""
        metrics.set_meter_provider(self.meters)
        trace.set_tracer_provider(self.tracers)

    def close(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Flush and end both providers side by side; False if they were not done in time and are left behind."""
        # Daemon threads: a provider that hangs on a dead collector must not hold the process's exit.
        threads = [threading.Thread(target=self.tracers.shutdown, daemon=True, name="telemetry-traces")]
        threads.append(threading.Thread(target=self.meters.shutdown, daemon=True, name="telemetry-metrics"))
        done = threading.Event()
        waiter = threading.Thread(target=_join, args=(threads, done), daemon=True, name="telemetry-close")
        for thread in (*threads, waiter):
            thread.start()
        if not done.wait(seconds):
            log.warning("telemetry was not flushed within %.1f s; the collector does not answer", seconds)
            return False
        return True


def _join(threads: list[threading.Thread], done: threading.Event) -> None:
    for thread in threads:
        thread.join()
    done.set()


def _resource(settings: TelemetrySettings) -> Resource:
    # Resource.create lets its argument win over OTEL_RESOURCE_ATTRIBUTES; it has to be the other way round.
    named = {"service.name": "kvpool-agent", "service.version": VERSION, **settings.resource}
    return Resource.create({**named, **OTELResourceDetector().detect().attributes})


def _sampler(settings: TelemetrySettings, environment: Mapping[str, str]) -> Sampler | None:
    if environment.get("OTEL_TRACES_SAMPLER"):
        return None  # the SDK reads the variable itself
    return ParentBased(TraceIdRatioBased(settings.sampling))


def choose_exporter(settings: TelemetrySettings, environment: Mapping[str, str], signal: str) -> str:
    """Which exporter serves `signal` ("TRACES" or "METRICS"): "otlp", "console" or "none".

    OTEL_<signal>_EXPORTER decides; without it, OTLP where an endpoint is named by the environment or the configuration.
    """
    named = environment.get(f"OTEL_{signal}_EXPORTER", "").strip().lower()
    if named:
        first = next((name for name in named.split(",") if name.strip() != "prometheus"), "none").strip()
        return first if first in ("otlp", "console") else "none"
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return "otlp" if settings.endpoint or any(environment.get(name) for name in endpoints) else "none"


def _over_http(settings: TelemetrySettings, environment: Mapping[str, str], signal: str) -> bool:
    protocol = (
        environment.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or settings.protocol
    )
    return protocol.startswith("http")


def _endpoint(settings: TelemetrySettings, environment: Mapping[str, str], signal: str) -> str | None:
    """The configured endpoint, or None where the exporter finds its own in the environment."""
    if any(environment.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", f"{signal}_")):
        return None
    if not settings.endpoint:
        return None
    if _over_http(settings, environment, signal):
        return f"{settings.endpoint.rstrip('/')}/v1/{signal.lower()}"
    return settings.endpoint


def _timeout(environment: Mapping[str, str], signal: str) -> int | None:
    named = any(environment.get(f"OTEL_EXPORTER_OTLP_{name}TIMEOUT") for name in ("", f"{signal}_"))
    return None if named else EXPORT_SECONDS


def _metric_exporter(settings: TelemetrySettings, environment: Mapping[str, str]) -> MetricExporter | None:
    kind = choose_exporter(settings, environment, "METRICS")
    if kind == "console":
        return ConsoleMetricExporter()
    if kind == "none":
        return None
    endpoint, timeout = _endpoint(settings, environment, "METRICS"), _timeout(environment, "METRICS")
    if _over_http(settings, environment, "METRICS"):
        return HttpMetrics(endpoint=endpoint, timeout=timeout)
    return GrpcMetrics(endpoint=endpoint, timeout=timeout)


def _span_exporter(settings: TelemetrySettings, environment: Mapping[str, str]) -> SpanExporter | None:
    kind = choose_exporter(settings, environment, "TRACES")
    if kind == "console":
        return ConsoleSpanExporter()
    if kind == "none":
        return None
    endpoint, timeout = _endpoint(settings, environment, "TRACES"), _timeout(environment, "TRACES")
    if _over_http(settings, environment, "TRACES"):
        return HttpSpans(endpoint=endpoint, timeout=timeout)
    return GrpcSpans(endpoint=endpoint, timeout=timeout)
