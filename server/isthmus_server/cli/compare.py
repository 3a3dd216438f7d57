"""The command ``isthmus compare``, and what it has in common with sweeps of simulations."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_server.cli.run import (
    GRACE_SECONDS,
    fresh_directory,
    loaded_job,
    prepare,
    run_until_stopped,
)
from isthmus_server.runs.local.variations import Variation, combinations, parse_variation

if TYPE_CHECKING:
    from isthmus_server.runs.local.compare import JobComparison

_WHOLE_LINES = 100_000
"""Width of a console that wraps nothing."""

vary_option = click.option(
    "--vary",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="Values of a key of the job to compare; given several times, all combinations.",
)
public_data_option = click.option(
    "--public-data",
    is_flag=True,
    help="The data are nobody's: each run has a privacy budget of its own.",
)
results_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the results to this file."
)


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Directory of the runs. Default: runs/compare-NAME-TIME in the current folder.",
)
@click.option(
    "--policies",
    show_default="datacenter,federated; none with --vary",
    help="Policies to compare with the job's own, at the job's budget if it has one.",
)
@vary_option
@public_data_option
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each variant, with seeds 1, 2, ...",
)
@results_option
def compare(
    job: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    policies: str | None,
    vary: tuple[str, ...],
    public_data: bool,
    seeds: int,
    json_file: Path | None,
) -> None:
    """Train JOB under several policies, or with several values of its keys; print the results.

    Ctrl-C or SIGTERM ends it after the running round, for which it waits up to 30 s. The same
    command with its --run-dir continues it.
    """
    from isthmus_server.runs.local.fork_server import ParticipantForkServer

    refuse_seed(overrides)
    loaded = loaded_job(job, overrides)
    varied = parse_variations(vary)
    others = [] if varied or policies is not None else _baselines(loaded)
    if policies is not None:
        others = policies.split(",")
    names = [loaded.strategy.policy]
    for name in others:
        if name and name not in names:
            names.append(name)
    if len(names) > 1 or not varied:
        varied.insert(0, ("strategy.policy", names))
    variants = combinations(varied)
    directory = run_dir or fresh_directory(loaded, "compare-")
    check_writable(directory, json_file)
    # The fork must happen before this process opens files or starts threads.
    ranks = loaded.datacenter.ranks > 0 or any("datacenter.ranks" in each for each in variants)
    with ParticipantForkServer.fork(ranks=ranks) as fork_server:
        prepare()
        from isthmus_server.runs.local.compare import JobComparison
        from isthmus_server.runs.local.compared_runs import LocalRuns

        runs = LocalRuns(directory, fork_server)
        base = job.resolve().parent
        numbers = range(1, seeds + 1)
        comparison = JobComparison(
            loaded, base, directory, variants, numbers, runs, public_data=public_data
        )
        run_comparison(comparison, json_file)


def _baselines(job: Job) -> list[str]:
    """The baselines for which a job has participants; says which others are left out."""
    missing = {
        "datacenter": "datacenter.ranks=0" if not job.datacenter.ranks else "",
        "federated": "federated.clients=0" if not job.federated.clients else "",
    }
    for name, key in missing.items():
        if key and name != job.strategy.policy:
            click.echo(f"the policy {name} is not compared: {key} starts no participant for it")
    return [name for name, key in missing.items() if not key]


def parse_variations(texts: Sequence[str]) -> list[Variation]:
    """Read the values of `--vary`.

    Raises:
        JobError: one is not of the form `key.sub=value,value`.
        UserError: the seed is varied.
    """
    varied = [parse_variation(text) for text in texts]
    if any(key == "seed" for key, _ in varied):
        raise UserError("--vary seed has no effect: every variant is run with --seeds seeds")
    return varied


def refuse_seed(overrides: Sequence[str]) -> None:
    """Refuse `--set seed=...` where `--seeds` says which seeds the runs have.

    Raises:
        UserError: the seed is set.
    """
    if any(text.partition("=")[0].strip() == "seed" for text in overrides):
        raise UserError("--set seed has no effect: every variant is run with --seeds seeds")


def check_writable(directory: Path, file: Path | None) -> None:
    """Create the directory of a comparison, and the file of its results: fail now, not at the end.

    Raises:
        UserError: one of them cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if file is not None:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
            file.touch()
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from None


def run_comparison(
    comparison: JobComparison,
    json_file: Path | None,
    grace: float | None = GRACE_SECONDS,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a comparison until it ends or is stopped; write its results to a file.

    `grace` and `loop_factory` are as for `run_until_stopped`.

    Raises:
        Exit: a run failed; the others have results.
    """
    # Programs that read a table get whole lines.
    console = Console(width=None if sys.stdout.isatty() else _WHOLE_LINES)
    try:
        work = comparison.run(console)
        figures = run_until_stopped(work, comparison.leave, grace, loop_factory)
    except click.Abort:
        directory = shlex.quote(str(comparison.directory))
        click.echo(f"stopped; the same command with  --run-dir {directory}  continues", err=True)
        raise
    if json_file is not None:
        text = json.dumps(_as_json(figures), indent=1, allow_nan=False)
        json_file.write_text(f"{text}\n", encoding="utf-8")
    runs = [run for variant in figures["variants"] for run in variant["runs"]]
    if failed := sum("failed" in run for run in runs):
        directory = shlex.quote(str(comparison.directory))
        again = f"the same command with  --run-dir {directory}  repeats them"
        click.echo(f"{failed} of {len(runs)} runs failed; {again}", err=True)
        raise click.exceptions.Exit(1)


def _as_json(value: Any) -> Any:
    """The value with null for figures that JSON does not have.

    >>> _as_json({"loss": [float("nan"), 1.0]})
    {'loss': [None, 1.0]}
    """
    if isinstance(value, Mapping):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
