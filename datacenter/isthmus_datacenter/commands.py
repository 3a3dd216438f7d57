"""``isthmus datacenter``: what a person types."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import click


@click.group()
def datacenter() -> None:
    """The datacenter's part of a run: a group of ranks behind one service."""


@datacenter.command()
@click.option("--server", required=True, metavar="HOST:PORT", help="The server to dial.")
@click.option("--name", default="datacenter", show_default=True, help="Name on the server.")
@click.option(
    "--ranks", required=True, type=click.IntRange(1, 1024), help="Ranks to start on this machine."
)
@click.option(
    "--state",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for checkpoints and logs; keep it to go on after a restart.",
)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="Where this datacenter's data is, instead of where the job says.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="What starts the ranks.",
)
@click.option("--die-with-parent", is_flag=True, help="End when the starting process ends.")
def launch(
    server: str,
    name: str,
    ranks: int,
    state: Path,
    data: Path | None,
    scheduler: str,
    die_with_parent: bool,
) -> None:
    """Start ranks and offer them to a server."""
    if die_with_parent:
        from isthmus import lifetime

        lifetime.die_with_parent()
    # Before torch is imported: its store warns about every wait that ends without an answer.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from isthmus_datacenter.service import Service

    asyncio.run(_serve(Service(name, ranks, state, data), server))


async def _serve(service: object, server: str) -> None:
    from isthmus_datacenter.service import Service

    assert isinstance(service, Service)
    work = asyncio.ensure_future(service.serve(server))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
