"""`spec.telemetry`: what agents tell, and to whom."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvpool_operator.api.model import Int32, Label, Section
from kvpool_operator.api.quantity import Duration


class OtlpProtocol(StrEnum):
    """Wire format of OTLP."""

    GRPC = "GRPC"
    HTTP = "HTTP"


class Monitor(StrEnum):
    """Whether Prometheus monitors are made."""

    AUTO = "Auto"
    DISABLED = "Disabled"


class Otlp(Section):
    """Where traces and metrics are pushed."""

    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s]+$")]
    """URL of the collector, such as `http://collector.observability.svc:4317`."""

    protocol: OtlpProtocol = OtlpProtocol.GRPC
    """Wire format."""

    sampling: Annotated[str, Field(max_length=6, pattern=r"^(0(\.[0-9]{1,4})?|1)$")] = "0.01"
    """Share of traces that begin here and are kept, as a decimal from 0 to 1. A caller's own decision is followed."""


class ServiceMonitor(Section):
    """Monitors for the Prometheus operator."""

    mode: Monitor = Monitor.AUTO
    """Auto: where the cluster has the kinds. Disabled: never."""

    labels: Annotated[dict[str, Label], Field(max_length=16)] = Field(default_factory=dict)
    """Labels by which your Prometheus selects monitors."""

    interval: Duration = 30_000
    """Time between two scrapes; whole seconds, at least 5s."""


class Metrics(Section):
    """Prometheus metrics of the agents."""

    port: Annotated[Int32, Field(ge=1024, le=65535)] = 9400
    """Port of `/metrics`, `/healthz` and `/readyz`; outside 15000 to 17000, which the store uses."""

    service_monitor: ServiceMonitor = Field(default_factory=ServiceMonitor)
    """Monitors for the Prometheus operator."""


class Telemetry(Section):
    """What agents tell, and to whom."""

    otlp: Otlp | None = None
    """Where traces and metrics are pushed; absent pushes nothing."""

    metrics: Metrics = Field(default_factory=Metrics)
    """Prometheus metrics of the agents."""
