"""W3C trace context out of the caller's current OpenTelemetry context into gRPC metadata; creates no span itself."""

from opentelemetry import propagate

Metadata = tuple[tuple[str, str], ...]


def with_trace(metadata: Metadata) -> Metadata:
    """`metadata` and whatever the configured propagator adds (traceparent, tracestate, baggage)."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return (*metadata, *((key.lower(), value) for key, value in carrier.items()))
