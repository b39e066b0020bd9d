"""A receiver for OTLP/HTTP traces on a loopback port, and one trace printed as a tree.

For the demo and for tests: it keeps spans in memory, up to a limit, and answers every export with success.
"""

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from typing_extensions import override

MAX_SPANS: Final = 100_000
MAX_BODY_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span; times in nanoseconds since the epoch."""

    trace: str
    span: str
    parent: str
    name: str
    service: str
    begun: int
    ended: int
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def milliseconds(self) -> float:
        """How long it took."""
        return (self.ended - self.begun) / 1e6


class TraceReceiver:
    """Listens until `close`. `endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT has to be."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[SpanRecord] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", "0"))
                if not 0 <= length <= MAX_BODY_BYTES:
                    self.send_error(413)
                    return
                body = self.rfile.read(length)
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            @override
            def log_message(self, format: str, *args: object) -> None:
                """Quiet: the demo prints its own account."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="otlp-receiver", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Base URL, as OTEL_EXPORTER_OTLP_ENDPOINT wants it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        found: list[SpanRecord] = []
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            service = names.get("service.name", "?")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {
                        item.key: str(getattr(item.value, item.value.WhichOneof("value") or "string_value"))
                        for item in span.attributes
                    }
                    found.append(
                        SpanRecord(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            service,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            attributes,
                        )
                    )
        with self._changed:
            self._spans.extend(found[: MAX_SPANS - len(self._spans)])
            self._changed.notify_all()

    def wait(self, wanted: Callable[[list[SpanRecord]], bool], *, timeout: float) -> list[SpanRecord]:
        """All spans so far, as soon as `wanted` says yes to them or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: wanted(self._spans), timeout=timeout)
            return list(self._spans)

    def close(self) -> None:
        """Stop listening and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def tree(spans: list[SpanRecord], trace: str) -> list[str]:
    """The spans of one trace as lines of a tree, oldest first, with service, time and attributes."""
    own = sorted((span for span in spans if span.trace == trace), key=lambda span: span.begun)
    known = {span.span for span in own}
    lines: list[str] = []

    def add(span: SpanRecord, indent: str, branch: str, below: str) -> None:
        shown = " ".join(
            f"{key.removeprefix('kvpool.')}={value}" for key, value in sorted(span.attributes.items())
        )
        lines.append(
            f"{indent}{branch}{span.name} {span.milliseconds:.1f} ms [{span.service}] {shown}".rstrip()
        )
        children = [child for child in own if child.parent == span.span]
        for index, child in enumerate(children):
            last = index == len(children) - 1
            add(child, indent + below, "└─ " if last else "├─ ", "   " if last else "│  ")

    for root in own:
        if root.parent not in known:
            add(root, "", "", "")
    return lines
