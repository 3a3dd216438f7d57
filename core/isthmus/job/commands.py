"""``isthmus job``: validate job files and print their schema."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click

from isthmus.errors import UserError
from isthmus.extras import install_line
from isthmus.job.apps import registered
from isthmus.job.promises import NOTHING, level_of, needs_of
from isthmus.job.schema import Job, job_schema, load_job
from isthmus.job.unused_layout import unused_layout
from isthmus.task.loading import keep_process, load_task

CHECKS = "isthmus.checks"
"""Entry points of further checks: functions of the job, its task and the job file's folder that
raise errors and return what they tried, or an empty text. The module of one may have functions
`memory` and `collectives` too, of job, task, folder, number of ranks and whether they are GPUs,
which return the lines of `--memory` and `--collectives`."""

APP_CHECKS = "isthmus.app_checks"
"""Entry points of functions of a job with apps, and the job file's folder, that load the apps; see
`isthmus.job.apps`."""


@click.group()
def job() -> None:
    """Check a job file, or print its schema."""


@job.command()
@click.argument("path", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option(
    "--memory",
    is_flag=True,
    help="Print what the datacenter's layout takes of each rank's memory, and check nothing else.",
)
@click.option(
    "--collectives",
    is_flag=True,
    help="Compare what the ranks send each other in a step, without them, and check nothing else.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1 << 20),
    help="With --memory or --collectives: the number of ranks, which need not be here. Default: "
    "datacenter.ranks.",
)
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    help="With --memory or --collectives: what the ranks are. Default: gpu.",
)
def check(
    path: Path,
    overrides: tuple[str, ...],
    memory: bool,
    collectives: bool,
    ranks: int | None,
    device: str | None,
) -> None:
    """Validate JOB, load its task, and train and evaluate one batch of each side's data.

    Tried is what `isthmus run` starts on this machine: the first client, and the datacenter with
    the whole model on one rank. The first client of a job that starts none is that of its
    simulation, if it has one.
    """
    asked = {"memory": memory, "collectives": collectives}
    reports = [name for name, is_asked in asked.items() if is_asked]
    if not reports and (ranks is not None or device is not None):
        raise UserError(
            "--ranks and --device are about --memory and --collectives; add one, or leave them out"
        )
    checked = load_job(path, overrides)
    base = path.resolve().parent
    federated = checked.federated
    if federated.server_app is not None:
        registered(APP_CHECKS, federated)(checked, base)
        click.echo(
            f"{path} is fine: the ServerApp {federated.server_app} and {federated.clients} "
            f"clients with the ClientApp {federated.app}"
        )
        _show_promises(checked)
        return
    data = checked.task.data_in(base)
    keep_process()
    task = load_task(checked.task.source, checked.task.settings, base=base, data=data)
    if federated.app is not None and federated.clients:
        registered(APP_CHECKS, federated)(checked, base)
    points = sorted(entry_points(group=CHECKS), key=lambda point: point.name, reverse=True)
    if reports:
        number = ranks or checked.datacenter.ranks
        for name in reports:
            _show_report(name, points, checked, task, base, number, on_gpus=device != "cpu")
        return
    tried = [point.load()(checked, task, base) for point in points]
    clients = f"{checked.federated.clients} clients"
    if not checked.federated.clients and checked.simulation.clients is not None:
        clients = f"{checked.simulation.clients} simulated clients"
    click.echo(
        f"{path} is fine: {checked.rounds} rounds of {type(task).__name__}, "
        f"policy {checked.strategy.policy}, {clients}, "
        f"{checked.datacenter.ranks} datacenter ranks\n"
        f"tried   {', '.join(filter(None, tried))}"
    )
    _show_promises(checked)
    left_out = ", ".join(task.not_carried_over)
    if left_out:
        left_out = f"not carried over, and nothing of what is trained depends on it: {left_out}"
    for note in filter(None, (_unlearned(checked), unused_layout(checked), left_out)):
        click.echo(f"note    {note}")


def _show_report(
    name: str,
    points: Iterable[EntryPoint],
    checked: Job,
    task: Any,
    base: Path,
    ranks: int,
    *,
    on_gpus: bool,
) -> None:
    """Print what a package reports of ranks: `memory` or `collectives`.

    Raises:
        UserError: there are no ranks, or nothing here knows of them.
    """
    if not ranks:
        raise UserError(f"--{name} needs a number of ranks, and datacenter.ranks=0; give --ranks")
    for point in points:
        report = getattr(importlib.import_module(point.module), name, None)
        if report is not None:
            lines = report(checked, task, base, ranks, on_gpus)
            width = len(name) + 2
            click.echo(name + "  " + f"\n{' ' * width}".join(lines))
            return
    raise UserError(f"--{name} needs the package of the datacenter; {install_line('datacenter')}")


def _show_promises(checked: Job) -> None:
    """Print the level of protection, and what the job needs of owners."""
    if level := level_of(checked):
        click.echo(f"level   {level.sentence}")
        if level.name != NOTHING:
            click.echo(
                "        on a server; of `isthmus run` and `isthmus simulate` nothing is claimed, "
                "as their devices are processes of your own user"
            )
    if needs := needs_of(checked):
        click.echo(f"owners  need in policy.toml: {', '.join(needs)}")


def _unlearned(checked: Job) -> str:
    """Says that a part of the target is in the data of a datacenter that nobody starts.

    Empty if not, and for a job that starts nobody: its participants join a server. Other policies
    either ignore the share or refuse a job without datacenter.
    """
    share = checked.strategy.target_edge_share
    clients = checked.federated.clients
    starts = bool(clients or checked.simulation.clients) and not checked.datacenter.ranks
    if checked.strategy.policy != "adaptive" or not 0 < share < 1 or not starts:
        return ""
    return (
        f"strategy.target_edge_share={share:g} leaves {1 - share:.3g} of the target to the data of "
        "a datacenter, and datacenter.ranks=0 starts none: that part is not learned; raise "
        "datacenter.ranks, or set strategy.target_edge_share=1"
    )


@job.command()
def schema() -> None:
    """Print the JSON schema of a job file."""
    click.echo(json.dumps(job_schema(), indent=2))
