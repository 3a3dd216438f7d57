"""Start a group of nodes through a scheduler: the request, and one launcher for each scheduler.

A launcher renders a `Launch` as the text that its scheduler accepts, and submits it. Launchers are
entry points of the group `isthmus.launchers`, so an installed package can add one for another
scheduler. What the nodes run is the request's own: a datacenter's is in
`isthmus_datacenter.launch.datacenter`.
"""

from __future__ import annotations

import abc
import dataclasses
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar, Protocol

from isthmus.errors import UserError, cause_of

RESTARTS = 100
"""How often the nodes of a group are started again, where the launcher counts."""
SHUTDOWN_SECONDS = 30
"""Time after the grace period for links to be closed and the ranks to end."""


@dataclasses.dataclass(frozen=True)
class NodeShell:
    """The shell in which a scheduler starts the commands of a node."""

    control: str
    """The first node's address, host:port, at which the others meet it: a shell word."""
    number: str
    """Environment variable that each node's command gets, with the number of its node."""
    isthmus: tuple[str, ...] = (sys.executable, "-m", "isthmus.cli")
    """By default this installation as an absolute path: a job starts in another environment."""
    torchrun: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(abc.ABC):
    """The nodes to start, and what they run."""

    name: str
    ranks: int
    """Ranks on each node."""
    nodes: int
    state: Path
    """Directory on a file system that all nodes share."""
    environment: Path | None = None
    """File of environment variables for all processes; they are written nowhere else."""
    prologue: Path | None = None
    """File of shell commands that come before those of Isthmus, such as `module load cuda`."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the scheduler: names and values; a name can be there several times."""
    grace_seconds: float = 60.0
    """Time for a running round to end after the scheduler announced the end of the allocation."""
    title: ClassVar[str]
    """What the names of jobs and pods begin with."""
    named_by: ClassVar[str]
    """The option that `name` is from."""
    kept_by: ClassVar[str]
    """The option that `state` is from."""
    grace_by: ClassVar[str | None] = None
    """The option that `grace_seconds` are from."""
    secrets: ClassVar[tuple[str, ...]] = ()
    """Environment variables of the nodes, each with the same random secret on all of them."""

    @property
    def claimed(self) -> Path:
        """Directory in which a pod mounts the claim, unless an option names one."""
        return self.state

    @abc.abstractmethod
    def each(self, shell: NodeShell) -> str:
        """The command line of every node."""

    def first(self, shell: NodeShell) -> str | None:
        """The command that the first node also runs, with which the group ends; None for none."""
        return None


class Launcher(Protocol):
    """What an entry point of the group `isthmus.launchers` makes, without arguments."""

    shares_files: bool
    """Whether its nodes have the files of this machine, under the same paths."""

    def render(self, launch: Launch) -> str:
        """The text that the scheduler accepts, without a side effect: what `--dry-run` prints.

        Raises:
            UserError: the request or an option is not valid for this scheduler.
        """

    def submit(self, launch: Launch) -> str:
        """Hand the request to the scheduler; returns one line that says what was submitted.

        Raises:
            UserError: the request is not valid, or the scheduler is missing or refuses it.
        """


def waiting(process: str, signals: str, sent: str) -> list[str]:
    """Lines of a script: wait for the process in a variable, and send it `sent` on `signals`.

    Its exit status is in `$status` then.
    """
    return [
        f'trap "kill -{sent} ${process} 2>/dev/null || true" {signals}',
        "status=0",
        f'wait "${process}" || status=$?',
        "# A signal also ends `wait`, but not yet the process.",
        f'while kill -0 "${process}" 2>/dev/null; do',
        f'  status=0; wait "${process}" || status=$?',
        "done",
    ]


def check_printable(launch: Launch) -> None:
    """Refuse what would begin a new line in the script, or what nobody sees in it.

    Raises:
        UserError: a value of the request has a character that is not printable.
    """
    for field in dataclasses.fields(launch):
        for text in _texts(getattr(launch, field.name)):
            if not text.isprintable():
                raise UserError(
                    f"{text!r} would be in the script that the nodes run, and has a line break or "
                    "another character that is not printable; remove it, or choose another name"
                )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _texts(each)
    else:
        yield str(value)


def check_private(path: Path) -> None:
    """Refuse a file of secrets that others can read.

    Raises:
        UserError: it does not exist, or others may read it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"the environment file {path} cannot be read: {cause_of(error)}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"the environment file {path} has mode {stat.S_IMODE(mode):o} and may hold secrets; "
            f"run `chmod 600 {path}`"
        )


def read_prologue(path: Path) -> str:
    """The commands of a prologue.

    Raises:
        UserError: it cannot be read, or has a character that nobody sees in a script.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prologue {path} cannot be read: {cause_of(error)}") from error
    if not all(character.isprintable() or character in "\n\t" for character in text):
        raise UserError(f"--prologue {path} has a character that is not printable; remove it")
    return text


def parse_options(words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Parse the `KEY=VALUE` words of the command line.

    >>> parse_options(("partition=gpu", "exclusive="))
    (('partition', 'gpu'), ('exclusive', ''))
    """
    options: list[tuple[str, str]] = []
    for word in words:
        key, separator, value = word.partition("=")
        if (
            not separator
            or not key
            or not all(character.isalnum() or character == "-" for character in key)
        ):
            raise UserError(f"--option {word!r} is not of the form KEY=VALUE")
        if key.startswith("-"):
            raise UserError(
                f"--option {word!r} begins with a dash; write the name of the option without it"
            )
        if not value.isprintable():
            raise UserError(
                f"--option {key} has a line break or another unprintable character in its value"
            )
        options.append((key, value))
    return tuple(options)


def single_options(launch: Launch, repeatable: Collection[str] = ()) -> dict[str, str]:
    """The values of the options that can be given once.

    Args:
        launch: the request.
        repeatable: options that are left out, since they can have several values.

    Raises:
        UserError: one of the others is given twice.
    """
    values: dict[str, str] = {}
    for key, value in launch.options:
        if key in repeatable:
            continue
        if key in values:
            raise UserError(f"--option {key} is given twice; remove one of them")
        values[key] = value
    return values
