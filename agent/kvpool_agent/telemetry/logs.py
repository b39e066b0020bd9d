"""Structured logs: one JSON object a line on standard error, with the ids of the trace that it belongs to.

A field that is handed over by `extra={...}` becomes a field of the object. Promises that a line is always one line
and always valid JSON, whatever the message holds. Refuses to write anything of a request's content: callers log names,
counts and reasons.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

from opentelemetry import trace
from typing_extensions import override

# What every record carries by itself; the rest was handed over by `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """How a line looks."""

    JSON = "json"
    TEXT = "text"


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    Args:
        always: fields of every line (pool, node).
    """

    def __init__(self, always: Mapping[str, str]) -> None:
        super().__init__()
        self._always = dict(always)

    @override
    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
        }
        line.update({name: value for name, value in vars(record).items() if name not in _STANDARD})
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = trace.format_trace_id(span.trace_id)
            line["span_id"] = trace.format_span_id(span.span_id)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, style: LogFormat, always: Mapping[str, str]) -> None:
    """Send everything at `level` and above to standard error, in place of whatever handled it before.

    Args:
        level: a name of `logging`, any case.
        style: JSON, or plain text for a person at a terminal.
        always: fields of every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    if style is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(always))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Its access lines would be one a scrape.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
