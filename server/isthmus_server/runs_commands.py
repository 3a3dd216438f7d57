"""``isthmus runs``: commands about run directories."""

from __future__ import annotations

from pathlib import Path

import click

_RUN = click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))


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
