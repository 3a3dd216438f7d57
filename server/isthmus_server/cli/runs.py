"""``isthmus runs``: list, check, repair, copy, branch and delete the directories of runs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isthmus.errors import UserError
from isthmus.printable import in_a_line
from isthmus_server.fleet.durations import seconds_of

_RUN = click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FOLDER = click.argument("folder", type=_DIRECTORY)


@click.group()
def runs() -> None:
    """List, check, repair, copy and delete the directories of runs."""


@runs.command()
@_RUN
def verify(run_dir: Path) -> None:
    """Check everything in the directory RUN, and print what is intact and what is damaged.

    Nothing is changed. The exit code is 1 if something is damaged.
    """
    from isthmus_server.storage.recovery import verify as verify_directory

    damaged = 0
    for finding in verify_directory(run_dir):
        damaged += bool(finding.damage)
        state = f"damaged  {finding.damage}" if finding.damage else f"intact   {finding.checked}"
        click.echo(state)
    if damaged:
        raise click.exceptions.Exit(1)


@runs.command()
@_RUN
def rollback(run_dir: Path) -> None:
    """Go back to the newest committed round of RUN that is intact.

    If nothing is damaged, it goes back by one round. The directory keeps a copy of what is dropped.
    `isthmus run --resume` then continues and ends with the same model; for a job of a server,
    `isthmus resume JOB` does, if it has failed.
    """
    from isthmus_server.storage.recovery import roll_back

    done = roll_back(run_dir)
    if done.restored:
        click.echo("job.json was written again from the round log")
    where = f"after round {done.round}" if done.round else "from the start"
    click.echo(f"the run continues {where}; what was changed or dropped is in {done.dropped}")


@runs.command("list")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, such as `runs` or a server's `fleet/runs`, newest first."""
    from isthmus_server.runs.operations.retention import list_runs

    found = list_runs(folder)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(run) for run in found], indent=1))
        return
    table = Table("run", "job", "state", "rounds", "MB", "changed (UTC)", "metrics", box=None)
    for run in found:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in run.metrics.items())
        changed = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.changed))
        size = f"{run.bytes / 1e6:.1f}"
        texts = (run.name, run.job, run.state, str(run.rounds), size, changed, metrics)
        table.add_row(*(escape(in_a_line(text)) for text in texts))
    Console().print(table if found else f"{folder} has no runs")


@runs.command()
@click.argument("run_dir", metavar="RUN", type=_DIRECTORY)
@click.argument("target", metavar="COPY", type=_DIRECTORY)
def export(run_dir: Path, target: Path) -> None:
    """Copy RUN as of its last commit into the new directory COPY, with a manifest.

    Also while it runs. What it has: its log, the models of the last commit, the final model.
    """
    from isthmus_server.runs.operations.manifest import refuse_existing, write_manifest
    from isthmus_server.runs.operations.run_copies import copy_run

    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    rounds = copy_run(run_dir, target, with_key=False)
    write_manifest(target, "run")
    click.echo(f"{run_dir} as of round {rounds} is in {target}")


@runs.command("import")
@click.argument("source", metavar="COPY", type=_DIRECTORY)
@click.argument("run_dir", metavar="RUN", type=_DIRECTORY)
def import_(source: Path, run_dir: Path) -> None:
    """Check an exported COPY, and make the new directory RUN of it, to report on or export.

    A run that had not ended is cancelled in RUN: it goes on where it came from, and devices must
    not be asked twice for a round. `isthmus runs branch` makes a new run of it.
    """
    from isthmus_server.runs.operations.manifest import (
        checked_manifest,
        copy_listed,
        drafted,
        refuse_existing,
    )
    from isthmus_server.runs.operations.run_copies import close_run
    from isthmus_server.storage.run_place import FILE as PLACE
    from isthmus_server.storage.run_place import record_copy

    manifest = checked_manifest(source, "run")
    refuse_existing(run_dir)
    with drafted(run_dir) as draft:
        copy_listed(manifest, source, draft)
        (draft / "logs").mkdir(exist_ok=True)
        if not (draft / PLACE).exists():  # of a version that did not mark copies
            record_copy(draft, str(source.resolve()))
        closed = close_run(draft, "imported from a copy; it goes on where it came from")
    click.echo(f"{run_dir} is as it was exported" + (", and cancelled" if closed else ""))


