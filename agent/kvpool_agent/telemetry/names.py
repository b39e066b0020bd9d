"""The catalogue: every metric and span of the agent, once, with unit, attributes and meaning.

`docs/reference/telemetry.md` is generated from it, and a test compares what a running agent exports with it.
Names are dotted and lower-case, units are UCUM and never part of a name, attributes have few values (no request, key
or block ids). Refuses to hold values: those are in `metrics.py`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """How a metric's values add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class MetricEntry:
    """One metric.

    Attributes:
        name: dotted.
        kind: how values add up.
        unit: UCUM.
        meaning: one sentence.
        attributes: name to the values it can have, in the order in which they are counted.
        bounds: upper bounds of a histogram's buckets, inclusive, in `unit`.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """As PromQL spells it: a counter's samples end in `_total`, a histogram's in `_bucket`, `_sum` and `_count`."""
        base = self.name.replace(".", "_")
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return (base if base.endswith(unit) else base + unit) + (
            "_total" if self.kind is Kind.COUNTER else ""
        )


@dataclass(frozen=True, slots=True)
class SpanEntry:
    """One span: its name, its parent, its attributes and what it covers."""

    name: str
    parent: str
    meaning: str
    attributes: tuple[str, ...] = ()


MODES: Final = ("mapped", "copy")
OUTCOMES: Final = ("hit", "miss", "deadline", "draining", "store_unavailable")
OPERATIONS: Final = ("batch_get", "batch_put", "batch_is_exist")
STATUSES: Final = ("ok", "partial", "deadline", "error")

# Whole bounds are written as integers: Prometheus prints `le` from the Python value, and OTLP prints 1, not 1.0.
LOOKUP_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TRANSFER_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

LOOKUP_DURATION: Final = MetricEntry(
    "kvpool.lookup.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from a lookup's arrival to its answer; a call that only asks for more hashes is not counted.",
    {"outcome": OUTCOMES},
    LOOKUP_BOUNDS,
)
LOOKUP_TOKENS: Final = MetricEntry(
    "kvpool.lookup.tokens",
    Kind.COUNTER,
    "{token}",
    "Prompt tokens that lookups decided over: hit, missed, or pruned because the drafter has to recompute them.",
    {"result": ("hit", "miss", "pruned")},
)
LOAD_DURATION: Final = MetricEntry(
    "kvpool.load.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from a load's acceptance to its report.",
    {"mode": MODES},
    TRANSFER_BOUNDS,
)
LOAD_BYTES: Final = MetricEntry(
    "kvpool.load.bytes", Kind.COUNTER, "By", "Bytes that landed verified in engines' blocks.", {"mode": MODES}
)
LOAD_BLOCKS: Final = MetricEntry(
    "kvpool.load.blocks",
    Kind.COUNTER,
    "{block}",
    "Chunks of ended loads. corrupt: the bytes were not what was saved under the key; evicted: gone between lookup and "
    "load; failed: any other reason.",
    {"result": ("ok", "failed", "corrupt", "evicted")},
)
SAVE_DURATION: Final = MetricEntry(
    "kvpool.save.duration",
    Kind.HISTOGRAM,
    "s",
    "Time from a save's acceptance to its report.",
    {"mode": MODES},
    TRANSFER_BOUNDS,
)
SAVE_BYTES: Final = MetricEntry(
    "kvpool.save.bytes", Kind.COUNTER, "By", "Bytes that were stored and confirmed.", {"mode": MODES}
)
SAVE_BLOCKS: Final = MetricEntry(
    "kvpool.save.blocks",
    Kind.COUNTER,
    "{block}",
    "Chunks of ended saves. stored: they were there already; displaced: put and gone at once, although the store "
    "answered success; failed: any other reason.",
    {"result": ("ok", "stored", "failed", "displaced")},
)
STORE_DURATION: Final = MetricEntry(
    "kvpool.store.request.duration",
    Kind.HISTOGRAM,
    "s",
    "Time of one batch request to the store. partial: some keys were not served.",
    {"operation": OPERATIONS, "status": STATUSES},
    TRANSFER_BOUNDS,
)
STORE_KEYS: Final = MetricEntry(
    "kvpool.store.request.keys", Kind.COUNTER, "{key}", "Keys of those requests.", {"operation": OPERATIONS}
)
LATE: Final = MetricEntry(
    "kvpool.transfer.late",
    Kind.COUNTER,
    "{completion}",
    "Completions of transfers that had been reported already; they were dropped.",
)
REMOVED: Final = MetricEntry(
    "kvpool.chunk.removed",
    Kind.COUNTER,
    "{chunk}",
    "Chunks that must not be found any more. corrupt: not what was saved under the key; revoked: saved by a request of "
    "which a load had failed. given_up: still in the store, left to eviction.",
    {"reason": ("corrupt", "revoked"), "result": ("gone", "given_up")},
)
FORGOTTEN: Final = MetricEntry(
    "kvpool.load.failure.forgotten",
    Kind.COUNTER,
    "{request}",
    "Requests whose failed load was forgotten before its time, since too many had failed; saves were refused instead.",
)
SEGMENT_BYTES: Final = MetricEntry(
    "kvpool.segment.bytes",
    Kind.GAUGE,
    "By",
    "The node's own segment: what the configuration asks for, and what is mounted now.",
    {"state": ("configured", "mounted")},
)
ENGINE_ATTACHED: Final = MetricEntry(
    "kvpool.engine.attached",
    Kind.GAUGE,
    "{session}",
    "Sessions now: one scheduler an engine, one worker a rank.",
    {"role": ("scheduler", *MODES)},
)
INFLIGHT: Final = MetricEntry(
    "kvpool.transfer.inflight",
    Kind.GAUGE,
    "{transfer}",
    "Loads and saves that have been accepted and not reported.",
)
STORE_AGE: Final = MetricEntry(
    "kvpool.store.success.age",
    Kind.GAUGE,
    "s",
    "Time since the store last answered; absent before the first answer.",
)
DRAINING: Final = MetricEntry(
    "kvpool.agent.draining", Kind.GAUGE, "{agent}", "1 while the agent is going away, else 0."
)

METRICS: Final = (
    LOOKUP_DURATION,
    LOOKUP_TOKENS,
    LOAD_DURATION,
    LOAD_BYTES,
    LOAD_BLOCKS,
    SAVE_DURATION,
    SAVE_BYTES,
    SAVE_BLOCKS,
    STORE_DURATION,
    STORE_KEYS,
    LATE,
    REMOVED,
    FORGOTTEN,
    SEGMENT_BYTES,
    ENGINE_ATTACHED,
    INFLIGHT,
    STORE_AGE,
    DRAINING,
)

_CALLER: Final = "the caller's span (W3C trace context in the call's metadata)"

SPANS: Final = (
    SpanEntry(
        "kvpool.lookup",
        _CALLER,
        "One lookup. Made only below a sampled parent: nothing of the SDK runs for any other lookup.",
        ("kvpool.lookup.hit_tokens", "kvpool.lookup.pruned_tokens", "kvpool.lookup.probed_keys"),
    ),
    SpanEntry(
        "kvpool.load",
        _CALLER,
        "One load, from its acceptance to its report.",
        ("kvpool.chunks.ok", "kvpool.chunks.failed"),
    ),
    SpanEntry(
        "kvpool.save",
        _CALLER,
        "One save, from its acceptance to its report.",
        ("kvpool.chunks.ok", "kvpool.chunks.failed"),
    ),
    SpanEntry(
        "mooncake.batch_is_exist", "kvpool.lookup or kvpool.save", "One existence request.", ("kvpool.keys",)
    ),
    SpanEntry(
        "mooncake.batch_get", "kvpool.load", "One batch of chunks fetched into the ring.", ("kvpool.keys",)
    ),
    SpanEntry(
        "mooncake.batch_put", "kvpool.save", "One batch of chunks stored from the ring.", ("kvpool.keys",)
    ),
)
