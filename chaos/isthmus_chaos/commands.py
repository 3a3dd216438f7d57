"""The command ``isthmus chaos``."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import UserError
from isthmus.job.schema import load_job, with_changes

if TYPE_CHECKING:
    from isthmus_chaos.crash_sweep import SweepReport
    from isthmus_chaos.network_sweep import NetworkReport
    from isthmus_chaos.session import ChaosReport


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the plan of faults.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Duration of the faults; the job without faults and its end are additional.",
)
@click.option("--clients", type=click.IntRange(0, 64), help="Devices. Default: as in the job.")
@click.option(
    "--datacenters",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Datacenters with datacenter.ranks ranks each, if the job has any.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job."
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="New directory for the deployment, which is kept. Default: a temporary one, which is "
    "kept if an invariant was violated.",
)
@click.option(
    "--crash-sweep",
    is_flag=True,
    help="Instead of a plan: kill each process before and after each of its durable steps.",
)
@click.option(
    "--network",
    is_flag=True,
    help="Instead of a plan: put devices behind two aggregators, a standby and a mirror, and kill, "
    "stop or cut off each of these in a round of each kind.",
)
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --crash-sweep or --network: only N of the crashes or faults, drawn with the seed.",
)
@click.option("--plan", "only_plan", is_flag=True, help="Print the plan and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def chaos(
    job: Path,
    seed: int,
    minutes: float,
    clients: int | None,
    datacenters: int,
    overrides: tuple[str, ...],
    state: Path | None,
    crash_sweep: bool,
    network: bool,
    sample: int | None,
    only_plan: bool,
    as_json: bool,
) -> None:
    """Run JOB in a real deployment on this machine under faults, and check what must hold.

    The exit status is 0 if every invariant holds and the job ends after the last fault.
    """
    from isthmus_chaos import worker
    from isthmus_chaos.network_plan import AGGREGATORS, faults_of, rounds_with_aggregators
    from isthmus_chaos.plan import TRUSTED, make_plan

    loaded = load_job(job, overrides)
    if crash_sweep and network:
        raise UserError("--crash-sweep and --network are two commands; give one of them")
    if sample is not None and not (crash_sweep or network):
        raise UserError("--sample needs --crash-sweep or --network")
    if clients is not None:
        loaded = with_changes(loaded, {"federated.clients": clients})
    if network:
        loaded = rounds_with_aggregators(loaded)
    ranks = loaded.datacenter.ranks
    clusters = datacenters if ranks else 0
    faults = make_plan(seed, minutes, loaded.federated.clients, clusters, ranks)
    if only_plan:
        swept = faults_of(seed, sample) if network else []
        if as_json:
            planned = [dataclasses.asdict(fault) for fault in swept or faults]
            click.echo(json.dumps(planned, indent=1))
        elif network:
            click.echo("\n".join(map(str, swept)))
        else:
            for fault in faults:
                click.echo(f"{fault.at:6.1f} s  {fault.describe()}")
        return
    directory = state or Path(tempfile.mkdtemp(prefix="isthmus-chaos-"))
    if network:
        # Devices read it when they dial the mirror, which is after the deployment has written it.
        os.environ["SSL_CERT_FILE"] = str((directory / TRUSTED).absolute())
    worker.install()  # before PyTorch and the rest of the product are imported
    from isthmus_server.cli.run import run_until_stopped
    from isthmus_server.runs.local.fork_server import ParticipantForkServer

    with ParticipantForkServer.fork(ranks=ranks > 0, program=worker.run) as fork_server:
        from isthmus_chaos.crash_sweep import CrashSweep
        from isthmus_chaos.deployment import ChaosDeployment
        from isthmus_chaos.network_sweep import NetworkSweep
        from isthmus_chaos.session import ChaosSession

        base = job.resolve().parent
        aggregators = AGGREGATORS if network else 0
        deployment = ChaosDeployment(loaded, base, directory, fork_server, datacenters, aggregators)
        say = (lambda _: None) if as_json else click.echo
        session: ChaosSession | CrashSweep | NetworkSweep = ChaosSession(deployment, faults, say)
        if crash_sweep:
            session = CrashSweep(deployment, say, seed=seed, sample=sample)
        elif network:
            session = NetworkSweep(deployment, say, seed=seed, faults=faults_of(seed, sample))
        report: ChaosReport | SweepReport | NetworkReport = run_until_stopped(session.run())
    kept = state is not None or bool(report.violations)
    if not kept:
        shutil.rmtree(directory, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        click.echo(report.summary())
        if kept:
            click.echo(f"the deployment is in {directory}")
    if report.violations:
        sys.exit(1)
