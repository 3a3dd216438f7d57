"""The command ``isthmus simulate``."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import click

from isthmus.cli import show
from isthmus.errors import CannotContinue, UserError
from isthmus.job import Job, apply_override
from isthmus.system.process import die_with_parent
from isthmus_datacenter.launch import Launcher, check_private, parse_options
from isthmus_datacenter.launch.options import find_launcher, launch_options, start
from isthmus_server.cli.compare import (
    check_writable,
    parse_variations,
    public_data_option,
    refuse_seed,
    results_option,
    run_comparison,
    vary_option,
)
from isthmus_server.cli.run import (
    fresh_directory,
    loaded_job,
    prepare,
    run_until_stopped,
)
from isthmus_server.observability.options import LogFormat, observed
from isthmus_server.runs.local.variations import combinations
from isthmus_simulation.cluster_launch import SimulationLaunch, check_here, path_of_pods
from isthmus_simulation.rank_place import RankPlace


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
@click.option(
    "--or-resume", is_flag=True, help="If --run-dir has this simulation already, resume it."
)
@vary_option
@public_data_option
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help="Runs of each variant, with seeds 1, 2, ... Default: one run, with the job's seed.",
)
@results_option
@click.option(
    "--scheduler",
    metavar="NAME",
    help="Start ranks on the machines of a cluster through slurm, kubernetes, ray, or the "
    "scheduler of an installed package.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 1024),
    help="Number of machines, with a scheduler. Default: 1.",
)
@click.option(
    "--ranks", type=click.IntRange(1, 1024), help="Ranks on each machine, with a scheduler."
)
@launch_options
@observed
def simulate(
    job: Path | None,
    clients: int | None,
    cohort: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    or_resume: bool,
    vary: tuple[str, ...],
    public_data: bool,
    seeds: int | None,
    json_file: Path | None,
    scheduler: str | None,
    nodes: int | None,
    ranks: int | None,
    env_file: Path | None,
    prologue: Path | None,
    options: tuple[str, ...],
    dry_run: bool,
    log_format: LogFormat,
    quiet: bool,
    metrics: str | None,
    track: tuple[str, ...],
) -> None:
    """Train JOB with simulated devices on this machine, as many as you like, in simulated time.

    The coordinator, the policy, the task and the arithmetic of secure sums and of differential
    privacy are those of a real run; only the network and the masks are left out. The job's table
    [simulation] has the devices' speed, bandwidth and dropout. Ctrl-C or SIGTERM ends it after the
    running round. Under torchrun each rank trains a part of the devices. With --scheduler the
    machines of a cluster run torchrun, and continue the run if --run-dir has it already.

    With --vary or --seeds there is a run for each combination of values and each seed, one after
    the other, a table of the results, and a page with their curves. The same command with its
    --run-dir continues.
    """
    is_sweep = bool(vary) or seeds is not None
    if is_sweep:
        of_one_run = {
            "--resume": resume,
            "--or-resume": or_resume,
            "--scheduler": scheduler,
            "--log-format": log_format != "text",
            "--quiet": quiet,
            "--metrics": metrics,
            "--track": track,
        }
        for name, is_given in of_one_run.items():
            if is_given:
                raise UserError(f"{name} is for one run; remove it, or --vary and --seeds")
    elif json_file is not None:
        raise UserError(
            "--json has the results of --vary or --seeds; `isthmus report --json` those of one run"
        )
    elif public_data:
        raise UserError("--public-data is for --vary or --seeds: one run has its own budget anyway")
    if resume:
        if run_dir is None:
            raise UserError("--resume needs --run-dir, the directory of the run to resume")
        given = {"JOB": job, "--clients": clients, "--cohort": cohort, "--set": overrides or None}
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} cannot be combined with --resume: a run keeps its job")
        for name, is_given in {"--or-resume": or_resume, "--scheduler": scheduler}.items():
            if is_given:
                raise UserError(
                    f"{name} cannot be combined with --resume: it continues the run in --run-dir "
                    "when JOB and the options are the same"
                )
        if not (run_dir / "job.json").exists() and not (run_dir / "run.head").exists():
            raise UserError(f"{run_dir} contains no run to resume")
    elif job is None:
        raise UserError("give a job file, or --resume --run-dir DIR")
    if or_resume and run_dir is None:
        raise UserError("--or-resume needs --run-dir, the directory of the run")
    own_options = _own_options(clients, cohort, overrides, log_format, quiet, metrics, track)
    if clients is not None:
        overrides += (f"simulation.clients={clients}",)
    if cohort is not None:
        overrides += (f"federated.cohort={cohort}",)
    of_nodes = {
        "--nodes": nodes,
        "--ranks": ranks,
        "--env-file": env_file,
        "--prologue": prologue,
        "--option": options,
        "--dry-run": dry_run,
    }
    if scheduler is not None:
        assert job is not None
        launcher = find_launcher(scheduler)
        request = _request(job, overrides, own_options, run_dir, launcher, of_nodes)
        start(request, launcher, dry_run)
        return
    for name, given_value in of_nodes.items():
        if given_value:
            raise UserError(f"{name} needs --scheduler slurm, kubernetes or ray")
    place = RankPlace.of()
    if place is not None:
        if is_sweep:
            raise UserError("ranks simulate one run; remove --vary and --seeds, or torchrun")
        die_with_parent()  # torchrun
    if seeds is not None:
        refuse_seed(overrides)
    loaded = None if job is None else loaded_job(job, overrides)
    prepare()
    if is_sweep:
        assert loaded is not None
        assert job is not None
        _sweep(loaded, job.resolve().parent, run_dir, vary, seeds, json_file, public_data)
        return
    from isthmus_server.observability.observers import Observers
    from isthmus_simulation.run import Simulation
    from isthmus_simulation.virtual_time import VirtualTimeLoop

    with contextlib.ExitStack() as stack:
        crew = None
        if place is not None:
            from isthmus_simulation.rank_crew import crew_or_train

            crew = crew_or_train(place, loaded, job, run_dir)
            stack.callback(crew.close)
        observers = Observers.of_options(log_format, quiet, metrics, track)
        if loaded is None or job is None:
            assert run_dir is not None
            simulation = Simulation.resumed(run_dir, crew)
        else:
            directory = run_dir or fresh_directory(loaded, "simulate-")
            create = Simulation.new_or_resumed if or_resume else Simulation.new
            simulation = create(loaded, job.resolve().parent, directory, crew)
        quoted = shlex.quote(str(simulation.directory))
        again = f"isthmus simulate --resume --run-dir {quoted}"

        async def simulated() -> int:
            try:
                await simulation.run(observers)
            except CannotContinue as error:
                # While the loop handles signals: torchrun ends all ranks when one has ended, and
                # the default action would end this process before it has said which.
                return show(error, f"; `{again}` continues")
            return 0

        try:
            code = run_until_stopped(simulated(), simulation.leave, None, VirtualTimeLoop)
        except click.Abort:
            click.echo(f"stopped; continue with  {again}", err=True)
            raise
        if not code and crew is not None:
            crew.end()
    if code:
        raise click.exceptions.Exit(code)
    observers.console.print(f"report  isthmus report {quoted}", soft_wrap=True)


def _own_options(
    clients: int | None,
    cohort: int | None,
    overrides: tuple[str, ...],
    log_format: LogFormat,
    quiet: bool,
    metrics: str | None,
    track: tuple[str, ...],
) -> tuple[str, ...]:
    """The options of a simulation as they were given, for the command that nodes run."""
    return (
        *(() if clients is None else ("--clients", str(clients))),
        *(() if cohort is None else ("--cohort", str(cohort))),
        *(word for each in overrides for word in ("--set", each)),
        *(() if log_format == "text" else ("--log-format", log_format)),
        *(("--quiet",) if quiet else ()),
        *(() if metrics is None else ("--metrics", metrics)),
        *(word for each in track for word in ("--track", each)),
    )


def _request(
    job: Path,
    overrides: tuple[str, ...],
    own_options: tuple[str, ...],
    run_dir: Path | None,
    launcher: Launcher,
    of_nodes: dict[str, Any],
) -> SimulationLaunch:
    """What a scheduler is asked for.

    Raises:
        UserError: an option is missing, or the job cannot be simulated by ranks.
    """
    if run_dir is None:
        raise UserError("--scheduler needs --run-dir, on a file system that all machines share")
    if of_nodes["--ranks"] is None:
        raise UserError("--scheduler needs --ranks, the ranks on each machine")
    if not run_dir.resolve().name:
        raise UserError(f"--run-dir {run_dir} is no directory of a run; name one below it")
    if launcher.shares_files:
        check_here(loaded_job(job, overrides))
        job = job.resolve()
        run_dir = run_dir.resolve()
    else:
        job = path_of_pods("JOB", job)
        run_dir = path_of_pods("--run-dir", run_dir)
        changes: dict[str, Any] = {}
        for each in overrides:  # the job itself need not be on this machine
            apply_override(changes, each)
    environment: Path | None = of_nodes["--env-file"]
    if environment is not None:
        check_private(environment)
        environment = environment.resolve()
    prologue: Path | None = of_nodes["--prologue"]
    return SimulationLaunch(
        name=run_dir.name,
        ranks=of_nodes["--ranks"],
        nodes=of_nodes["--nodes"] or 1,
        state=run_dir,
        environment=environment,
        prologue=None if prologue is None else prologue.resolve(),
        options=parse_options(of_nodes["--option"]),
        arguments=(str(job), *own_options),
    )


def _sweep(
    job: Job,
    base: Path,
    run_dir: Path | None,
    vary: tuple[str, ...],
    seeds: int | None,
    json_file: Path | None,
    public_data: bool,
) -> None:
    """Simulate every combination of values with each seed."""
    from isthmus_server.runs.local.compare import JobComparison
    from isthmus_simulation.compared_runs import SimulatedRuns
    from isthmus_simulation.virtual_time import VirtualTimeLoop

    variants = combinations(parse_variations(vary))
    directory = run_dir or fresh_directory(job, "simulate-")
    check_writable(directory, json_file)
    numbers = [job.seed] if seeds is None else range(1, seeds + 1)
    comparison = JobComparison(
        job, base, directory, variants, numbers, SimulatedRuns(), public_data=public_data
    )
    run_comparison(comparison, json_file, None, VirtualTimeLoop)
