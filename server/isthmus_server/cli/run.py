"""The commands ``isthmus run``, ``statistics``, ``report`` and ``why``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from isthmus.errors import CannotContinue, UserError
from isthmus.identity.tls import split_address
from isthmus.job import Job, load_job
from isthmus.job.flower import SERVER_APP
from isthmus.job.layout_changes import layout_changes
from isthmus.system.process import return_freed_memory
from isthmus.task import check_named
from isthmus_server.observability.options import LogFormat, observed

if TYPE_CHECKING:
    from isthmus_server.storage.store import Store

GRACE_SECONDS = 30.0
"""Time for a running round to end after the first signal."""

_IN_THE_RUN = ""
"""What `--html` without a file stands for."""

_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job."
)
_DIRECTORY = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Directory of the run. Default: runs/NAME-TIME in the current folder.",
)
_ADDRESS = click.option(
    "--address",
    metavar="HOST:PORT",
    help="Loopback address at which other processes can take part. Default: none.",
)


@click.command()
@click.argument("job", type=click.Path(path_type=Path), required=False)
@_SET
@_DIRECTORY
@click.option("--resume", is_flag=True, help="Resume the run in --run-dir.")
@_ADDRESS
@observed
def run(
    job: Path | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    address: str | None,
    log_format: LogFormat,
    quiet: bool,
    metrics: str | None,
    track: tuple[str, ...],
) -> None:
    """Train JOB on this machine: the server, its edge devices and its datacenter ranks.

    With federated.clients=0 or datacenter.ranks=0 that role is not started; participants can take
    it by connecting to --address. Ctrl-C or SIGTERM ends it after the running round, for which it
    waits up to 30 s; a second one gives that round up.

    With --resume, --set changes only how ranks share the work: their number, ZeRO stage, tensor and
    pipeline parallelism, and what else leaves a step as it is.
    """
    from isthmus_server.runs.local.fork_server import ParticipantForkServer

    if resume:
        if run_dir is None:
            raise UserError("--resume needs --run-dir, the directory of the run to resume")
        if job is not None:
            raise UserError("JOB cannot be combined with --resume: a run keeps its job")
        if not (run_dir / "job.json").exists() and not (run_dir / "run.head").exists():
            raise UserError(f"{run_dir} contains no run to resume")
    elif job is None:
        raise UserError("give a job file, or --resume --run-dir DIR")
    loaded = None if job is None else loaded_job(job, overrides)
    changes = layout_changes(overrides) if resume else {}
    listen_at = None if address is None else split_address(address, "--address")
    # The fork must happen before this process opens files or starts threads.
    with ParticipantForkServer.fork(
        ranks=loaded is None or loaded.datacenter.ranks > 0
    ) as fork_server:
        prepare()
        from isthmus_server.observability.observers import Observers
        from isthmus_server.runs.local.session import LocalRun

        observers = Observers.of_options(log_format, quiet, metrics, track)
        console = observers.console
        if loaded is None or job is None:
            assert run_dir is not None
            local_run = LocalRun.resumed(run_dir, changes)
        else:
            directory = run_dir or fresh_directory(loaded)
            local_run = LocalRun.new(loaded, job.resolve().parent, directory)
        quoted = shlex.quote(str(local_run.directory))
        again = f"isthmus run --resume --run-dir {quoted}"
        try:
            work = local_run.run(listen_at, console, fork_server, observers)
            run_until_stopped(work, local_run.leave)
        except click.Abort:
            click.echo(f"stopped; continue with  {again}", err=True)
            raise
        except CannotContinue as error:
            raise UserError(f"{error}; `{again}` continues") from error
    console.print(f"report  isthmus report {quoted}", soft_wrap=True)


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@_SET
@_DIRECTORY
@_ADDRESS
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the statistics to this file too, which `task.statistics` of a job can name.",
)
def statistics(
    job: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    address: str | None,
    output: Path | None,
) -> None:
    """Compute statistics of the devices' data by secure sums, on this machine; train nothing.

    Counts, means, variances, histograms and quantiles are those of all devices together. On a
    server: `isthmus submit JOB --set statistics.collect=true`.
    """
    from isthmus_server.runs.local.fork_server import ParticipantForkServer

    without_training = ("statistics.collect=true", "datacenter.ranks=0")
    loaded = loaded_job(job, (*overrides, *without_training))
    listen_at = None if address is None else split_address(address, "--address")
    # The fork must happen before this process opens files or starts threads.
    with ParticipantForkServer.fork(ranks=False) as fork_server:
        prepare()
        from isthmus_server.rounds.measurements.statistics import STATISTICS
        from isthmus_server.runs.local.session import LocalRun

        directory = run_dir or fresh_directory(loaded, "statistics-")
        local_run = LocalRun.new(loaded, job.resolve().parent, directory)
        run_until_stopped(local_run.run(listen_at, Console(), fork_server), local_run.leave)
    if output is not None:
        output.write_bytes((directory / STATISTICS).read_bytes())


@click.command()
@click.argument(
    "run_dir", metavar="RUN", type=click.Path(path_type=Path), required=False, default=None
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@click.option(
    "--html",
    "page",
    metavar="[FILE]",
    is_flag=False,
    flag_value=_IN_THE_RUN,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it as one HTML page that needs nothing else, by default to RUN/report.html.",
)
@click.option(
    "--schema", "as_schema", is_flag=True, help="Print the JSON schema of that document and exit."
)
def report(run_dir: Path | None, as_json: bool, page: Path | None, as_schema: bool) -> None:
    """Print the report of the run in the directory RUN: rounds, problems, final model."""
    from isthmus_server.read.pages.report_page import html_page
    from isthmus_server.read.report.report import read_report, report_schema, show

    if as_schema:
        click.echo(json.dumps(report_schema(), indent=1))
        return
    if run_dir is None:
        raise UserError("give the directory of a run, or --schema")
    if as_json and page is not None:
        raise UserError("give --json or --html, and run the command again for the other")
    with opened(run_dir) as store:
        run_report = read_report(store)
    if as_json:
        click.echo(json.dumps(run_report.to_json(), indent=1))
    elif page is not None:
        file = run_dir / "report.html" if page == Path(_IN_THE_RUN) else page
        file.write_text(html_page(run_report), encoding="utf-8")
        click.echo(f"the report is in {file}")
    else:
        show(run_report, Console())


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("number", metavar="[ROUND]", type=click.IntRange(min=1), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the decisions as one JSON document.")
def why(run_dir: Path, number: int | None, as_json: bool) -> None:
    """Explain the decisions of the run in the directory RUN, round by round.

    With ROUND, print everything that the decision on one round was based on.
    """
    from isthmus_server.read.report.explain import explain
    from isthmus_server.read.report.explanation_page import show

    with opened(run_dir) as store:
        explanation = explain(store, number)
    if as_json:
        click.echo(json.dumps(explanation.to_json(), indent=1))
    else:
        show(explanation, Console())
        click.echo(f"what else would have come of it: isthmus what-if {shlex.quote(str(run_dir))}")


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """Open a run for reading, and map errors of its log to a user message."""
    from isthmus_server.storage.sealed_database import database_error
    from isthmus_server.storage.store import Store

    store = Store.open(directory, check=True)
    try:
        yield store
    except sqlite3.Error as error:
        raise database_error(directory / "run.sqlite", error) from error
    finally:
        store.close()


def run_until_stopped(
    work: Any,
    leave: Callable[[], None] | None = None,
    grace: float | None = GRACE_SECONDS,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Any:
    """Run a coroutine; Ctrl-C or SIGTERM cancels it and waits for its cleanup.

    With `leave` the first signal calls that instead, and the coroutine is cancelled by a second
    one, or if it has not ended after `grace` seconds; None waits for as long as it takes.

    Raises:
        Abort: it was cancelled.
    """

    async def main() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        leaving = False

        def stop() -> None:
            nonlocal leaving
            if leave is None or leaving:
                task.cancel()
                return
            leaving = True
            limit = "may end" if grace is None else f"has {grace:g} s to end"
            click.echo(f"stopping: a running round {limit}; a second signal gives it up", err=True)
            leave()
            if grace is not None:
                loop.call_later(grace, task.cancel)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        return await task

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise click.Abort from None


def prepare() -> None:
    """Set up a server process: memory, garbage collection, telemetry and log levels."""
    return_freed_memory()
    gc.freeze()  # imported modules stay: exclude them from every later collection
    gc.set_threshold(50_000, 10, 10)  # above what a round of a thousand devices keeps
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    logging.getLogger("isthmus").setLevel(logging.WARNING)
    logging.getLogger("isthmus_server").setLevel(logging.WARNING)


def loaded_job(path: Path, overrides: tuple[str, ...]) -> Job:
    """Load a job; a missing task is reported before PyTorch is imported, which takes seconds."""
    job = load_job(path, overrides)
    base = path.resolve().parent
    if job.federated.server_app is None:
        check_named(job.task.source, "task.source", base=base)
    else:
        check_named(job.federated.server_app, SERVER_APP, base=base)
    return job


def fresh_directory(job: Job, prefix: str = "") -> Path:
    """The default directory of a run that begins now."""
    return (
        Path("runs")
        / f"{prefix}{job.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    )