@runs.command()
@click.argument("source", metavar="RUN", type=_DIRECTORY)
@click.argument("target", metavar="NEW", type=_DIRECTORY)
def branch(source: Path, target: Path) -> None:
    """Make the new run NEW, which begins with the last committed model of RUN.

    RUN may be cancelled, or a copy, which nothing continues. NEW has an id and a noise key of its
    own, and the privacy ledger of RUN. `isthmus run --resume` continues it. On a server, submit the
    job again instead.
    """
    from isthmus_server.runs.operations.manifest import drafted, refuse_existing
    from isthmus_server.runs.operations.run_copies import branch_run
    from isthmus_server.storage.run_description import resume_command

    refuse_existing(target)
    with drafted(target) as draft:
        run_id, round_ = branch_run(source, draft, target)
    click.echo(f"{target} is the new run {run_id}, after round {round_} of {source}")
    click.echo(f"continue it with  {resume_command(target)}")


@runs.command()
@click.argument("run_dir", metavar="COPY", type=_DIRECTORY)
@click.option(
    "--original-is-gone",
    is_flag=True,
    required=True,
    expose_value=False,
    help="State that nothing will ever continue the original, or another copy.",
)
@click.option(
    "--nothing-ran-since",
    is_flag=True,
    help="State that the original asked no device after COPY was made; for runs with privacy.",
)
def adopt(run_dir: Path, nothing_ran_since: bool) -> None:
    """Have COPY, which nothing continues, take the place of the run that it is a copy of.

    After a move to another disk, for example. It keeps the run's id, its ledger and its noise key,
    and its log has the statement. If you do not know that it is true, use `isthmus runs branch`.
    """
    from isthmus_server.runs.operations.adoption import adopt as adopt_copy

    done = adopt_copy(run_dir, nothing_ran_since=nothing_ran_since)
    click.echo(f"{run_dir} is the run {done.run_id} from now on, after round {done.round}")
    click.echo(f"never continue {done.original} again: {done.consequence}")


@runs.command()
@_FOLDER
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep N runs of each job.")
@click.option("--older-than", metavar="TIME", help="Delete only older runs, as in 12h or 30d.")
@click.option(
    "--keep-best",
    metavar="METRIC[:max|:min]",
    help="Keep each job's run with the best METRIC. Default: lower is better if the job's "
    "evaluation.keep_best says so, or METRIC ends with loss.",
)
@click.option("--failed", is_flag=True, help="Delete failed runs too; they can be resumed.")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
def prune(
    folder: Path,
    keep_last: int | None,
    older_than: str | None,
    keep_best: str | None,
    failed: bool,
    dry_run: bool,
) -> None:
    """Delete ended runs in FOLDER that no option keeps.

    A run that is running, or can go on, and one that is damaged stay in any case, and so do the
    privacy ledgers of a server's populations.
    """
    from isthmus_server.runs.operations.retention import RetentionPolicy
    from isthmus_server.runs.operations.retention import prune as prune_folder

    if keep_last is None and older_than is None:
        raise UserError("say which runs are kept: --keep-last N, --older-than TIME, or both")
    metric, mode = _best(keep_best or "")
    policy = RetentionPolicy(
        keep_last=keep_last or 0,
        older_than=0.0 if older_than is None else seconds_of(older_than, "--older-than"),
        keep_best=metric,
        mode=mode,
        failed=failed,
    )
    freed = 0
    for run, kept in prune_folder(folder, policy, dry_run=dry_run):
        if kept:
            click.echo(f"kept     {run.name}: {in_a_line(kept)}")
        else:
            freed += run.bytes
            click.echo(f"{'would go' if dry_run else 'deleted '} {run.name}")
    click.echo(f"{freed / 1e6:.1f} MB {'would be' if dry_run else 'are'} freed")


def _best(option: str) -> tuple[str, Literal["", "max", "min"]]:
    """The metric of `--keep-best`, and which of its values are better, if the option says so."""
    if option.endswith(":max"):
        return option.removesuffix(":max"), "max"
    if option.endswith(":min"):
        return option.removesuffix(":min"), "min"
    return option, ""
