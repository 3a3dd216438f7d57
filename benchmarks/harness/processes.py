"""Start programs, track all their descendants, and measure their CPU time (Linux, from /proc).

A `ProcessTree` is one or more root processes with all their descendants. Its CPU time is the sum
of its processes' own user and system time and of that of the children they have waited for. A
process that starts and ends within a round is counted once, by its parent; a zombie that has not
been waited for is counted by itself.

Limitations, all of which underestimate the CPU time:
  * a process whose parent ignores SIGCHLD, or died before it and before it was first
    listed by `ProcessTree.pids`, is not counted;
  * each process is rounded down to the kernel's tick of 10 ms;
  * a sample is not atomic: activity during the millisecond that it takes may be missed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ISTHMUS = str(Path(sys.executable).with_name("isthmus"))
"""The command of this installation."""

_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Stat:
    """The fields of /proc/PID/stat that are used here."""

    parent: int
    started: int
    """Start in ticks since boot; together with the pid it identifies a process uniquely."""
    ticks: int
    """User and system time of the process and of its waited-for children."""


class ProcessTree:
    """Root processes and all their descendants."""

    def __init__(self, *roots: int) -> None:
        self._known: dict[int, int] = {}
        """Start time by pid. A process stays in the tree when its parent ends first."""
        self.add(*roots)

    def add(self, *roots: int) -> None:
        """Add root processes."""
        for root in roots:
            stat = _stat(root)
            if stat is not None:
                self._known[root] = stat.started

    def pids(self) -> list[int]:
        """The processes that exist now, including zombies."""
        return sorted(self._stats())

    def cpu_seconds(self) -> float:
        """CPU time of the whole tree since its roots started, with the module's limitations."""
        return sum(stat.ticks for stat in self._stats().values()) * _TICK

    def kill(self) -> None:
        """Kill every process of the tree with SIGKILL."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stats(self) -> dict[int, _Stat]:
        stats = {}
        for entry in os.listdir("/proc"):  # noqa: PTH208 - faster, and only names are needed
            if entry.isdigit() and (stat := _stat(int(entry))) is not None:
                stats[int(entry)] = stat
        # Drop pids that have been reused for other processes.
        self._known = {
            pid: started
            for pid, started in self._known.items()
            if pid in stats and stats[pid].started == started
        }
        children: dict[int, list[int]] = {}
        for pid, stat in stats.items():
            children.setdefault(stat.parent, []).append(pid)
        pending = list(self._known)
        while pending:
            for child in children.get(pending.pop(), ()):
                if child not in self._known:
                    self._known[child] = stats[child].started
                    pending.append(child)
        return {pid: stats[pid] for pid in self._known}


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may itself contain some.
    fields = text.rpartition(")")[2].split()
    return _Stat(int(fields[1]), int(fields[19]), sum(int(field) for field in fields[11:15]))


def memory(pid: int, field: str) -> int:
    """A memory field of /proc/PID/status in bytes: `VmRSS` (resident) or `VmHWM` (its peak)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def reset_peak(pid: int) -> None:
    """Reset `VmHWM` to the current resident size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Program:
    """One started program: its process tree and its output."""

    def __init__(self, command: Sequence[str], popen: subprocess.Popen[bytes], log: Path) -> None:
        self.command = list(command)
        self.popen = popen
        self.log = log
        self.tree = ProcessTree(popen.pid)

    def wait(self, seconds: float) -> None:
        """Wait for it to succeed.

        Raises:
            RuntimeError: it failed or is still running; with the end of its output.
        """
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"is still running after {seconds:g} s") from None
        if code != 0:
            raise self.failure(f"ended with exit code {code}")

    def failure(self, what: str) -> RuntimeError:
        """An error that describes what happened to this program and ends with its output."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        return RuntimeError(f"`{' '.join(self.command)}` {what}; the end of its output:\n{tail}")


@contextlib.contextmanager
def started(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Iterator[Program]:
    """Run a program in a new session, its output in `log`; kill its whole tree at the end."""
    with log.open("wb") as output:
        popen = start(
            command,
            stdout=output.fileno(),
            stderr=output.fileno(),
            environment={**os.environ, **(environment or {})},
            directory=directory,
        )
    program = Program(command, popen, log)
    try:
        yield program
    finally:
        program.tree.pids()  # while parents are alive, so that no orphan is missed
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(5)
        program.tree.kill()
        popen.wait()


def start(
    command: Sequence[str],
    *,
    stdout: int,
    stderr: int,
    environment: Mapping[str, str],
    directory: Path | None,
) -> subprocess.Popen[bytes]:
    """Start a program in a new session, with its output in two open files."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=directory,
        start_new_session=True,
    )


def isthmus(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Run an `isthmus` command; returns its standard output.

    Raises:
        RuntimeError: it failed; with its output.
    """
    return output_of([ISTHMUS, *arguments], environment=environment, directory=directory)


def output_of(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Run a program to its end; returns its standard output.

    Raises:
        RuntimeError: it failed; with its output.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        popen = start(
            command,
            stdout=output.fileno(),
            stderr=errors.fileno(),
            environment={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **(environment or {})},
            directory=directory,
        )
        try:
            code = popen.wait()
        except BaseException:
            popen.kill()
            popen.wait()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if code != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{texts[1]}{texts[0]}")
    return texts[0]


def free_port() -> int:
    """A free port of the loopback interface, below those that Linux gives to connections.

    A program listens there later, and by then one of many connections could have another port.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for_port(port: int, program: Program, seconds: float) -> None:
    """Wait until the program listens.

    Raises:
        RuntimeError: it ended, or did not listen in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if program.popen.poll() is not None:
            raise program.failure(f"ended before it listened on port {port}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)  # a port can only be polled
    raise program.failure(f"does not listen on port {port} after {seconds:g} s")
