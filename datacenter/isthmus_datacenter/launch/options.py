"""The command line options of schedulers, and what they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from isthmus_datacenter.launch import Launch, kubernetes, slurm

_F = TypeVar("_F", bound=Callable[..., Any])


def launch_options(command: _F) -> _F:
    """Add the options `--env-file`, `--option` and `--dry-run` to a command."""
    for option in (
        click.option(
            "--env-file",
            type=click.Path(exists=True, path_type=Path),
            help="File of environment variables for all processes; mode 0600.",
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


def start(launch: Launch, scheduler: str, dry_run: bool) -> None:
    """Submit a request to `slurm` or `kubernetes`, or print what would be submitted.

    Raises:
        UserError: the request is not valid, or the scheduler refuses it.
    """
    renderer = slurm if scheduler == "slurm" else kubernetes
    if dry_run:
        click.echo(renderer.render(launch), nl=False)
    else:
        click.echo(f"{scheduler}: {renderer.submit(launch)}")
