"""The command ``isthmus simulate``."""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.errors import CannotContinue, UserError
from isthmus_server.commands import (
    fresh_directory,
    loaded_job,
    prepare,
    run_until_stopped,
)
from isthmus_server.observability.options import LogFormat, observed


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option(
    "--clients",
    type=click.IntRange(min=1),
    help="Devices of the population. Default: simulation.clients, or federated.clients.",
)
@click.option(
    "--cohort", type=click.IntRange(min=1), help="Updates in a round. Default: federated.cohort."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Directory of the run. Default: runs/simulate-NAME-TIME in the current folder.",
)
@click.option("--resume", is_flag=True, help="Resume the simulation in --run-dir.")
@observed
def simulate(
    job: Path | None,
    clients: int | None,
    cohort: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    log_format: LogFormat,
    quiet: bool,
    metrics: str | None,
    track: tuple[str, ...],
) -> None:
    """Train JOB with simulated devices in this process, as many as you like, in simulated time.

    The coordinator, the policy, the task and the arithmetic of secure sums and of differential
    privacy are those of a real run; only the network and the masks are left out. The job's table
    [simulation] has the devices' speed, bandwidth and dropout. Ctrl-C or SIGTERM ends it after the
    running round.
    """
    if resume:
        if run_dir is None:
            raise UserError("--resume needs --run-dir, the directory of the run to resume")
        given = {"JOB": job, "--clients": clients, "--cohort": cohort, "--set": overrides or None}
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} cannot be combined with --resume: a run keeps its job")
        if not (run_dir / "job.json").exists() and not (run_dir / "run.head").exists():
            raise UserError(f"{run_dir} contains no run to resume")
    elif job is None:
        raise UserError("give a job file, or --resume --run-dir DIR")
    if clients is not None:
        overrides += (f"simulation.clients={clients}",)
    if cohort is not None:
        overrides += (f"federated.cohort={cohort}",)
    loaded = None if job is None else loaded_job(job, overrides)
    prepare()
    from isthmus_server.observability.observers import Observers
    from isthmus_simulation.run import Simulation
    from isthmus_simulation.virtual_time import VirtualTimeLoop

    observers = Observers.of_options(log_format, quiet, metrics, track)
    if loaded is None or job is None:
        assert run_dir is not None
        simulation = Simulation.resumed(run_dir)
    else:
        directory = run_dir or fresh_directory(loaded, "simulate-")
        simulation = Simulation.new(loaded, job.resolve().parent, directory)
    again = f"isthmus simulate --resume --run-dir {simulation.directory}"
    try:
        run_until_stopped(simulation.run(observers), simulation.leave, None, VirtualTimeLoop)
    except click.Abort:
        click.echo(f"stopped; continue with  {again}", err=True)
        raise
    except CannotContinue as error:
        raise UserError(f"{error}; `{again}` continues") from error
    observers.console.print(f"report  isthmus report {simulation.directory}", soft_wrap=True)
