"""The metrics that Prometheus reads: their names, and their values from the figures of runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from isthmus import __version__
from isthmus.errors import UserError
from isthmus_server.fleet.snapshot import FleetFigures
from isthmus_server.observability.run_figures import OUTCOMES, ROUND_SECONDS, RunFigures
from isthmus_server.observability.sinks import SinkThread

ENDED_RUNS = 50
"""Ended runs whose figures are kept, so that the label `job` stays bounded."""

AGGREGATORS_SHOWN = 50
"""Aggregators that have a label of their own, those whose names come first."""

_OTHER_AGGREGATORS = "*"
"""The label of all others, which is no host and so no aggregator's name."""

METRICS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "isthmus_rounds_total": ("counter", "Committed rounds.", ("regime",)),
    "isthmus_round": ("gauge", "The last committed round.", ()),
    "isthmus_rounds_planned": ("gauge", "Rounds of the job, unless a limit ends it before.", ()),
    "isthmus_round_seconds": ("histogram", "Wall time of committed rounds.", ()),
    "isthmus_failed_attempts_total": ("counter", "Attempts at rounds that failed.", ()),
    "isthmus_participants": (
        "gauge",
        "Participants that are ready, that declined, and that the attempt under way invited.",
        ("state",),
    ),
    "isthmus_receipts_total": (
        "counter",
        "Outcomes of participants in attempts; late: dropped while at work.",
        ("outcome",),
    ),
    "isthmus_bytes_total": (
        "counter",
        "Bytes of models, updates and messages, up from participants and down to them.",
        ("direction",),
    ),
    "isthmus_running": ("gauge", "1 until the run ends or is interrupted.", ()),
    "isthmus_waiting": ("gauge", "1 while the run waits and trains nothing.", ()),
    "isthmus_cost_spent": ("gauge", "Cost so far, in the job's unit of price.", ()),
    "isthmus_cost_limit": ("gauge", "The job's budget; absent without one.", ()),
    "isthmus_epsilon_spent": ("gauge", "Privacy spent; absent without [privacy].", ()),
    "isthmus_epsilon_limit": ("gauge", "The job's privacy.epsilon; absent without it.", ()),
    "isthmus_datacenter_tokens_per_second": (
        "gauge",
        "Scored units per second in the datacenters' last round, such as tokens.",
        (),
    ),
    "isthmus_datacenter_mfu": (
        "gauge",
        "Model FLOPS utilisation in that round, of the lowest; absent where it is unknown.",
        (),
    ),
    "isthmus_datacenter_peak_memory_bytes": (
        "gauge",
        "Memory of the fullest rank in that round.",
        (),
    ),
    "isthmus_checkpoint_age_seconds": (
        "gauge",
        "Seconds since the newest committed round; absent before the first one.",
        (),
    ),
    "isthmus_sink_events_dropped_total": (
        "counter",
        "Events that a view, log or tracker of the run did not receive.",
        ("sink",),
    ),
    "isthmus_link_lag_seconds": (
        "gauge",
        "The longest delay of the event loop that serves the link, in the last minute.",
        (),
    ),
    "isthmus_mirror_blobs_total": (
        "counter",
        "Models and packages at the mirror, by where devices got them; absent without one.",
        ("source",),
    ),
    "isthmus_jobs": ("gauge", "Jobs of the queue that have not ended.", ("state",)),
    "isthmus_devices_enrolled": (
        "gauge",
        "Devices that have joined the server and may connect.",
        (),
    ),
    "isthmus_devices": (
        "gauge",
        "Devices that are connected to the server itself (direct) or through aggregators "
        "(aggregated), and that are away until they check in, of the last 30,000 seen.",
        ("state",),
    ),
    "isthmus_aggregators": ("gauge", "Aggregators that are linked to the server.", ()),
    "isthmus_aggregator_devices": (
        "gauge",
        "Devices at each linked aggregator; of more than 50 aggregators the others are one, `*`.",
        ("aggregator",),
    ),
    "isthmus_serving": (
        "gauge",
        "1 while this server serves, 0 while it waits as a standby; absent in `isthmus run`.",
        (),
    ),
    "isthmus_tenure": (
        "gauge",
        "Number of this server among all that have served its directory, larger with each start "
        "and each takeover; absent while it waits.",
        (),
    ),
    "isthmus_takeover_timestamp_seconds": (
        "gauge",
        "When this server took over from another one, in Unix seconds; absent if it did not.",
        (),
    ),
    "isthmus_build_info": ("gauge", "1; its label is the version.", ("version",)),
}
"""Kind, help and further labels by name. The label `job` is first, but for those of the process."""

