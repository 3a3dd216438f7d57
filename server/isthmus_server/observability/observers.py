"""What watches the runs of one process, as its command's options say."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from cryptography import x509
from rich.console import Console

from isthmus.errors import IsthmusError
from isthmus.identity import tls
from isthmus_server.fleet.callers import OperatorsOnly
from isthmus_server.fleet.snapshot import FleetFigures
from isthmus_server.observability.json_lines import (
    JsonConsoleFile,
    JsonEventSink,
    JsonLines,
    JsonLogHandler,
    standard_output,
)
from isthmus_server.observability.listener import MetricsListener
from isthmus_server.observability.metrics import RunMetrics, ServerFigures
from isthmus_server.observability.options import LogFormat
from isthmus_server.observability.run_figures import RunFigures
from isthmus_server.observability.sinks import EventSink, sinks_of
from isthmus_server.observability.trackers.options import TrackedBy, tracker_of
from isthmus_server.read.report.progress import ProgressView
from isthmus_server.storage.events import Event, EventStream
from isthmus_server.storage.fence import Takeover
from isthmus_server.storage.records import EndedAttempt
from isthmus_server.storage.store import Store
from isthmus_server.transport.event_loop import LoopNotAnswering, LoopObserver


class ConsoleSink(EventSink):
    """Shows the events of one run on the terminal."""

    name = "console"
    hang_seconds = 600.0
    """A terminal whose output is stopped for a while goes on where it was."""

    def __init__(self, console: Console) -> None:
        self._view = ProgressView(console)
        self._shown = contextlib.ExitStack()
        self._begun = False

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if not self._begun:
            self._begun = True
            self._shown.enter_context(self._view)
        self._view(event)

    def close(self) -> None:
        """Remove the live status."""
        self._shown.close()


class Served(Protocol):
    """What a server tells those that observe it."""

    def pair(self) -> tuple[bytes, bytes]:
        """The server's current key and certificate (PEM)."""
        ...

    def authority(self) -> x509.Certificate:
        """The certificate that signed those of all participants."""
        ...

    async def registered(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now.

        Raises:
            AdmissionRefused: it is not.
        """
        ...

    async def problems(self) -> Sequence[str]:
        """Why it cannot do its work now, one sentence each; none if it can."""
        ...

    def mirrored(self) -> Mapping[str, int]:
        """The blobs of the mirror that devices got, by where; called from any thread."""
        ...

    async def jobs(self) -> Mapping[str, int]:
        """The jobs that have not ended, by state."""
        ...

    async def fleet(self) -> FleetFigures | None:
        """Where its devices are; None if nobody follows them."""
        ...


async def _ready() -> Sequence[str]:
    return ()


class Observers:
    """What watches the runs of one process: the terminal or a JSON log, and metrics."""

    def __init__(
        self,
        console: Console,
        *,
        lines: JsonLines | None = None,
        metrics: MetricsListener | None = None,
        trackers: Mapping[str, TrackedBy] | None = None,
    ) -> None:
        """Watch runs.

        Args:
            console: shows runs and messages.
            lines: where events are written as JSON in place of the console.
            metrics: shows the metrics of runs.
            trackers: make a sink for each run, by name.
        """
        self.console = console
        self.metrics = metrics
        self._lines = lines
        self._trackers = trackers or {}
        self.followers: list[Callable[[str, str, EventStream], AbstractContextManager[None]]] = []
        """Follow each run while it is watched: its id, its label, and its events."""
        self._ending: dict[str, asyncio.Task[None]] = {}
        """By label: what still handles the events of a run that has ended."""

    @classmethod
    def of_options(
        cls,
        log_format: LogFormat,
        quiet: bool,
        metrics: str | None,
        track: Sequence[str],
        *,
        certified: bool = False,
        shared: bool = False,
    ) -> Observers:
        """The observers that the options of `observed` say; sets up logging.

        `certified`: a server's, which has a certificate. `shared`: the metrics are at its one port.

        Raises:
            UserError: the address of the metrics is none, is in use, or others could read them
                there; a tracker is unknown, or a package is missing.
        """
        trackers = dict(map(tracker_of, track))
        listener = None
        if metrics is not None:
            host, port = tls.split_address(metrics, "--metrics")
            listener = MetricsListener(host, port, RunMetrics(), certified=certified, shared=shared)
            listener.check_free()
        lines = None
        if log_format == "json":
            lines = JsonLines(standard_output())
            logging.getLogger().handlers[:] = [JsonLogHandler(lines)]
            # A TextIOBase is what rich needs of a file.
            console = Console(file=cast("Any", JsonConsoleFile(lines)), width=10_000, quiet=quiet)
        else:
            console = Console(quiet=quiet)
        if quiet:
            logging.getLogger().setLevel(logging.WARNING)
            lines = None
        return cls(console, lines=lines, metrics=listener, trackers=trackers)

    @contextlib.contextmanager
    def answering(self, problem: str) -> Iterator[None]:
        """Answer during the block that this process is alive, and why it is not ready.

        Not where callers need a certificate, which only the server can check.

        Raises:
            UserError: the address of the metrics cannot be used.
        """
        if self.metrics is None or not self.metrics.is_open:
            yield
            return
        self.metrics.metrics.serving = False
        with self.metrics.serving(lambda: [problem]):
            yield

    def note_tenure(self, number: int, takeover: Takeover | None) -> None:
        """Show in the metrics that this server serves from now on.

        Args:
            number: of this server among those that have served its directory.
            takeover: from whom it took over; None if it did not.
        """
        if self.metrics is None:
            return
        metrics = self.metrics.metrics
        metrics.serving = True
        metrics.tenure = number
        metrics.taken_over_at = None if takeover is None else takeover.at

    @asynccontextmanager
    async def serving(self, served: Served | None = None) -> AsyncIterator[None]:
        """Serve metrics and health during the block, if the options ask for it.

        Args:
            served: the server whose runs are observed; None for a run of `isthmus run`.

        Raises:
            UserError: the address cannot be used.
        """
        if self.metrics is None:
            yield
            return
        loop = LoopObserver()
        metrics = self.metrics.metrics
        metrics.lag = loop.lag
        check = None
        if served is not None:
            metrics.server = lambda: _figures(loop, served)
            metrics.mirrored = served.mirrored
            check = OperatorsOnly(served.pair, served.authority, loop, served.registered)

        def ready() -> Sequence[str]:
            try:
                return loop.ask(_ready if served is None else served.problems)
            except LoopNotAnswering as error:
                return [str(error)]

        with self.metrics.serving(ready, check):
            measuring = asyncio.create_task(loop.run())
            self.console.print(f"metrics at {self.metrics.url}", soft_wrap=True)
            try:
                yield
            finally:
                measuring.cancel()

    def _end_later(self, label: str, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._ending[label] = task

        def forget(ended: asyncio.Task[None]) -> None:
            if self._ending.get(label) is ended:
                del self._ending[label]

        task.add_done_callback(forget)

    async def ended(self) -> None:
        """Wait until those that watched runs which have ended have handled their events."""
        await asyncio.gather(*self._ending.values())

    @asynccontextmanager
    async def watching(
        self, store: Store, events: EventStream, label: str, *, waits: bool = True
    ) -> AsyncIterator[None]:
        """Watch one run during the block.

        Args:
            store: the run, which stays the caller's.
            events: its events.
            label: the job's name in logs and metrics.
            waits: at the end of the block, until those that watch have handled all events. Without
                it they do so while other runs go on; see `ended`.
        """
        if (before := self._ending.get(label)) is not None:
            await before  # of the same run, before it was paused: they would write to one place
        sinks: list[EventSink] = []
        if self._lines is not None:
            sinks.append(JsonEventSink(self._lines, label))
        elif not self.console.quiet:
            sinks.append(ConsoleSink(self.console))

        def earlier() -> Iterator[EndedAttempt]:
            return _attempts(store.directory)

        sinks += [
            tracked(store.job, store.run_id, store.directory, earlier)
            for tracked in self._trackers.values()
        ]
        figures = None
        if self.metrics is not None:
            figures = RunFigures(label, store.job, earlier)
            sinks.append(figures)
        async with AsyncExitStack() as stack:
            for follow in self.followers:
                stack.enter_context(follow(store.run_id, label, events))
            later = None if waits else partial(self._end_later, label)
            threads = await stack.enter_async_context(sinks_of(events, sinks, later))
            if figures is None or self.metrics is None:
                yield
                return
            self.metrics.metrics.add(figures, threads)
            try:
                yield
            finally:
                self.metrics.metrics.end(label)


def _figures(loop: LoopObserver, served: Served) -> ServerFigures:
    """What a server says; nothing of what it cannot be asked for now, which `/readyz` says."""

    # With one question, as each may take as long as the loop is busy.
    async def ask() -> ServerFigures:
        found = ServerFigures()
        with contextlib.suppress(IsthmusError, sqlite3.Error, OSError):
            found = dataclasses.replace(found, jobs=await served.jobs())
        with contextlib.suppress(IsthmusError, sqlite3.Error, OSError):
            found = dataclasses.replace(found, fleet=await served.fleet())
        return found

    try:
        return loop.ask(ask)
    except LoopNotAnswering:
        return ServerFigures()


def _attempts(directory: Path) -> Iterator[EndedAttempt]:
    """The ended attempts of a run, read in a connection of the calling thread."""
    with contextlib.closing(Store.open(directory)) as store:
        yield from store.attempts()
