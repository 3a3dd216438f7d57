"""Events and log records as JSON, one object per line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from isthmus.printable import in_lines
from isthmus_server.observability.sinks import EventSink
from isthmus_server.storage.events import Event

MAX_NAMED = 100
"""Receipts, and names of missing participants, in one line."""

_WARNINGS = {"attempt_failed", "declined", "left", "job_paused"}
_ERRORS = {"failed"}


CAPACITY = 10_000
"""Log records and printed lines that wait at most for a reader that is slow."""

DRAIN_SECONDS = 5.0
"""Time for them at the end of the process."""


def standard_output() -> TextIO:
    """Standard output with a buffer of its own, which nothing flushes when the process ends.

    Otherwise the end would wait for a reader that has stopped, or be aborted by the interpreter.
    """
    try:
        return os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    except (OSError, ValueError):  # none, or in the memory of a test
        return sys.stdout


class JsonLines:
    """Writes objects to a text file, whole lines at a time, from any thread.

    Guarantees:
      * `post` never waits for the file, so that a reader that has stopped holds up no event loop;
      * what it drops because of that is counted in a line as soon as the file takes lines again.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._posted: queue.Queue[tuple[float, str, Mapping[str, Any]]] = queue.Queue(CAPACITY)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def post(self, at: float, level: str, fields: Mapping[str, Any]) -> None:
        """Write one object in a thread; it is dropped if too many wait. See `write`."""
        try:
            self._posted.put_nowait((at, level, fields))
        except queue.Full:
            self._dropped += 1
        if self._thread is None or not self._thread.is_alive():  # as in a process after a fork
            self._thread = threading.Thread(target=self._write_posted, name="json", daemon=True)
            self._thread.start()

    def drain(self, seconds: float) -> None:
        """Wait until all that was posted is written, for at most so many seconds."""
        with self._posted.all_tasks_done:
            self._posted.all_tasks_done.wait_for(
                lambda: not self._posted.unfinished_tasks, timeout=seconds
            )

    def _write_posted(self) -> None:
        while True:
            object_ = self._posted.get()
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self.write(*object_)
                if self._dropped:
                    missed = self._dropped
                    self._dropped = 0
                    text = f"{missed} lines were dropped: standard output was not read in time"
                    self.write(time.time(), "warning", {"message": text})
            self._posted.task_done()

    def write(self, at: float, level: str, fields: Mapping[str, Any]) -> None:
        """Write one object, and wait until the file has taken it.

        Args:
            at: when it happened, in Unix seconds.
            level: `debug`, `info`, `warning`, `error` or `critical`.
            fields: its other keys.
        """
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        time_ = stamp.replace("+00:00", "Z")
        # Escaped to ASCII, so that no text of another machine reaches a terminal as it is.
        line = json.dumps(_finite({"time": time_, "level": level, **fields}), default=str)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()


class JsonEventSink(EventSink):
    """Writes the events of one run: their kind as `event`, and their fields."""

    name = "json"

    def __init__(self, lines: JsonLines, job: str) -> None:
        self._lines = lines
        self._job = job

    def __call__(self, event: Event) -> None:
        """Write an event."""
        self._lines.write(event.at, level_of(event), {"job": self._job, **fields_of(event)})


def level_of(event: Event) -> str:
    """The level that an event has in a log."""
    if event.kind in _ERRORS:
        return "error"
    return "warning" if event.kind in _WARNINGS else "info"


def fields_of(event: Event) -> dict[str, Any]:
    """An event as JSON data with its kind as `event`; of receipts, those that have a reason.

    >>> from isthmus_server.storage.events import ParticipantJoined
    >>> fields_of(ParticipantJoined(participant="phone-0"))
    {'event': 'joined', 'participant': 'phone-0'}
    """
    data = event.to_json()
    fields = {"event": data.pop("kind"), **data}
    del fields["at"]
    if "missing" in fields:
        fields["missing"] = fields["missing"][:MAX_NAMED]
    record = fields.get("record")
    if record is not None:
        explained = [receipt for receipt in record["receipts"] if receipt["reason"]]
        fields["record"] = {**record, "receipts": explained[:MAX_NAMED]}
    return fields


def _finite(value: Any) -> Any:
    """The value without infinite figures and nan, which JSON lacks: they become strings."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class JsonLogHandler(logging.Handler):
    """Writes log records: their logger, their message and a traceback."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            fields = {"logger": record.name, "message": record.getMessage()}
            if record.exc_info and record.exc_info[0] is not None:
                fields["traceback"] = logging.Formatter().formatException(record.exc_info)
            self._lines.post(record.created, record.levelname.lower(), fields)
        except Exception:  # noqa: BLE001 - as in every handler of logging
            self.handleError(record)

    def flush(self) -> None:
        """Wait a while for what is posted: `logging` calls it at the end of the process."""
        self._lines.drain(DRAIN_SECONDS)


class JsonConsoleFile(io.TextIOBase):
    """A text file for a `rich.console.Console`: each line that is printed becomes an object."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__()
        self._lines = lines
        self._rest = ""

    def writable(self) -> bool:
        """Whether the stream can be written to: always."""
        return True

    def write(self, text: str) -> int:
        """Take some text; whole lines are written."""
        *complete, self._rest = (self._rest + text).split("\n")
        for line in complete:
            if line.strip():
                self._lines.post(time.time(), "info", {"message": in_lines(line.strip())})
        return len(text)
