"""``isthmus plan``: whether a job fits, how long it takes, what it costs, before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("job", metavar="JOB", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 1 << 20),
    help="Ranks of the datacenter, which need not be here. Default: datacenter.ranks.",
)
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    help="What the ranks are. Default: gpu, and cpu with --measure.",
)
@click.option("--layouts", is_flag=True, help="Compare all layouts that so many ranks allow.")
@click.option(
    "--memory-gib",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Memory of a rank in GiB: say which layouts fit.",
)
@click.option(
    "--tflops",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Operations of a rank in 10**12 per second, for the time of a step.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Train some steps on this machine's processors for a few seconds, to measure that rate.",
)
@click.option(
    "--mbit",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Rate of a device's link in Mbit/s. Default: time.least_rate, if the job sets it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(
    job: Path,
    overrides: tuple[str, ...],
    ranks: int | None,
    device: str | None,
    layouts: bool,
    memory_gib: float | None,
    tflops: float | None,
    measure: bool,
    mbit: float | None,
    as_json: bool,
) -> None:
    """Say what JOB needs and costs, how long it takes, and whose privacy it spends.

    Each figure has its unit and how it was obtained. Nothing is trained, but for some steps with
    --measure, and nobody is asked. A job that cannot run is refused as by `isthmus job check`,
    which also trains a batch.
    """
    from isthmus.task.loading import keep_process
    from isthmus_server.plan.plan import PlanOptions, plan_of

    keep_process()
    options = PlanOptions(
        ranks=ranks,
        device=device,
        layouts=layouts,
        memory_gib=memory_gib,
        tflops=tflops,
        measure=measure,
        mbit=mbit,
    )
    planned = plan_of(job, overrides, options)
    if as_json:
        click.echo(json.dumps(planned.to_json(), indent=2))
        return
    for line in planned.lines():
        click.echo(line)
