"""The agent's figures: plain integers, counted where things happen and read when somebody asks.

Promises: counting costs well under a microsecond and never calls the telemetry SDK (which takes 10 to 20 a record);
every series exists from the start with 0, so that a rate or an alert sees the first event; attributes are limited to
the catalogue's values, anything else is counted as the catalogue's last value of that attribute.
Refuses: to export. `export.py` turns histograms into both wire formats; counters and gauges go through observable
instruments. The event loop writes, other threads only read: a scrape may see one event half counted, never a torn one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import product

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from kvpool_agent.telemetry import names
from kvpool_agent.telemetry.names import Kind, MetricEntry

Gauges = dict[MetricEntry, dict[tuple[str, ...], float]]
"""Values of gauges now, by attribute values; what could not be read is left out, never 0."""


class Buckets:
    """One histogram series: counts per bucket, their number and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float) -> None:
        """Count one value; a value equal to a bound is below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class AgentMetrics:
    """All figures of one agent. Call from the event loop; read from anywhere."""

    def __init__(self) -> None:
        self.counters: dict[MetricEntry, dict[tuple[str, ...], int]] = {}
        self.histograms: dict[MetricEntry, dict[tuple[str, ...], Buckets]] = {}
        self._gauges: Callable[[], Gauges] = dict
        for entry in names.METRICS:
            labels = list(product(*entry.attributes.values()))
            if entry.kind is Kind.COUNTER:
                self.counters[entry] = dict.fromkeys(labels, 0)
            elif entry.kind is Kind.HISTOGRAM:
                self.histograms[entry] = {label: Buckets(entry.bounds) for label in labels}

    # ------------------------------------------------------------------------------------------------ counting

    def lookup_done(
        self, *, seconds: float, hit_tokens: int, miss_tokens: int, pruned_tokens: int, outcome: str
    ) -> None:
        """One lookup was answered.

        Args:
            seconds: from its arrival to its answer.
            hit_tokens: tokens of the hit, after the prune.
            miss_tokens: tokens past the hit that were not found.
            pruned_tokens: tokens that were found and given up for the drafter.
            outcome: one of `names.OUTCOMES`.
        """
        self._record(names.LOOKUP_DURATION, (outcome,), seconds)
        tokens = self.counters[names.LOOKUP_TOKENS]
        tokens["hit",] += hit_tokens
        tokens["miss",] += miss_tokens
        tokens["pruned",] += pruned_tokens

    def load_done(
        self, *, mode: str, seconds: float, bytes_: int, ok: int, failed: int, corrupt: int, evicted: int
    ) -> None:
        """One load was reported. `failed` counts what is neither corrupt nor evicted."""
        self._record(names.LOAD_DURATION, (mode,), seconds)
        self._add(names.LOAD_BYTES, (mode,), bytes_)
        blocks = self.counters[names.LOAD_BLOCKS]
        blocks["ok",] += ok
        blocks["failed",] += failed
        blocks["corrupt",] += corrupt
        blocks["evicted",] += evicted

    def save_done(
        self, *, mode: str, seconds: float, bytes_: int, saved: int, already: int, failed: int, displaced: int
    ) -> None:
        """One save was reported. `already` were stored before, `displaced` were put and are gone."""
        self._record(names.SAVE_DURATION, (mode,), seconds)
        self._add(names.SAVE_BYTES, (mode,), bytes_)
        blocks = self.counters[names.SAVE_BLOCKS]
        blocks["ok",] += saved
        blocks["stored",] += already
        blocks["failed",] += failed
        blocks["displaced",] += displaced

    def store_request(self, *, operation: str, status: str, seconds: float, keys: int) -> None:
        """One batch request to the store ended.

        Args:
            operation: one of `names.OPERATIONS`.
            status: one of `names.STATUSES`.
            seconds: from handing it over to its answer.
            keys: how many it named.
        """
        self._record(names.STORE_DURATION, (operation, status), seconds)
        self._add(names.STORE_KEYS, (operation,), keys)

    def late_completion(self) -> None:
        """Something completed for a transfer that had been reported already."""
        self.counters[names.LATE][()] += 1

    def removed(self, *, reason: str, gone: int, given_up: int) -> None:
        """Chunks that had to be removed are gone, or are not waited for any more. `reason`: corrupt or revoked."""
        self._add(names.REMOVED, (reason, "gone"), gone)
        self._add(names.REMOVED, (reason, "given_up"), given_up)

    def failure_forgotten(self) -> None:
        """A failed load was forgotten before its time."""
        self.counters[names.FORGOTTEN][()] += 1

    # ------------------------------------------------------------------------------------------------- reading

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Have the gauges read by `gauges`, which must be quick and may be called from any thread."""
        self._gauges = gauges

    def gauges(self) -> Gauges:
        """The gauges' values now."""
        return self._gauges()

    def instrument(self, meter: Meter) -> None:
        """Make an observable instrument for every counter and gauge of the catalogue."""
        for entry in names.METRICS:
            if entry.kind is Kind.COUNTER:
                meter.create_observable_counter(
                    entry.name, [self._observer(entry)], unit=entry.unit, description=entry.meaning
                )
            elif entry.kind is Kind.GAUGE:
                meter.create_observable_gauge(
                    entry.name, [self._observer(entry)], unit=entry.unit, description=entry.meaning
                )

    def _observer(self, entry: MetricEntry) -> Callable[[CallbackOptions], Iterable[Observation]]:
        keys = tuple(entry.attributes)

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            values = self.counters[entry] if entry.kind is Kind.COUNTER else self._gauges().get(entry, {})
            return [
                Observation(value, dict(zip(keys, label, strict=True)))
                for label, value in list(values.items())
            ]

        return observe

    def _record(self, entry: MetricEntry, labels: tuple[str, ...], seconds: float) -> None:
        series = self.histograms[entry]
        (series.get(labels) or series[_known(entry, labels)]).record(seconds)

    def _add(self, entry: MetricEntry, labels: tuple[str, ...], amount: int) -> None:
        series = self.counters[entry]
        series[labels if labels in series else _known(entry, labels)] += amount


def _known(entry: MetricEntry, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Replace what the catalogue does not know: a caller's new word must neither raise nor open a series."""
    return tuple(
        value if value in allowed else allowed[-1]
        for value, allowed in zip(labels, entry.attributes.values(), strict=True)
    )
