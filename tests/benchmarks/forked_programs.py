"""Programs of the benchmarks, forked from a process that has imported PyTorch and this project."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from harness import processes
from harness.processes import ISTHMUS
from tests import forked

from isthmus.system.process import die_with_parent

_begin = processes.start
"""For programs that are not of this project."""


class ForkedProgram:
    """What the benchmarks use of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], outputs: list[int], *rest: object) -> None:
        ends = [Connection(os.dup(output), readable=False) for output in outputs]
        self._process = forked.context().Process(target=_become, args=(command, ends, *rest))
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def start(
    command: Sequence[str],
    *,
    stdout: int,
    stderr: int,
    environment: Mapping[str, str],
    directory: Path | None,
) -> ForkedProgram | subprocess.Popen[bytes]:
    """Start a program as `harness.processes.start` does."""
    if command[0] not in (ISTHMUS, sys.executable):
        return _begin(
            command, stdout=stdout, stderr=stderr, environment=environment, directory=directory
        )
    folder = directory or Path.cwd()
    return ForkedProgram(command, [stdout, stderr], dict(environment), folder)


def _become(
    command: Sequence[str], outputs: list[Connection], environment: dict[str, str], folder: Path
) -> None:
    gc.freeze()
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  open until the end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  open until the end
    program, *arguments = command
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if program == ISTHMUS:
        from isthmus import cli

        sys.argv = ["isthmus", *arguments]
        cli.main()
    else:
        assert program == sys.executable, command
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
