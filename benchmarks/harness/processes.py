"""Start programs, know all their descendants, and count what they cost (Linux, from /proc).

How CPU time is counted: a `Tree` is one or more root processes with everybody they started.
Its CPU time is the sum, over its processes, of their own user and system time and of that of the
children they have waited for; so a process that comes and goes within a round is counted once, by
its parent, and a zombie nobody has waited for yet is counted by itself.

Blind spots, all of which make a tree look cheaper than it was:
  * a process whose parent ignores SIGCHLD, or died before it and before it was ever seen by
    `Tree.pids`, is not counted;
  * each process is rounded down to the kernel's tick of 10 ms;
  * a sample is not atomic: what happens during the millisecond it takes may be missed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Stat:
    """The few fields of /proc/PID/stat that are used here."""

    parent: int
    started: int
    """Ticks since boot: with the pid, the name of a process that is never used again."""
    ticks: int
    """Own and waited-for children's, user and system."""


class Tree:
    """Root processes and all their descendants."""

    def __init__(self, *roots: int) -> None:
        self._known: dict[int, int] = {}
        """Started by pid: a process seen once stays in the tree when its parent dies first."""
        self.add(*roots)

    def add(self, *roots: int) -> None:
        """Count these processes in, too."""
        for root in roots:
            stat = _stat(root)
            if stat is not None:
                self._known[root] = stat.started

    def pids(self) -> list[int]:
        """The processes that are there now, zombies included."""
        return sorted(self._stats())

    def cpu_seconds(self) -> float:
        """CPU time of the whole tree since its roots started; see the module on what it misses."""
        return sum(stat.ticks for stat in self._stats().values()) * _TICK

    def kill(self) -> None:
        """End every process of the tree, the hard way."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stats(self) -> dict[int, _Stat]:
        everybody = {}
        for entry in os.listdir("/proc"):  # noqa: PTH208 - only names are wanted, and quickly
            if entry.isdigit() and (stat := _stat(int(entry))) is not None:
                everybody[int(entry)] = stat
        # A pid that was given to a stranger meanwhile is not ours any more.
        self._known = {
            pid: started
            for pid, started in self._known.items()
            if pid in everybody and everybody[pid].started == started
        }
        children: dict[int, list[int]] = {}
        for pid, stat in everybody.items():
            children.setdefault(stat.parent, []).append(pid)
        waiting = list(self._known)
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in self._known:
                    self._known[child] = everybody[child].started
                    waiting.append(child)
        return {pid: everybody[pid] for pid in self._known}


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may itself hold any of them.
    fields = text.rpartition(")")[2].split()
    return _Stat(int(fields[1]), int(fields[19]), sum(int(field) for field in fields[11:15]))


def memory(pid: int, field: str) -> int:
    """Bytes of a process by a name of /proc/PID/status: `VmRSS` now, `VmHWM` at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def reset_peak(pid: int) -> None:
    """Make `VmHWM` start again from what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Program:
    """One started program: its tree, and what it printed."""

    def __init__(self, command: Sequence[str], popen: subprocess.Popen[bytes], log: Path) -> None:
        self.command = list(command)
        self.popen = popen
        self.log = log
        self.tree = Tree(popen.pid)

    def wait(self, seconds: float) -> None:
        """Wait for it to end well.

        Raises:
            RuntimeError: it failed or is still running, with the end of what it printed.
        """
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"is still running after {seconds:g} s") from None
        if code != 0:
            raise self.failure(f"ended with exit code {code}")

    def failure(self, what: str) -> RuntimeError:
        """An error that says what happened to this program and shows the end of its output."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        return RuntimeError(f"`{' '.join(self.command)}` {what}; its last words:\n{tail}")


@contextlib.contextmanager
def started(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Iterator[Program]:
    """Run a program in a session of its own, its output in `log`; nobody outlives the block."""
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=directory,
            start_new_session=True,
        )
    program = Program(command, popen, log)
    try:
        yield program
    finally:
        program.tree.pids()  # while parents are alive, so that nobody is orphaned unseen
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(5)
        program.tree.kill()
        popen.wait()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, program: Program, seconds: float) -> None:
    """Wait until the program listens.

    Raises:
        RuntimeError: it ended, or does not listen in time.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if program.popen.poll() is not None:
            raise program.failure(f"ended before it listened on port {port}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise program.failure(f"does not listen on port {port} after {seconds:g} s")
