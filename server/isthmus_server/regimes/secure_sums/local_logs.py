"""The logs of devices that `isthmus run` has started: they say what devices withhold.

With secure aggregation a device tells the server nothing about a failure of its task. If the same
person started server and devices, in one command, the devices' logs are next to the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from isthmus.printable import in_a_line

_MOST_BYTES = 1 << 16
"""Bytes that are read of the end of one log."""
_TASK_ERROR = re.compile(rb" ERROR [^:]+, because of its task: (.+)$", re.MULTILINE)
"""A device's own line about a task's failure; what the task prints has another level."""


class LocalLogs:
    """What some devices log during an attempt; nothing for devices without a log here."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        """Remember where the logs of the named devices end now."""
        files = {name: directory / f"{name}.log" for name in names} if directory.is_dir() else {}
        self._ends = {
            name: (file, file.stat().st_size) for name, file in files.items() if file.is_file()
        }

    def task_failures(self) -> dict[str, str]:
        """How the task of each device failed since, and in which log, by the device's name."""
        reasons = {}
        for name, (file, start) in self._ends.items():
            with file.open("rb") as log:
                log.seek(max(start, file.stat().st_size - _MOST_BYTES))
                errors = _TASK_ERROR.findall(log.read(_MOST_BYTES))
            if errors:
                error = in_a_line(errors[-1].decode(errors="replace"))
                reasons[name] = f"{error}; {file} has the traceback"
        return reasons
