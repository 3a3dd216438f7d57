"""The command ``isthmus doctor``; each role adds its own by the entry points `isthmus.doctor`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from importlib.metadata import entry_points

import click

from isthmus.doctor.checks import Diagnosis
from isthmus.printable import in_a_line


class _Roles(click.Group):
    """Finds the command of a role among the installed packages, and imports only that one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(entry_points(group="isthmus.doctor").names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for point in entry_points(group="isthmus.doctor", name=cmd_name):
            try:
                command = point.load()
            except ModuleNotFoundError as error:
                raise click.ClickException(
                    f"`isthmus doctor {cmd_name}` needs the package {error.name!r}, which is not "
                    "installed; install isthmus for this role"
                ) from error
            assert isinstance(command, click.Command)
            return command
        return None


@click.command(cls=_Roles)
def doctor() -> None:
    """Check this machine for one role: OK, WARN or FAIL for each point, and what to do.

    The exit code is 1 if a point has failed. Nothing is changed.
    """


def tell(found: Iterable[Diagnosis], *, as_json: bool) -> None:
    """Print the results, and end with 1 if one has failed."""
    results = []
    for result in found:
        results.append(result)
        if not as_json:
            remedy = f"; {result.remedy}" if result.remedy else ""
            click.echo(in_a_line(f"{result.level:<4} {result.what}: {result.found}{remedy}"))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    if any(result.level == "FAIL" for result in results):
        raise click.exceptions.Exit(1)
