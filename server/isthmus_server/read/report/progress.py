"""The terminal's view of a run: lines for ended attempts, and a live status of current work."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from isthmus.printable import in_a_line
from isthmus_server.read.report.late_devices import LateDevices
from isthmus_server.read.report.report import format_metrics, told_incidents
from isthmus_server.read.report.unused_updates import WINDOW, unused_updates
from isthmus_server.storage.events import (
    CohortAwaited,
    Event,
    ModelsCompared,
    ParticipantDeclined,
    ParticipantLate,
    ParticipantLeft,
    ParticipantProgress,
    ParticipantReady,
    Paused,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    RunFinished,
    ServerTakenOver,
    WaitingForParticipants,
)
from isthmus_server.storage.records import ComparisonRecord, FinalModel, RoundRecord, StepFigures
from isthmus_server.transport.check_ins import away_in_words

log = logging.getLogger(__name__)

_LINE_SECONDS = 10.0
"""Between two lines about the work of one participant, where there is no terminal."""

_LONG_REASON = 80
"""Characters of a reason that are repeated in each round."""
_NUMBER = re.compile(r"[-+]?\d[\d.,e%]*")

_STYLES = {"datacenter": "blue", "federated": "green", "hybrid": "magenta"}


def _safe(text: str) -> str:
    """Text of another machine, as one line of markup: a server's events are shown to operators."""
    return escape(in_a_line(text))


