"""The command ``isthmus privacy audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import UserError
from isthmus_privacy.dp.auditing import CANARIES, CONFIDENCE, CONFIDENCES
from isthmus_server.cli.run import loaded_job, prepare, run_until_stopped

if TYPE_CHECKING:
    from isthmus_simulation.audit.audit import Unit
    from isthmus_simulation.run import Simulation


@click.command()
@click.argument("job", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option(
    "--unit",
    type=click.Choice(["device", "example"]),
    help="Whose promise to audit, in a job that has both.",
)
@click.option(
    "--canaries",
    type=click.IntRange(1, 1_000_000),
    default=CANARIES,
    show_default=True,
    help="Guesses to make; more of them find less missing noise.",
)
@click.option(
    "--confidence",
    type=float,
    default=CONFIDENCE,
    show_default=True,
    help="Of the bounds: an honest job gives an alarm in at most 1 minus this of audits.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def audit(
    job: Path,
    overrides: tuple[str, ...],
    unit: Unit | None,
    canaries: int,
    confidence: float,
    as_json: bool,
) -> None:
    """Measure what simulated runs of JOB reveal, and compare it with what is claimed.

    Canaries, devices or examples by what JOB protects, contribute as much as they can, or nothing,
    by the toss of a coin, and an auditor who sees everything that is released guesses the coins.
    The number of right guesses gives a lower bound on epsilon. The steps, sampling, clipping, noise
    and charges are those of a real run. If more is revealed than claimed, the exit status is 1.

    For a JOB without noise, it prints what membership inference gets from the opened sums of
    devices and from the final model.
    """
    least, most = CONFIDENCES
    if not least <= confidence <= most:
        raise UserError(f"--confidence {confidence!r} is not in the range of {least} to {most}")
    loaded = loaded_job(job, overrides)
    prepare()
    from isthmus_simulation.audit.audit import Audit, AuditReport
    from isthmus_simulation.virtual_time import VirtualTimeLoop

    def run(simulation: Simulation) -> None:
        run_until_stopped(simulation.run(), loop_factory=VirtualTimeLoop)

    base = job.resolve().parent
    planned = Audit(loaded, base, unit=unit, canaries=canaries, confidence=confidence, run=run)
    report = planned.report()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        for name, text in report.lines():
            click.echo(f"{name:<12} {text}")
    if isinstance(report, AuditReport) and report.is_alarm:
        raise click.exceptions.Exit(1)
