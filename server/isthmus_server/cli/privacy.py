"""``isthmus privacy``: what a budget buys, and what was spent of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.provided import load_provided, provided

if TYPE_CHECKING:
    from isthmus_server.read.report.privacy.search import Sought


COMMANDS = "isthmus.privacy_commands"
"""Entry points of further subcommands, of packages that this one does not import."""


class _PrivacyCommands(click.Group):
    """Commands here, and those that other packages provide; imports only the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *provided(COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in provided(COMMANDS):
            return own
        command = load_provided(COMMANDS, cmd_name, f"isthmus privacy {cmd_name}")
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_PrivacyCommands)
def privacy() -> None:
    """Plan differential privacy, audit it, and see what was spent."""


@privacy.command()
@click.argument("job", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option(
    "--find",
    type=click.Choice(["rounds", "participations", "cohort", "epsilon"]),
    help="Find this value of the job from a wanted noise, and plan the job with it.",
)
@click.option("--noise", type=float, metavar="Z", help="With --find: the noise multiplier.")
@click.option(
    "--signal-to-noise",
    type=float,
    metavar="S",
    help="With --find: how many times longer than its noise the sum of equal updates is.",
)
@click.option(
    "--unit",
    type=click.Choice(["device", "example"]),
    help="With --find: whose budget it is about, in a job with both.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(
    job: Path,
    overrides: tuple[str, ...],
    find: Sought | None,
    noise: float | None,
    signal_to_noise: float | None,
    unit: str | None,
    as_json: bool,
) -> None:
    """Print the noise of JOB, what it costs and what a larger cohort would buy.

    For devices, for the examples of a datacenter, and for those of devices. Nothing is trained and
    nobody is asked.

    With --find, one value of the job is found from the others and a wanted noise: the most rounds
    or participations of a device, or the least cohort or epsilon. The plan is that of the job with
    the options that are printed.
    """
    from isthmus.errors import JobError
    from isthmus.job import load_job, with_changes
    from isthmus_server.read.report.privacy.device_examples import DeviceExamplesForecast
    from isthmus_server.read.report.privacy.device_forecast import PrivacyForecast
    from isthmus_server.read.report.privacy.examples_forecast import ExamplesForecast
    from isthmus_server.read.report.privacy.search import found_in

    loaded = load_job(job, overrides)
    found = found_in(loaded, job.parent, find, noise, signal_to_noise, unit)
    if found is not None:
        loaded = with_changes(loaded, found.changes)
    devices = PrivacyForecast.of(loaded, job.parent)
    datacenter = ExamplesForecast.of(loaded)
    on_devices = DeviceExamplesForecast.of(loaded)
    if devices is None and datacenter is None and on_devices is None:
        raise JobError(
            f"{loaded.name!r} has no differential privacy; add a table [privacy], "
            "[datacenter.privacy] or [federated.privacy] with epsilon and delta"
        )
    if as_json:
        tables = {
            "devices": devices and devices.to_json(),
            "datacenter": datacenter and datacenter.to_json(),
            "device_examples": on_devices and on_devices.to_json(),
        }
        if found is not None:
            tables["found"] = found.to_json()
        click.echo(json.dumps(tables, indent=2))
        return
    for forecast in (found, devices, datacenter, on_devices):
        for name, text in [] if forecast is None else forecast.lines():
            click.echo(f"{name:<12} {text}")


@privacy.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--devices", is_flag=True, help="Print what was spent of each device, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ledger(run_dir: Path, devices: bool, as_json: bool) -> None:
    """Verify the privacy ledger of RUN, and print what was spent, by which rounds."""
    from isthmus_server.read.report.privacy.spending import read_spending

    spending = read_spending(run_dir, of_each=devices)
    if as_json:
        click.echo(json.dumps(spending.to_json(), indent=2))
        return
    for line in spending.lines():
        click.echo(line)
