"""Writes the reference pages that the code itself says: configuration and telemetry of the agent.

python tools/gen_reference.py            write the files
python tools/gen_reference.py --check    exit 1 if the committed files are not what the code says
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from kvpool_agent.config import AgentConfig
from kvpool_agent.config_load import ENV_PREFIX, default_of, describe, fields, section_of
from kvpool_agent.telemetry import names

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"


def config_page() -> str:
    """Every field of the agent's configuration."""
    lines = [
        "# Agent configuration",
        "",
        "<!-- Written by tools/gen_reference.py from agent/kvpool_agent/config.py; do not edit. -->",
        "",
        "`python -m kvpool_agent --config FILE` (or `kvpool agent --config FILE`) reads one YAML or JSON file.",
        "`--print-default-config` prints a complete one, `--check-config` reads one and says what is wrong with it.",
        "An unknown field is an error. Sizes are Kubernetes quantities (`64Gi`), durations are strings (`10s`,",
        "`500ms`, `1m30s`).",
        "",
        "Every field can be overridden by an environment variable: section and field joined by `__`, in any case, with",
        f"or without underscores inside a name. `{ENV_PREFIX}STORE__MASTER_ADDRESS=master:50051` sets",
        "`store.masterAddress`. The value is read as YAML.",
        "",
        "Exit codes: 0 after an orderly end, 2 for a wrong call or configuration, 3 where the node cannot run the",
        "agent.",
    ]
    for path, model, words in _sections(AgentConfig, "", ""):
        lines += ["", f"## {path}", "", words, "", "| field | default | meaning |", "| --- | --- | --- |"]
        for name, field in fields(model):
            if section_of(field) is None:
                default = "required" if field.is_required() else f"`{_plain(default_of(model, name))}`"
                lines.append(f"| `{name}` | {default} | {_one_line(describe(field))} |")
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str, words: str) -> Iterator[tuple[str, type[BaseModel], str]]:
    if prefix:
        yield prefix, model, words
    for name, field in fields(model):
        below = section_of(field)
        if below is not None:
            yield from _sections(below, f"{prefix}.{name}".lstrip("."), _one_line(describe(field)))


def _plain(value: object) -> str:
    return '""' if value == "" else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.replace("Required.", "").split()).replace("|", "\\|")


def telemetry_page() -> str:
    """Every metric and span of the agent."""
    lines = [
        "# Telemetry of the agent",
        "",
        "<!-- Written by tools/gen_reference.py from agent/kvpool_agent/telemetry/names.py; do not edit. -->",
        "",
        "Metrics are at `/metrics` for Prometheus and, at the same time, pushed by OTLP where an endpoint is",
        "configured; both ways give the same names. Standard `OTEL_*` variables win over the configuration.",
        "Counting costs the agent an integer addition: histograms are kept as bucket counts of its own and handed to",
        "both ways as true histograms, so `OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION` has no effect on",
        "them. Every series exists from the start with 0. With `OTEL_SDK_DISABLED=true` `/metrics` keeps the",
        "histograms alone.",
        "",
        "Histograms come from a collector of the agent's own, and not from an observable instrument as counters and",
        "gauges do, because OpenTelemetry has no observable histogram: its callbacks give single values, never bucket",
        "counts. What it has instead, recording each value, takes 10 to 20 microseconds, which a lookup is not to",
        "pay. So the counts join what the SDK gives at its two public seams: a collector in the Prometheus registry,",
        "and an exporter that adds them to what it passes on. The price is that views do not reach them.",
        "",
        "## Metrics",
        "",
        "| name | in PromQL | kind | unit | attributes | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in names.METRICS:
        attributes = "<br>".join(f"`{key}`: {', '.join(values)}" for key, values in entry.attributes.items())
        cells = (f"`{entry.name}`", f"`{entry.prometheus_name}`", entry.kind, f"`{entry.unit}`", attributes)
        lines.append(f"| {' | '.join(cells)} | {entry.meaning} |")
    lines += ["", "Bucket bounds:", ""]
    lines += [
        f"- `{one.name}`: {', '.join(str(bound) for bound in one.bounds)}"
        for one in names.METRICS
        if one.bounds
    ]
    lines += [
        "",
        "## Spans",
        "",
        "A caller's W3C trace context travels in the metadata of each call. Its sampling decision is followed; traces",
        "that begin in the agent are sampled by `telemetry.otlp.sampling`. Log lines of a traced transfer carry its",
        "`trace_id` and `span_id`.",
        "",
        "A batch of keys belongs to one transfer or one lookup and is never shared between requests. So the span of a",
        "Mooncake request is a child of that transfer's span, and no span carries links.",
        "",
        "| span | below | meaning | attributes |",
        "| --- | --- | --- | --- |",
    ]
    for span in names.SPANS:
        attributes = ", ".join(f"`{name}`" for name in span.attributes)
        lines.append(f"| `{span.name}` | {span.parent} | {span.meaning} | {attributes} |")
    return "\n".join(lines) + "\n"


PAGES = {"config.md": config_page, "telemetry.md": telemetry_page}


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    arguments = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        path, wanted = REFERENCE / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(path)
        if not arguments.check:
            path.write_text(wanted, encoding="utf-8")
    for path in stale if arguments.check else ():
        print(
            f"{path.relative_to(ROOT)} is not what the code says; run: python tools/gen_reference.py",
            file=sys.stderr,
        )
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
