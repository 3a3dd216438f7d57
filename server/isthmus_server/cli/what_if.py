"""``isthmus what-if``: what other policies would have reached in a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus_server.cli.run import opened
from isthmus_server.plan.options import PolicyNames


@click.command(name="what-if")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--replay",
    is_flag=True,
    help="Train the other policies in simulation, from the run's first model and data.",
)
@click.option(
    "--policies",
    type=PolicyNames(),
    default=(),
    metavar="A,B",
    help="Policies of --replay. Default: all others.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def what_if(run_dir: Path, replay: bool, policies: tuple[str, ...], as_json: bool) -> None:
    """Say what every other policy would have reached in the run in the directory RUN.

    By the run's log alone, with intervals of 90 %. What its rounds do not say is not guessed: a
    regime that was never trained has no forecast. With --replay the run's task is trained under
    the other policies on this machine, which takes as long as these runs, and their figures take
    the place of the forecasts.
    """
    from isthmus.task.loading import keep_process
    from isthmus_server.plan.retrained import retrained
    from isthmus_server.plan.what_if import WhatIf

    if policies and not replay:
        raise UserError("--policies names the policies of --replay; add it, or leave them out")
    with opened(run_dir) as store:
        found = WhatIf.of(store)
        if replay:
            keep_process()
            found = retrained(store, found, policies, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
        return
    for line in found.lines(shlex.quote(str(run_dir))):
        click.echo(line)