OF_THE_PROCESS = (
    "isthmus_link_lag_seconds",
    "isthmus_mirror_blobs_total",
    "isthmus_jobs",
    "isthmus_devices_enrolled",
    "isthmus_devices",
    "isthmus_aggregators",
    "isthmus_aggregator_devices",
    "isthmus_serving",
    "isthmus_tenure",
    "isthmus_takeover_timestamp_seconds",
    "isthmus_build_info",
)
"""Metrics without the label `job`."""


@dataclasses.dataclass(frozen=True)
class ServerFigures:
    """What a server says of its jobs and its devices when it is asked."""

    jobs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The jobs that have not ended, by state."""
    fleet: FleetFigures | None = None
    """Where its devices are; None if that is not known."""


class RunMetrics:
    """The metrics of all runs of a process, as a collector of `prometheus_client`.

    Guarantees:
      * no name of a device or datacenter is a label, and every label has a bounded number of
        values.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin without runs; `clock` returns Unix seconds.

        Raises:
            UserError: `prometheus_client` is not installed.
        """
        try:
            import prometheus_client
            from prometheus_client import core
        except ModuleNotFoundError as error:
            raise UserError(
                "--metrics needs the package 'prometheus_client', of the extra `server`; "
                "pip install prometheus_client"
            ) from error
        self._core: Any = core
        self._client: Any = prometheus_client
        self._registry: Any = core.CollectorRegistry()
        self._registry.register(cast("Any", self))
        prometheus_client.ProcessCollector(registry=self._registry)
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, RunFigures] = {}
        self._sinks: dict[str, tuple[SinkThread, ...]] = {}
        self._ended: deque[str] = deque()
        self.lag: Callable[[], float | None] = lambda: None
        """Returns the delay of the event loop in seconds; None if nothing measures it."""
        self.server: Callable[[], ServerFigures] = ServerFigures
        """Returns what a server says of its jobs and its devices."""
        self.serving: bool | None = None
        """Whether this server serves, and does not wait as a standby; None without a server."""
        self.tenure: int | None = None
        """Number of this server among those that have served its directory."""
        self.taken_over_at: float | None = None
        """When this server took over from another one, in Unix seconds."""
        self.mirrored: Callable[[], Mapping[str, int]] = dict
        """Returns the number of blobs of the mirror that devices got, by where."""

    def add(self, figures: RunFigures, sinks: tuple[SinkThread, ...] = ()) -> None:
        """Show a run, in place of an earlier one with the same label."""
        with self._lock:
            self._runs[figures.label] = figures
            self._sinks[figures.label] = sinks
            if figures.label in self._ended:
                self._ended.remove(figures.label)

    def end(self, label: str) -> None:
        """Keep the figures of a run that has ended, until `ENDED_RUNS` others have."""
        with self._lock:
            self._runs[label].close()
            self._ended.append(label)
            while len(self._ended) > ENDED_RUNS:
                oldest = self._ended.popleft()
                self._runs.pop(oldest, None)
                self._sinks.pop(oldest, None)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        text: bytes = self._client.generate_latest(self._registry)
        return text

    def describe(self) -> list[Any]:
        """Nothing: `prometheus_client` must not collect while it registers."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metric families, as `prometheus_client` takes them."""
        families = {name: self._family(name) for name in METRICS}
        with self._lock:
            runs = [(figures, self._sinks[label]) for label, figures in self._runs.items()]
        for figures, sinks in runs:
            with figures.lock:
                self._add_run(families, figures)
            dropped = families["isthmus_sink_events_dropped_total"]
            for sink in sinks:
                dropped.add_metric([figures.label, sink.name], sink.dropped)
        if (lag := self.lag()) is not None:
            families["isthmus_link_lag_seconds"].add_metric([], lag)
        for source, count in self.mirrored().items():
            families["isthmus_mirror_blobs_total"].add_metric([source], count)
        server = self.server()
        for state, count in server.jobs.items():
            families["isthmus_jobs"].add_metric([state], count)
        if server.fleet is not None:
            _add_fleet(families, server.fleet)
        for name, value in (
            ("isthmus_serving", self.serving),
            ("isthmus_tenure", self.tenure),
            ("isthmus_takeover_timestamp_seconds", self.taken_over_at),
        ):
            if value is not None:
                families[name].add_metric([], value)
        families["isthmus_build_info"].add_metric([__version__], 1)
        yield from families.values()

    def _family(self, name: str) -> Any:
        kind, help_, more = METRICS[name]
        labels = list(more) if name in OF_THE_PROCESS else ["job", *more]
        if kind == "histogram":
            return self._core.HistogramMetricFamily(name, help_, labels=labels)
        if kind == "counter":
            return self._core.CounterMetricFamily(name, help_, labels=labels)
        return self._core.GaugeMetricFamily(name, help_, labels=labels)

    def _add_run(self, families: Mapping[str, Any], figures: RunFigures) -> None:
        """Add the values of one run; its lock is held."""

        def add(name: str, value: float | None, *labels: str) -> None:
            if value is not None:
                families[name].add_metric([figures.label, *labels], value)

        job = figures.job
        for regime, count in figures.rounds.items():
            add("isthmus_rounds_total", count, regime)
        add("isthmus_round", figures.last_round)
        add("isthmus_rounds_planned", job.rounds)
        add("isthmus_failed_attempts_total", figures.failed_attempts)
        for state, count in figures.participants.items():
            add("isthmus_participants", count, state)
        for outcome in OUTCOMES:
            add("isthmus_receipts_total", figures.receipts[outcome], outcome)
        add("isthmus_bytes_total", figures.bytes_up, "up")
        add("isthmus_bytes_total", figures.bytes_down, "down")
        add("isthmus_running", not figures.ended)
        add("isthmus_waiting", figures.waiting)
        add("isthmus_cost_spent", figures.spent)
        add("isthmus_cost_limit", job.budget)
        add("isthmus_epsilon_spent", figures.epsilon)
        add("isthmus_epsilon_limit", None if job.privacy is None else job.privacy.epsilon)
        profile = figures.profile
        add("isthmus_datacenter_tokens_per_second", profile.get("units_per_second"))
        add("isthmus_datacenter_mfu", profile.get("mfu"))
        memory = profile.get("peak_memory_gib")
        add("isthmus_datacenter_peak_memory_bytes", None if memory is None else memory * 2**30)
        if figures.committed_at is not None and not figures.ended:
            age = max(0.0, self._clock() - figures.committed_at)
            add("isthmus_checkpoint_age_seconds", age)
        buckets = []
        total = 0
        for bound, count in zip((*ROUND_SECONDS, "+Inf"), figures.seconds, strict=True):
            total += count
            buckets.append((str(bound), total))
        families["isthmus_round_seconds"].add_metric([figures.label], buckets, figures.seconds_sum)


def _add_fleet(families: Mapping[str, Any], fleet: FleetFigures) -> None:
    """Add the values of a server's devices and aggregators."""
    families["isthmus_devices_enrolled"].add_metric([], fleet.enrolled)
    for state in ("direct", "aggregated", "away"):
        families["isthmus_devices"].add_metric([state], getattr(fleet, state))
    families["isthmus_aggregators"].add_metric([], len(fleet.aggregators))
    named = sorted(fleet.aggregators.items())
    for name, devices in named[:AGGREGATORS_SHOWN]:
        families["isthmus_aggregator_devices"].add_metric([name], devices)
    if others := named[AGGREGATORS_SHOWN:]:
        devices = sum(count for _, count in others)
        families["isthmus_aggregator_devices"].add_metric([_OTHER_AGGREGATORS], devices)
