"""``isthmus client``: what a device owner types."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import click

from isthmus import lifetime
from isthmus.errors import UserError
from isthmus.task import Participant
from isthmus_clients.agent import serve


@click.group()
def client() -> None:
    """Run an edge device: train on its own data, send updates."""


@client.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="The server to dial.")
@click.option("--name", required=True, help="This device's name, unique on the server.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Where this device keeps its data; wins over the job's task.data.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Be device I (from 0) of N that share one data set, for tasks that split it.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="CPU threads used for training.",
)
@click.option(
    "--hours",
    multiple=True,
    metavar="[DAYS ]HH:MM-HH:MM",
    help="Be asked in these hours only (UTC), such as 22:00-06:00; several add up.",
)
@click.option(
    "--die-with-parent", is_flag=True, help="End when the process that started this one ends."
)
def start(
    server: str,
    name: str,
    data: Path | None,
    shard: str | None,
    threads: int,
    hours: tuple[str, ...],
    die_with_parent: bool,
) -> None:
    """Dial the server and take part in its rounds until stopped."""
    if die_with_parent:
        lifetime.die_with_parent()
    participant = Participant(name=name, regime="federated", shard=_parse_shard(shard))
    logging.getLogger("isthmus").setLevel(logging.INFO)
    _check_hours(hours)
    asyncio.run(_until_stopped(server, participant, data, threads, hours))


async def _until_stopped(
    server: str,
    participant: Participant,
    data: Path | None,
    threads: int,
    hours: tuple[str, ...],
) -> None:
    task = asyncio.ensure_future(serve(server, participant, data, threads, hours))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        click.echo(f"{participant.name} stopped")


def _check_hours(hours: tuple[str, ...]) -> None:
    """Refuse what the server would not understand."""
    if hours:
        from isthmus.section import Hours

        for one in hours:
            Hours.parse(one)


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, _, number = text.partition("/")
    try:
        shard = int(index), int(number)
    except ValueError:
        raise UserError(f"--shard {text!r} is not of the form I/N, such as 0/8") from None
    if not 0 <= shard[0] < shard[1]:
        raise UserError(f"--shard {text!r}: I must be at least 0 and below N")
    return shard
