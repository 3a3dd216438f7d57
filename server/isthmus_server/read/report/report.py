"""The report of a run: one document for programs, one page for people."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from isthmus.job import Job
from isthmus.job.promises import PrivacyLevel, level_of, needs_of, weakest
from isthmus.printable import in_a_line
from isthmus.task.definition import PUBLIC
from isthmus.task.measurements.metrics import DEVICES, SPREAD
from isthmus_server.budgets.budget import ADJACENCY, UNIT
from isthmus_server.model.summed_evaluation import SummedEvaluation
from isthmus_server.read.report.left_out_groups import left_out_sums
from isthmus_server.read.report.measurements import (
    ForecastError,
    MeasuredFigure,
    forecast_errors,
    measured,
)
from isthmus_server.read.report.notes import devices_to_look_at, notes
from isthmus_server.read.report.privacy.device_examples import PromisedToExamples
from isthmus_server.read.report.privacy.examples_spending import SpentOnExamples
from isthmus_server.storage.events import (
    Event,
    LoggedEvent,
    ParticipantDeclined,
    ParticipantLeft,
    RunServed,
)
from isthmus_server.storage.records import (
    EndedAttempt,
    FailedAttempt,
    FinalModel,
    Receipt,
    Record,
    RoundRecord,
    adapter,
)
from isthmus_server.storage.run_description import is_worked_on
from isthmus_server.storage.store import Store

_TOLD = 8
"""Reasons for which an attempt lost participants that are told; a cohort may lose hundreds."""

_DETAILS = (*(f"_{suffix}" for suffix in SPREAD), "_error")
"""Ends of the names of devices' metrics that only the JSON report has."""

_NAME_WIDTH = 20
"""Longest name of a metric, in characters, that the table does not fold in a narrow terminal."""
_WORD_WIDTH = 13
"""Longest other word, in characters, that is not folded there."""
_LEAST_WIDTH = 72
"""Columns in which the table has all of its figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpentPrivacy(Record):
    """The guarantee of a run with `[privacy]` so far."""

    epsilon: float
    """Epsilon of the device that was asked most, failed attempts included."""
    budget: float
    delta: float
    unit: str = UNIT
    """What is protected: all updates of one of these."""
    adjacency: str = ADJACENCY
    """How neighbouring data sets differ: zeros in place of one unit's updates."""

    @property
    def sentence(self) -> str:
        """The guarantee in words."""
        return (
            f"epsilon {self.epsilon:.4g} of {self.budget:g} at delta {self.delta:g} for one "
            f"{self.unit} ({self.adjacency}), spent by the {self.unit} that was asked most"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Record):
    """A whole run. Programs may rely on the keys of its JSON document."""

    run_id: str
    job: Mapping[str, Any]
    """The validated job."""
    status: str
    """`running`, `stopped`, `finished`, `failed` or `cancelled`. A stopped run has tried rounds and
    has not ended, and no process works on it: it can be continued."""
    reason: str
    """Why the run has ended; empty while it runs."""
    rounds: Sequence[RoundRecord]
    """Committed rounds, in order."""
    failed_attempts: Sequence[FailedAttempt]
    events: Sequence[LoggedEvent]
    """Participants that joined, got ready, declined or left, servers that took over, and the early
    end of the run."""
    final: FinalModel | None
    """None unless the run has finished."""
    privacy: SpentPrivacy | None = None
    """None without `[privacy]`."""
    examples_privacy: SpentOnExamples | None = None
    """None without `[datacenter.privacy]`."""
    device_examples_privacy: PromisedToExamples | None = None
    """None without `[federated.privacy]`."""
    level: PrivacyLevel | None = None
    """What is claimed of devices against the server, see docs/threat-model.md; None for a run that
    asks nothing of devices."""
    owners_need: Sequence[str] = ()
    """What owners must have in their `policy.toml` for their devices to take part in all of it."""
    measured: Sequence[MeasuredFigure] = ()
    """Times, bytes and dropouts so far."""
    forecast_errors: Sequence[ForecastError] = ()
    """What was measured, compared with the forecasts that were stored with the plans."""


def read_report(store: Store) -> Report:
    """Read the report of a run from its log."""
    status, reason, final = store.status()
    attempts = list(store.attempts())
    if status == "running" and attempts and not is_worked_on(store.directory):
        status = "stopped"
    events = store.events()
    return Report(
        run_id=store.run_id,
        job=store.job.model_dump(mode="json"),
        status=status,
        reason=reason,
        rounds=[record for record in attempts if isinstance(record, RoundRecord)],
        failed_attempts=[record for record in attempts if isinstance(record, FailedAttempt)],
        events=events,
        final=final,
        privacy=_spent_privacy(store.job, attempts),
        examples_privacy=SpentOnExamples.of(store),
        device_examples_privacy=PromisedToExamples.of(store.job),
        level=level_of_run(store.job, events),
        owners_need=needs_of(store.job),
        measured=measured(attempts),
        forecast_errors=forecast_errors(store.logged_attempts()),
    )


