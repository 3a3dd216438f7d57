"""The commands that keep a server over the years: ``isthmus server backup``, ``restore``, and runs.

They are part of the groups ``server`` and ``runs``, whose other commands are elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus.system.clocks import utc
from isthmus_server.control_plane.commands import server
from isthmus_server.operations.run_folders import runs
from isthmus_server.storage import audit

__all__ = ["backup", "restore", "runs", "server"]

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_STATE = click.argument("state", metavar="DIR", type=_DIRECTORY)


@server.command()
@_STATE
@click.argument("target", metavar="BACKUP", type=_DIRECTORY)
def backup(state: Path, target: Path) -> None:
    """Copy the state directory DIR into the new directory BACKUP, also while the server runs.

    It has the keys of the server: keep it as private as DIR.
    """
    from isthmus_server.operations.backup import back_up

    manifest = back_up(state, target)
    size = sum(size for size, _ in manifest.files.values())
    click.echo(f"{len(manifest.files)} files, {size / 1e6:.1f} MB, are backed up in {target}")


@server.command()
@click.argument("source", metavar="BACKUP", type=_DIRECTORY)
@click.argument("state", metavar="DIR", type=_DIRECTORY)
@click.option(
    "--lost",
    type=_DIRECTORY,
    metavar="OLD",
    help="What is left of the directory that was lost: its newer audit log and privacy ledgers are "
    "used.",
)
@click.option(
    "--nothing-ran-since",
    is_flag=True,
    help="State that the server was stopped before the backup and never started again.",
)
def restore(source: Path, state: Path, lost: Path | None, nothing_ran_since: bool) -> None:
    """Make the new state directory DIR of a BACKUP, after checking every file of it.

    What happened after the backup is not known: unused tokens end, unfinished jobs are cancelled,
    and no population with a privacy ledger is asked again before `isthmus server population`.
    """
    from isthmus_server.operations import restore as restoring

    done = restoring.restore(source, state, lost=lost, nothing_ran_since=nothing_ran_since)
    click.echo(f"{state} is as it was at {utc(done.manifest.made_at)}")
    for line in done.newer:
        click.echo(f"newer than the backup: {line}")
    for name in done.closed:
        click.echo(f"cancelled: {name}; submit it again")
    for name in done.populations:
        click.echo(f"not asked any more: the population {name}")
    if nothing_ran_since:
        return
    click.echo("unused tokens have ended; make new ones")
    if not done.revocations_known:
        click.echo("revoke again whom you have revoked since then: the backup does not know them")


@server.command()
@_STATE
@click.argument("name")
def population(state: Path, name: str) -> None:
    """State that population NAME was asked nothing between a backup and its restore into DIR.

    Only then is its privacy ledger complete. The statement is in the audit log.
    """
    from isthmus_server.privacy.populations import accept_population

    if not (state / "privacy").is_dir():
        raise UserError(f"{state} has no privacy ledgers of populations")
    accept_population(state / "privacy", name)
    audit.record(state, "population", by=audit.local_user(), name=name)
    click.echo(f"the population {name} may be asked again")
