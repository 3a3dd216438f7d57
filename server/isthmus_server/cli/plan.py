"""``isthmus plan``: whether a job fits, how long it takes, what it costs, before it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from isthmus.errors import UserError
from isthmus_server.plan.options import PlanOptions


def _asked(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that the fields of `PlanOptions` declare, in their order."""
    for each in reversed(dataclasses.fields(PlanOptions)):
        name = f"--{each.name.replace('_', '-')}"
        command = click.option(name, default=each.default, **each.metadata)(command)
    return command


@click.command()
@click.argument("job", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@_asked
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it as one HTML page that needs nothing else.",
)
def plan(
    job: Path, overrides: tuple[str, ...], as_json: bool, page: Path | None, **options: Any
) -> None:
    """Say what JOB needs and costs, how long it takes, and whose privacy it spends.

    Each figure has its unit and how it was obtained. Nothing is trained, but for some steps with
    --measure and simulated rounds with --trial, and nobody is asked. A job that cannot run is
    refused as by `isthmus job check`, which also trains a batch.
    """
    from isthmus.task.loading import keep_process
    from isthmus_server.plan.plan import plan_of

    if as_json and page is not None:
        raise UserError("give --json or --html, and run the command again for the other")
    if page is not None and not page.absolute().parent.is_dir():
        raise UserError(f"--html {page} cannot be written: {page.parent} is not a directory")
    keep_process()
    planned = plan_of(job, overrides, PlanOptions(**options))
    if as_json:
        click.echo(json.dumps(planned.to_json(), indent=2))
    elif page is not None:
        page.write_text(planned.html(), encoding="utf-8")
        click.echo(f"the plan is in {page}")
    else:
        for line in planned.lines():
            click.echo(line)
