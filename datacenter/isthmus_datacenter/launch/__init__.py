"""Start a datacenter through a scheduler: the request, and one renderer for each scheduler.

A renderer is a pure function from `Launch` to the text that the scheduler accepts. Every node runs
an agent that connects to the control store; the first node also runs the service.
"""

from __future__ import annotations

import dataclasses
import shlex
import stat
import sys
from pathlib import Path

from isthmus.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The service and ranks to start."""

    server: str
    """host:port"""
    name: str
    ranks: int
    """Ranks on each node."""
    nodes: int
    state: Path
    """State directory, on a file system that all nodes share."""
    data: Path | None = None
    tasks: Path | None = None
    environment: Path | None = None
    """File of environment variables for service and ranks; they are written nowhere else."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the scheduler: names and values."""
    grace_seconds: float = 60.0
    """Time for a running round to end after the scheduler announced the end of the allocation."""

    def serve(self, control: str, program: tuple[str, ...] = ()) -> str:
        """The service's command line; `control` is a shell word."""
        words = [
            *(program or isthmus_program()),
            *("datacenter", "serve", "--server", self.server, "--name", self.name),
            *("--ranks", str(self.ranks), "--nodes", str(self.nodes)),
            *("--state", str(self.state), "--grace", f"{self.grace_seconds:g}"),
            *(() if self.data is None else ("--data", str(self.data))),
            *(() if self.tasks is None else ("--tasks", str(self.tasks))),
        ]
        return f"{shlex.join(words)} --control {control}"

    def agent(self, control: str, program: tuple[str, ...] = ()) -> str:
        """The command line of a node's agent."""
        words = [*(program or isthmus_program()), "datacenter", "agent"]
        return f"{shlex.join(words)} --control {control}"


def isthmus_program() -> tuple[str, ...]:
    """This installation's command, as an absolute path: a job starts in another environment."""
    return (sys.executable, "-m", "isthmus.cli")


def check_private(path: Path) -> None:
    """Refuse a file of secrets that others can read.

    Raises:
        UserError: it does not exist, or others may read it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"the environment file {path} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"the environment file {path} has mode {stat.S_IMODE(mode):o} and may hold secrets; "
            f"run `chmod 600 {path}`"
        )


def parse_options(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Parse the `KEY=VALUE` words of the command line.

    >>> parse_options(("partition=gpu", "exclusive="))
    (('partition', 'gpu'), ('exclusive', ''))
    """
    options = []
    for word in words:
        key, separator, value = word.partition("=")
        if (
            not separator
            or not key
            or not all(character.isalnum() or character == "-" for character in key)
        ):
            raise UserError(f"--option {word!r} is not of the form KEY=VALUE")
        if "\n" in value:
            raise UserError(f"--option {key} has a line break in its value")
        options.append((key, value))
    return tuple(options)
