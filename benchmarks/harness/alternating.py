"""`isthmus run` in which every other block of rounds is observed.

In an observed block the run has a JSON log and metrics; in the others it has the console, as
`isthmus run` has without options. `round_overhead.py --observed` compares both, which are measured
under the same load.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus import cli
from isthmus_server.observability.json_lines import JsonEventSink, JsonLines
from isthmus_server.observability.observers import ConsoleSink, Observers
from isthmus_server.observability.run_figures import RunFigures
from isthmus_server.observability.sinks import SinkThread
from isthmus_server.storage.events import Event, EventStream, RoundCommitted
from isthmus_server.storage.store import Store

BLOCK = 10
"""Rounds of a block."""


def is_observed(round_: int) -> bool:
    """Whether a round is in an observed block."""
    return (round_ - 1) // BLOCK % 2 == 1


@asynccontextmanager
async def watching(
    observers: Observers, store: Store, events: EventStream, label: str
) -> AsyncIterator[None]:
    """Switch between the sinks when a block has ended."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((store.directory / "log.jsonl").open("w"))
        figures = RunFigures(label, store.job)
        console = SinkThread(ConsoleSink(observers.console))
        observed = [SinkThread(JsonEventSink(JsonLines(log), label)), SinkThread(figures)]
        assert observers.metrics is not None
        observers.metrics.metrics.add(figures)
        for thread in (console, *observed):
            stack.callback(thread.close)
        now = False

        def pass_on(event: Event) -> None:
            nonlocal now
            for thread in observed if now else [console]:
                thread(event)
            if isinstance(event, RoundCommitted):
                now = is_observed(event.record.round + 1)

        events.subscribe(pass_on)
        yield


def main() -> None:
    """Run the command `isthmus` with the arguments."""
    Observers.watching = watching  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
