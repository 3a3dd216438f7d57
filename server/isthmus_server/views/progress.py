"""What a person sees while a run goes on: rounds as they are committed, and the one under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from isthmus.wire import link_pb2
from isthmus_server.transport.sanitize import in_a_line
from isthmus_server.views.report import figures

_LINE_SECONDS = 10.0
"""Between two lines about the work of one participant, where there is no terminal."""

_STYLES = {"datacenter": "blue", "federated": "green", "hybrid": "magenta"}


class Progress:
    """Call it with events; it keeps the screen. Without a terminal it prints lines.

    Use as a context manager around the run.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._status = "starting"
        self._spinner = Spinner("dots")
        self._since = time.monotonic()
        self._working: dict[str, str] = {}
        """What datacenters said last about the work under way, by name."""
        self._printed: dict[str, float] = {}

    def __enter__(self) -> Progress:
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

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take one event of the coordinator."""
        show = getattr(self, f"_on_{kind}", None)
        if show is not None:
            show(data)

    def heard(self, name: str, progress: link_pb2.Progress) -> None:
        """Take what a participant says while it works; of devices there may be many: not shown."""
        if progress.note:
            self._say(f"[dim]{escape(name)}: {escape(in_a_line(progress.note))}[/dim]")
        if not progress.total_steps:
            return
        line = (
            f"{name}: step {progress.steps} of {progress.total_steps}, loss {progress.loss:.4g}, "
            f"{progress.examples_per_second:,.0f} examples/s"
        )
        if progress.units_per_second > 1.5 * progress.examples_per_second:
            line += f" ({progress.units_per_second:,.0f} scored units/s)"
        self._working[name] = line
        self._draw()
        now = time.monotonic()
        if self._live is None and now - self._printed.get(name, self._since) >= _LINE_SECONDS:
            self._printed[name] = now
            self._say(f"           [dim]{escape(line)}[/dim]")

    def _on_waiting(self, data: Mapping[str, Any]) -> None:
        self._now(
            f"waiting for {data['clients']} edge clients and {data['datacenters']} datacenter(s)"
        )

    def _on_ready(self, data: Mapping[str, Any]) -> None:
        self._now(f"{data['participant']} is ready with {data['examples']} examples of its own")

    def _on_declined(self, data: Mapping[str, Any]) -> None:
        self._say(f"[red]{escape(data['participant'])} declined:[/red] {escape(data['reason'])}")

    def _on_left(self, data: Mapping[str, Any]) -> None:
        self._say(f"[yellow]{escape(data['participant'])} left:[/yellow] {escape(data['reason'])}")

    def _on_paused(self, data: Mapping[str, Any]) -> None:
        self._say(
            f"           [dim]round {data['round']} waits {data['seconds']:.0f} s: "
            f"{escape(data['reason'])}[/dim]"
        )

    def _on_round(self, data: Mapping[str, Any]) -> None:
        again = f", try {data['attempt']}" if data["attempt"] > 1 else ""
        self._now(
            f"round {data['round']}{again}: {data['regime']} with {data['invited']} "
            f"participant(s), because {data['reason']}"
        )

    def _on_committed(self, data: Mapping[str, Any]) -> None:
        people, regime = data["participants"], data["regime"]
        metrics = escape(figures(dict(data["metrics"])))
        self._say(
            f"round {data['round']:>3}  [{_STYLES[regime]}]{regime:<10}[/]  "
            f"{people['accepted']}/{people['invited']}  "
            f"{metrics:<32} cost {data['cost']['price']:<6g} "
            f"{data['seconds']:6.2f} s  [dim]{escape(data['reason'])}[/dim]"
        )
        for receipt in data["receipts"]:
            if receipt["reason"]:
                who = f"{escape(receipt['participant'])} {receipt['status']}"
                self._say(f"           [yellow]{who}:[/yellow] {escape(receipt['reason'])}")

    def _on_visited(self, data: Mapping[str, Any]) -> None:
        found = data["comparison"]
        if found is None:
            said = f"[red]try {data['attempt']} failed:[/red] {escape(data['error'])}"
        else:
            scores = (f"{escape(name)} {found['score'][name]:.4f}" for name in found["models"])
            said = f"{found['devices']} devices scored {', '.join(scores)} (0 is best)"
        self._say(f"           comparison for round {data['round']}: {said}")

    def _on_attempt_failed(self, data: Mapping[str, Any]) -> None:
        which = f"round {data['round']}, try {data['attempt']}"
        self._say(f"[red]{which} failed:[/red] {escape(data['error'])}")

    def _on_finished(self, data: Mapping[str, Any]) -> None:
        self._say(
            f"[bold]done[/bold] ({escape(data['reason'])}): "
            f"{escape(figures(dict(data['metrics'])))}, "
            f"cost {data['spent']:g}\nmodel   {escape(data['model_path'])}\n"
            f"sha256  {data['model_sha256']}"
        )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _now(self, text: str) -> None:
        self._status = text
        self._working.clear()
        self._draw()

    def _draw(self) -> None:
        if self._live is None:
            return
        row = Table.grid(padding=(0, 1))
        row.add_row(self._spinner, Text("\n  ".join([self._status, *self._working.values()])))
        self._live.update(row)