class ProgressView:
    """Shows the events of a run; subscribe it to the run's `EventStream`.

    On a terminal a live status shows the round under way; elsewhere lines are printed. Use it as a
    context manager around the run.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._status = "starting"
        self._spinner = Spinner("dots")
        self._since = time.monotonic()
        self._working: dict[str, str] = {}
        """The last progress line of each datacenter at work, by name."""
        self._last: deque[RoundRecord] = deque(maxlen=WINDOW)
        self._late = LateDevices()
        self._with_devices = 0
        """Committed rounds with devices that were shown."""
        self._printed: dict[str, float] = {}
        """When a progress line was last printed, by name; "" for that of waiting."""
        self._waiting = ""
        """The line of waiting that was printed last, unless a round was planned after it."""
        self._shown_steps: dict[str, int] = {}
        """The last step of each datacenter whose figures were printed, by name."""
        self._told: set[str] = set()
        """Long reasons that were printed, without their numbers."""

    def __enter__(self) -> ProgressView:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case ParticipantProgress():
                self._show_progress(event)
            case WaitingForParticipants():
                self._show_waiting(waiting_for(event))
            case ParticipantReady():
                name = in_a_line(event.participant)
                self._set_status(f"{name} is ready with {event.examples} examples of its own")
            case ParticipantLate() | CohortAwaited():
                self._late.note(event)
            case ParticipantDeclined():
                self._print(
                    f"[red]{_safe(event.participant)} declined:[/red] {_safe(event.reason)}"
                )
            case ParticipantLeft():
                self._print(
                    f"[yellow]{_safe(event.participant)} left:[/yellow] {_safe(event.reason)}"
                )
            case Paused():
                self._print(
                    f"           [dim]round {event.round} waits {event.seconds:.0f} s: "
                    f"{_safe(event.reason)}[/dim]"
                )
            case ServerTakenOver():
                self._print(f"           [yellow]{_safe(event.sentence)}[/yellow]")
            case RoundPlanned():
                self._waiting = ""
                attempt = f", try {event.attempt}" if event.attempt > 1 else ""
                self._set_status(
                    f"round {event.round}{attempt}: {event.regime} with {event.invited} "
                    f"participant(s), because {in_a_line(event.reason)}"
                )
            case ModelsCompared():
                self._show_comparison(event.record)
            case RoundCommitted():
                for name, steps in event.record.step_figures.items():
                    self._show_steps(name, steps)
                self._show_round(event.record)
            case RoundAttemptFailed():
                attempt = f"round {event.record.round}, try {event.record.attempt}"
                self._print(f"[red]{attempt} failed:[/red] {_safe(event.record.error)}")
            case RunFinished():
                self._show_end(event)

    def _show_end(self, event: RunFinished) -> None:
        if self._last and self._last[-1].round % WINDOW:
            self._show_warnings()
        if event.final is None:
            self._print(f"[bold]done[/bold] ({_safe(event.reason)})")
            return
        figures = _safe(format_metrics(event.final.metrics))
        self._print(
            f"[bold]done[/bold] ({_safe(event.reason)}): "
            f"{figures}{', ' if figures else ''}"
            f"cost {event.spent:g}{_which(event.final)}\n"
            f"model   {_safe(event.final.model_path)}\n"
            f"sha256  {event.final.model_sha256}"
        )

    def _show_round(self, record: RoundRecord) -> None:
        regime = record.regime
        metrics = _safe(format_metrics(record.metrics))
        self._print(
            f"round {record.round:>3}  [{_STYLES[regime]}]{regime:<10}[/]  "
            f"{_took_part(record)}  "
            f"{metrics:<32} cost {record.cost.price:<6g} {_privacy(record)}"
            f"{record.seconds:6.2f} s  [dim]{_safe(self._reason(record.reason))}[/dim]"
        )
        for who, reason in told_incidents(record):
            self._print(f"           [yellow]{_safe(who)}:[/yellow] {_safe(reason)}")
        if record.evaluation is not None and record.evaluation.error:
            error = f"evaluation on devices: {_safe(record.evaluation.error)}"
            self._print(f"           [yellow]{error}[/yellow]")
        for sentence in () if record.evaluation is None else record.evaluation.clipped.values():
            self._print(f"           [yellow]{_safe(sentence)}[/yellow]")
        for sentence in record.incidents:
            self._print(f"           [yellow]{sentence}[/yellow]")
        self._last.append(record)
        self._with_devices += regime != "datacenter"
        if record.round % WINDOW == 0:
            self._show_warnings()

    def _show_warnings(self) -> None:
        """Say what devices have sent in vain in the last rounds, and who was late."""
        for sentence in [*unused_updates(self._last), *self._late.sentences(self._with_devices)]:
            self._print(f"           [yellow]{_safe(sentence)}[/yellow]")

    def _reason(self, reason: str) -> str:
        """A reason, of which a long one is shortened when only its numbers are new."""
        kind = _NUMBER.sub("", reason)
        if len(reason) <= _LONG_REASON or kind not in self._told:
            self._told.add(kind)
            return reason
        return f"{reason[: _LONG_REASON - 3].rstrip()}..."

    def _show_comparison(self, record: ComparisonRecord) -> None:
        result = record.result
        if result is None:
            line = f"[red]try {record.attempt} failed:[/red] {_safe(record.error or '')}"
        else:
            scores = (f"{_safe(name)} {result.score[name]:.4f}" for name in result.models)
            line = f"{result.devices} devices scored {', '.join(scores)} (0 is best)"
        self._print(f"           comparison for round {record.round}: {line}")

    def _show_progress(self, event: ParticipantProgress) -> None:
        """Show how far a datacenter is; of devices there may be many, and they are not shown."""
        name = event.participant
        if event.note:
            self._print(f"[dim]{_safe(name)}: {_safe(event.note)}[/dim]")
        self._show_steps(name, event.step_figures)
        if not event.total_steps:
            return
        line = (
            f"{in_a_line(name)}: step {event.steps} of {event.total_steps}, loss {event.loss:.4g}, "
            f"{event.examples_per_second:,.0f} examples/s"
        )
        if event.units_per_second > 1.5 * event.examples_per_second:
            line += f" ({event.units_per_second:,.0f} scored units/s)"
        self._working[name] = line
        self._draw()
        now = time.monotonic()
        if self._live is None and now - self._printed.get(name, self._since) >= _LINE_SECONDS:
            self._printed[name] = now
            self._print(f"           [dim]{_safe(line)}[/dim]")

    def _show_steps(self, name: str, steps: Sequence[StepFigures]) -> None:
        """Print the figures of steps that were not printed yet; each report repeats some."""
        for each in steps:
            if each.step <= self._shown_steps.get(name, 0):
                continue
            self._shown_steps[name] = each.step
            line = f"{in_a_line(name)}: step {each.step}: loss {each.loss:.4g}, "
            line += f"gradient norm {each.gradient_norm:.4g}"
            if each.learning_rate is not None:
                line += f", learning rate {each.learning_rate:.4g}"
            self._print(f"           {_safe(line)}, {each.units_per_second:,.0f} scored units/s")

    def _show_waiting(self, line: str) -> None:
        """Show what the run waits for; without a terminal only once it has waited for a while."""
        self._set_status(line)
        now = time.monotonic()
        is_due = now - self._printed.get("", self._since) >= _LINE_SECONDS
        if self._live is None and is_due and line != self._waiting:
            self._printed[""] = now
            self._waiting = line
            self._print(f"[dim]{_safe(line)}[/dim]")

    def _print(self, text: str) -> None:
        try:
            self.console.print(text, highlight=False, soft_wrap=True)
        except SystemExit:  # of rich, after a BrokenPipeError; it prints nothing from then on
            log.warning("nobody reads the output any more; the run goes on without it")

    def _set_status(self, text: str) -> None:
        self._status = text
        self._working.clear()
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        row = Table.grid(padding=(0, 1))
        row.add_row(self._spinner, Text("\n  ".join([self._status, *self._working.values()])))
        self._live.update(row)


def waiting_for(event: WaitingForParticipants) -> str:
    """What a run waits for, and who is missing, as far as that is known."""
    too_few = event.ready < event.clients
    wanted = {"device": event.clients if too_few else 0, "datacenter": event.datacenters}
    counts = [f"{n} {noun}{'s' * (n > 1)}" for noun, n in wanted.items() if n]
    names = ", ".join(map(in_a_line, event.missing[:8]))
    names += f" and {len(event.missing) - 8} more" if len(event.missing) > 8 else ""
    # With enough devices it waits for certain ones, which took part before for example.
    line = f"waiting for {' and '.join(counts) or names or 'more participants'}"
    if too_few:
        line += f"; ready: {event.ready} of {event.clients} devices"
    elif event.clients:
        line += f"; ready: {event.ready} device{'s' * (event.ready > 1)}"
    if counts and names:
        line += f"; missing: {names}"
    if event.reason and not too_few:
        line += f"; {in_a_line(event.reason)}"
    if too_few and event.away:
        line += f"; {away_in_words(event.away, event.check_ins)}"
    if event.downloads:
        line += f"; {'; '.join(map(in_a_line, event.downloads[:4]))}"
        line += f" and {len(event.downloads) - 4} more" if len(event.downloads) > 4 else ""
    return line


def _took_part(record: RoundRecord) -> str:
    """The accepted and the invited participants; devices + datacenters if both took part."""
    total = record.participants
    of_devices = [each for each in record.receipts if each.regime == "federated"]
    devices = sum(each.status == "accepted" for each in of_devices)
    if record.regime != "hybrid" or len(record.receipts) != total.invited:
        return f"{total.accepted}/{total.invited}"
    invited = len(of_devices)
    others = f"{total.accepted - devices}/{total.invited - invited}"
    return f"{devices}/{invited}+{others}"


def _which(final: FinalModel) -> str:
    return f"; the model of round {final.round}, the best" if final.best else ""


def _privacy(record: RoundRecord) -> str:
    return "" if record.epsilon is None else f"epsilon {record.epsilon:.3g} "
