"""``isthmus job``: look at a job before running it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from isthmus.job import job_schema, load_job
from isthmus.task import load_task


@click.group()
def job() -> None:
    """Check a job file, or print what one may contain."""


@job.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
def check(path: Path, overrides: tuple[str, ...]) -> None:
    """Validate JOB and load its task, without running anything."""
    checked = load_job(path, overrides)
    base = path.resolve().parent
    data = checked.task.data_in(base)
    task = load_task(checked.task.source, checked.task.settings, base=base, data=data)
    click.echo(
        f"{path} is fine: {checked.rounds} rounds of {type(task).__name__}, "
        f"policy {checked.strategy.policy}, {checked.federated.clients} clients, "
        f"{checked.datacenter.ranks} datacenter ranks"
    )


@job.command()
def schema() -> None:
    """Print the JSON schema of a job file."""
    click.echo(json.dumps(job_schema(), indent=2))