def level_of_run(job: Job, events: Iterable[Event]) -> PrivacyLevel | None:
    """The level of protection of a run's devices, by its job and by who has served it so far."""
    served = [event.deployment for event in events if isinstance(event, RunServed)]
    return level_of(job, weakest(served))


def _spent_privacy(job: Job, attempts: Sequence[EndedAttempt]) -> SpentPrivacy | None:
    if job.privacy is None:
        return None
    epsilon = max((record.epsilon or 0.0 for record in attempts), default=0.0)
    return SpentPrivacy(epsilon=epsilon, budget=job.privacy.epsilon, delta=job.privacy.delta)


def report_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the document."""
    schema = adapter(Report).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def show(report: Report, console: Console) -> None:
    """Print the page."""
    console.width = max(console.width, _LEAST_WIDTH)  # a narrower terminal folds the lines itself
    console.print(_page(report, console), soft_wrap=False)


def _page(report: Report, console: Console) -> RenderableType:
    """A table of all attempts, then incidents, bytes, the end and the final model.

    Args:
        report: that is shown.
        console: on which it will be printed.
    """
    attempts: list[EndedAttempt] = sorted(
        [*report.rounds, *report.failed_attempts], key=lambda record: (record.round, record.attempt)
    )
    parts = _table(report, attempts, console)
    incidents = _incidents(report, attempts)
    if incidents:
        parts.append(Text("\n".join(["what else happened:", *(f"  {line}" for line in incidents)])))
    parts += [Text(line) for line in moved(attempts)]
    parts += [Text(line) for line in _planned_and_measured(report)]
    if report.reason:
        parts.append(Text(f"it ended because: {in_a_line(report.reason)}"))
    model = report.job.get("model", {})
    if model.get("start") is not None:
        parts.append(
            Text(f"it started from {in_a_line(model['start'])}\n  sha256 {model['sha256']}")
        )
    if report.level is not None:
        parts.append(Text(f"level: {report.level.sentence}"))
    parts += [Text(line) for line in needs_of_owners(report)]
    if report.privacy is not None:
        parts.append(Text(f"privacy: {report.privacy.sentence}"))
    if report.examples_privacy is not None:
        parts.append(Text(f"privacy: {report.examples_privacy.sentence}"))
    if report.device_examples_privacy is not None:
        parts.append(Text(f"privacy: {report.device_examples_privacy.sentence}"))
    if report.final is not None:
        total = sum(record.cost.price for record in attempts)
        figures = format_metrics(report.final.metrics)
        figures += ", " if figures else ""
        which = f", of round {report.final.round}, the best" if report.final.best else ""
        parts.append(
            Text(
                f"final model{which}: {figures}cost {total:g}\n"
                f"  {report.final.model_path}\n  sha256 {report.final.model_sha256}"
            )
        )
        parts += [Text(f"  {who}: {figures}") for who, figures in final_apart(report)]
    return Group(*parts)


def figures_apart(evaluation: SummedEvaluation | None) -> list[tuple[str, str]]:
    """Who was evaluated apart from the sum of all devices, groups or devices, and the figures."""
    if evaluation is None:
        return []
    groups = [
        (f"group {name}, {group.devices} devices", format_metrics(group.metrics))
        for name, group in sorted(evaluation.groups.items())
    ]
    devices = [
        (f"device {name}", format_metrics(metrics))
        for name, metrics in sorted(evaluation.by_device.items())
    ]
    return groups + devices


def final_apart(report: Report) -> list[tuple[str, str]]:
    """`figures_apart` of the final model; empty if its round was not evaluated on devices."""
    if report.final is None:
        return []
    delivered = report.final.round
    return [
        pair
        for record in report.rounds
        if record.round == delivered
        for pair in figures_apart(record.evaluation)
    ]


def _table(
    report: Report, attempts: Sequence[EndedAttempt], console: Console
) -> list[RenderableType]:
    """The attempts, and below them their reasons if the terminal is too narrow for these."""
    table = Table(title=f"{report.run_id}: {report.status}", title_justify="left")
    for column in ("round", "regime", "because", "took part", "held-out", "cost", "s"):
        is_figure = column in ("round", "cost", "s")
        table.add_column(column, overflow="fold", no_wrap=is_figure)
    for record in attempts:
        table.add_row(
            _number(record),
            record.regime,
            _reason(record),
            f"{record.participants.accepted} of {record.participants.invited}",
            Text(format_metrics(record.metrics)),
            f"{record.cost.price:g}",
            f"{record.seconds:.2f}",
        )
    if _fits(table, console):
        return [table]
    (because,) = (each for each in table.columns if each.header == "because")
    table.columns.remove(because)
    _fits(table, console)
    lines = Text("because:")
    for record in attempts:
        lines.append(f"\n  round {_number(record)}: ").append(_reason(record))
    return [table, lines]


def _number(record: EndedAttempt) -> str:
    return str(record.round) + (f" try {record.attempt}" if record.attempt > 1 else "")


def _reason(record: EndedAttempt) -> Text:
    failed = isinstance(record, FailedAttempt)
    reason = record.error if isinstance(record, FailedAttempt) else record.reason
    return Text(in_a_line(reason), style="red" if failed else "")


def _fits(table: Table, console: Console) -> bool:
    """Whether a table fits with words that are whole; if so, each column gets its width.

    Words give way to figures, which are never cut, and to names of metrics, which cannot be read
    when they are folded. If it does not fit, these names get what is left.
    """
    words: dict[str, int] = {}
    lines: dict[str, int] = {}
    for column in table.columns:
        texts = [str(text) for text in (column.header, *column.cells)]
        name = str(column.header)
        lines[name] = max(map(cell_len, texts))
        words[name] = lines[name]
        if not column.no_wrap:
            longest = max(cell_len(word) for text in texts for word in text.split())
            words[name] = min(longest, _NAME_WIDTH if name == "held-out" else _WORD_WIDTH)
    frame = 3 * len(table.columns) + 1
    room = console.width - frame - sum(words.values())
    widths = dict(words)
    for name in ("took part", "because", "held-out"):
        if name in widths:
            more = max(0, min(room, lines[name] - widths[name]))
            widths[name] += more
            room -= more
    if room < 0 and "because" not in widths:
        widths["held-out"] = max(1, widths["held-out"] + room)
    for column in table.columns:
        column.width = widths[str(column.header)]
    return room >= 0


def _incidents(report: Report, attempts: Sequence[EndedAttempt]) -> list[str]:
    """Suspected devices, receipts with a reason, who declined or left, and what else happened."""
    lines = [
        f"round {record.round}: {who}: {reason}"
        for record in attempts
        for who, reason in told_incidents(record)
    ]
    lines += [
        f"{event.participant} {event.kind}: {event.reason}"
        for event in report.events
        if isinstance(event, ParticipantDeclined | ParticipantLeft)
    ]
    # First what decides which devices to look at.
    return [
        *devices_to_look_at(report.job, report.rounds),
        *map(in_a_line, lines),
        *notes(report.rounds, report.events),
    ]


def needs_of_owners(report: Report) -> list[str]:
    """A line of what owners must have in their policies; none for devices without an owner."""
    served = [each.deployment for each in report.events if isinstance(each, RunServed)]
    is_local = bool(served) and all(each == "local" for each in served)
    if is_local or not report.owners_need:
        return []
    return [f"devices need in policy.toml: {', '.join(report.owners_need)}"]


def moved(attempts: Sequence[EndedAttempt]) -> list[str]:
    """A line for each regime: what its participants sent and received, one and all of them."""
    lines = []
    for regime, who in (("federated", "devices"), ("datacenter", "datacenters")):
        receipts = [
            receipt for each in attempts for receipt in each.receipts if receipt.regime == regime
        ]
        sent = [receipt.moved.up for receipt in receipts]
        received = [receipt.moved.down for receipt in receipts]
        total = sum(sent) + sum(received)
        if not total:
            continue
        line = (
            f"{who} sent {_megabytes(sum(sent))} and received {_megabytes(sum(received))}, each at "
            f"most {_megabytes(max(sent))} and {_megabytes(max(received))} in one attempt"
        )
        counted = sum(each.cost.device_bytes for each in attempts)
        if regime == "federated" and counted > total:
            line += f"; with evaluations and comparisons {_megabytes(counted)} in all"
        lines.append(line)
    return lines


def _planned_and_measured(report: Report) -> list[str]:
    """A line of what was measured, and one of the errors of forecasts for each regime."""
    lines = []
    if report.measured:
        lines.append(f"measured: {'; '.join(each.text for each in report.measured)}")
    for regime in dict.fromkeys(each.regime for each in report.forecast_errors):
        texts = [each.text for each in report.forecast_errors if each.regime == regime]
        lines.append(f"{regime} rounds took {', '.join(texts)}")
    return lines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def told_incidents(record: EndedAttempt) -> list[tuple[str, str]]:
    """Which sums of groups were left out of an attempt, and who was lost, and why."""
    groups, others = left_out_sums(record)
    return [*groups, *told_receipts(others)]


def told_receipts(receipts: Sequence[Receipt]) -> list[tuple[str, str]]:
    """Who was lost and why: a line for each reason, the most frequent one first."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in receipts:
        if each.reason:
            alike[each.outcome, in_a_line(each.reason)].append(each.participant)
    lines = []
    ordered = sorted(alike.items(), key=lambda item: -len(item[1]))
    for (outcome, reason), (first, *others) in ordered[:_TOLD]:
        more = f" and {len(others)} more" * bool(others)
        lines.append((f"{first}{more} {outcome}", reason))
    if left := ordered[_TOLD:]:
        lines.append((f"and {sum(len(names) for _, names in left)} more", "other reasons"))
    return lines


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics on one line, accuracies as percentages; without details of devices' metrics."""
    return " ".join(
        f"{name} {value:.1%}"
        if name in ("accuracy", f"{PUBLIC}accuracy", f"{DEVICES}accuracy")
        else f"{in_a_line(name)} {value:.4g}"  # it is the task's, or a datacenter's
        for name, value in sorted(metrics.items())
        if _is_shown(name)
    )


def _is_shown(metric: str) -> bool:
    return not (metric.startswith(DEVICES) and metric.endswith(_DETAILS))
