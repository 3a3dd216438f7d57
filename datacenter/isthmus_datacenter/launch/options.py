"""The command line options of schedulers, and what they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from isthmus.provided import make_provided
from isthmus_datacenter.launch import Launch, Launcher

_F = TypeVar("_F", bound=Callable[..., Any])


def launch_options(command: _F) -> _F:
    """Add the options `--env-file`, `--prologue`, `--option` and `--dry-run` to a command."""
    for option in (
        click.option(
            "--env-file",
            type=click.Path(exists=True, path_type=Path),
            help="File of environment variables for all processes; mode 0600.",
        ),
        click.option(
            "--prologue",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File of shell commands that come first, such as `module load cuda`.",
        ),
        click.option(
            "--option",
            "options",
            multiple=True,
            metavar="KEY=VALUE",
            help="Option of the scheduler; may be repeated.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Print the script or manifest and start nothing."
        ),
    ):
        command = option(command)
    return command


def find_launcher(scheduler: str) -> Launcher:
    """The launcher that `--scheduler` names.

    Raises:
        UserError: no installed package has one of this name, or it cannot be made.
    """
    launcher: Launcher = make_provided("isthmus.launchers", scheduler, f"--scheduler {scheduler}")
    return launcher


def start(launch: Launch, launcher: Launcher, dry_run: bool) -> None:
    """Submit a request to a scheduler, or print what would be submitted.

    Raises:
        UserError: the request is not valid, or the scheduler refuses it.
    """
    if dry_run:
        click.echo(launcher.render(launch), nl=False)
    else:
        click.echo(launcher.submit(launch))
