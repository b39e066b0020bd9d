"""A collector for tests: OTLP over HTTP and over gRPC, on loopback ports, kept in memory."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

_SERVICES: dict[str, tuple[Any, Any, str]] = {
    "traces": (ExportTraceServiceRequest, ExportTraceServiceResponse, "TraceService"),
    "metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse, "MetricsService"),
}


class Collector:
    """What arrived, and the addresses at which it arrives."""

    def __init__(self) -> None:
        self.http = ""
        self.grpc = ""
        self._changed = threading.Condition()
        self._traces: list[ExportTraceServiceRequest] = []
        self._metrics: list[ExportMetricsServiceRequest] = []

    def take(self, signal: str, body: bytes) -> bytes:
        """One export."""
        request, response, _ = _SERVICES[signal]
        with self._changed:
            (self._traces if signal == "traces" else self._metrics).append(request.FromString(body))
            self._changed.notify_all()
        return bytes(response().SerializeToString())

    def spans(self) -> list[Span]:
        """All spans so far."""
        return [s for r in self._traces for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    def resources(self) -> list[dict[str, str]]:
        """The resource of every export of spans or metrics."""
        found = [rs.resource for r in self._traces for rs in r.resource_spans]
        found += [rm.resource for r in self._metrics for rm in r.resource_metrics]
        return [{a.key: a.value.string_value for a in one.attributes} for one in found]

    def metrics(self) -> dict[str, Metric]:
        """The last value of every metric."""
        return {
            m.name: m
            for r in self._metrics
            for rm in r.resource_metrics
            for sm in rm.scope_metrics
            for m in sm.metrics
        }

    def wait(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        """Until `condition` holds; looked at after every export."""
        with self._changed:
            arrived = self._changed.wait_for(condition, seconds)
        spans = [(span.name, span.trace_id.hex()[:8]) for span in self.spans()]
        assert arrived, f"never arrived; what did: {spans}, {sorted(self.metrics())}"


@contextmanager
def collector() -> Iterator[Collector]:
    """A running collector."""
    one = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = one.take(self.path.rpartition("/")[2], body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    rpc = grpc.server(futures.ThreadPoolExecutor(2))
    for signal, (_, _, service) in _SERVICES.items():
        method = grpc.unary_unary_rpc_method_handler(lambda body, _, signal=signal: one.take(signal, body))
        name = f"opentelemetry.proto.collector.{'trace' if signal == 'traces' else signal}.v1.{service}"
        rpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method}),))
    one.http = f"http://127.0.0.1:{http.server_address[1]}"
    one.grpc = f"http://127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    try:
        yield one
    finally:
        rpc.stop(0.2).wait()
        http.shutdown()
        http.server_close()
        thread.join()
