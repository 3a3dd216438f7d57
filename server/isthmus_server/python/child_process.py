"""`isthmus run` or `isthmus simulate` as a child process, while a script or a notebook goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

IN_RUN = "ISTHMUS_IN_RUN"
"""Set in the processes of such a run."""

_LAST_LINES = 20


class RunProcess:
    """A process of the command, and its output.

    If this process ends first, the run goes on without output.
    """

    def __init__(
        self, command: str, arguments: Sequence[str], on_line: Callable[[str], None]
    ) -> None:
        """Start it.

        Args:
            command: `run` or `simulate`.
            arguments: of the command.
            on_line: called with each line that it prints, in another thread.
        """
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._on_line = on_line
        self._failure: BaseException | None = None
        self.stopped = False
        """Whether it was asked to end."""
        # In a notebook these have rich write to a pipe as to a terminal.
        forced = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
        environment = {key: value for key, value in os.environ.items() if key not in forced}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "isthmus", command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, IN_RUN: "1", "FLWR_TELEMETRY_ENABLED": "0"},
            start_new_session=True,  # an interrupt of this process does not reach it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._child.poll() is None

    def stop(self) -> None:
        """Ask it to end after the running round."""
        self.stopped = True
        if self.running:
            self._child.send_signal(signal.SIGTERM)

    def wait(self) -> tuple[int, str]:
        """Wait until it ends; returns its exit status and the last line that it printed.

        Raises:
            BaseException: what `on_line` has raised, after which the run was asked to end.
        """
        self._reader.join()
        status = self._child.wait()
        if self._failure is not None:
            raise self._failure
        return status, next((line for line in reversed(self._lines) if line), "")

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as output:
            for line in output:
                self._lines.append(line.rstrip("\n"))
                try:
                    if self._failure is None:
                        self._on_line(line.rstrip("\n"))
                except BaseException as error:  # noqa: BLE001 - raised again by `wait`
                    self._failure = error
                    self.stop()
