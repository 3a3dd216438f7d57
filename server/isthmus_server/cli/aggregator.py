"""``isthmus server aggregator``: processes that hold streams of devices for a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import proxy_options
from isthmus.identity.token_options import token_options

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)


@click.group()
def aggregator() -> None:
    """Hold the streams of devices for a server, and hand it the sums of what they send."""


@aggregator.command()
@click.argument("state", metavar="DIR", type=_DIRECTORY)
@token_options
@proxy_options
def join(state: Path, url: str, token: joining.Token, proxy: ProxyChoice) -> None:
    """Join the server with a TOKEN of kind aggregator; the keys are in DIR.

    It is at HOST:PORT, or behind a balancer that ends TLS at wss://HOST/PATH.
    """
    member = asyncio.run(joining.join(url, token, state, tls.AGGREGATOR, proxy))
    host = tls.aggregator_host(member.name)
    click.echo(f"the aggregator {member.name!r} is ready in {state}; devices reach it at {host}")


@aggregator.command()
@click.argument("state", metavar="DIR", type=_DIRECTORY)
@click.option("--address", default="0.0.0.0:9500", show_default=True, help="Where devices connect.")
@click.option(
    "--server",
    metavar="HOST:PORT",
    default="",
    help="Address of the server (also wss://HOST/PATH, behind a balancer that ends TLS), if it "
    "differs from the one that was joined; one only, such as the name of a server and its standby.",
)
@click.option(
    "--folder",
    metavar="DIR",
    type=_FOLDER,
    help="Where models and updates are while they move, instead of the temporary folder.",
)
def start(state: Path, address: str, server: str, folder: Path | None) -> None:
    """Serve the devices that connect here, until stopped.

    Devices know the address by `isthmus client start --server`. The server admits each of them, and
    all but their updates passes through to it; updates, plain or masked, are added here.
    """
    import torch

    from isthmus_server.aggregator.process import AggregatorProcess
    from isthmus_server.cli.run import prepare

    host, port = tls.split_address(address, "--address")
    prepare()
    for name in ("isthmus", "isthmus_server"):
        logging.getLogger(name).setLevel(logging.INFO)
    torch.set_num_threads(1)  # a vector is added tile by tile, and the link needs the cores more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # each device needs one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    member = Membership(state)
    process = AggregatorProcess(member, folder)

    async def serve() -> None:
        def ready() -> None:
            click.echo(f"devices at {host}:{process.port}, server at {server or member.server}")

        running = asyncio.create_task(process.run(host, port, server=server, ready=ready))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running

    with member.locked():
        asyncio.run(serve())
    click.echo(f"{member.name} stopped")


def check_name(name: str, uses: int | None) -> None:
    """Check the name of an aggregator that a token is for.

    Raises:
        UserError: it does not begin with a host, or is to be that of several.
    """
    from isthmus_server.fleet.authority import check_host

    if uses is not None:
        raise UserError(
            "each aggregator has a host of its own; make a token for each, and no --uses"
        )
    try:
        check_host(tls.aggregator_host(name))
    except UserError:
        raise UserError(
            f"--name {name!r} is not a host: devices check the aggregator by it; give the name or "
            "address by which they reach it, and add _2 to it for a second one there"
        ) from None
