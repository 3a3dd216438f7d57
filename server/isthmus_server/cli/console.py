"""``isthmus console``: show runs in a browser."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import click

from isthmus.identity.membership import default_state
from isthmus.identity.tls import split_address


@click.command()
@click.argument("path", metavar="RUN_OR_SERVER", type=click.Path(path_type=Path))
@click.option(
    "--address",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="Loopback address to listen at. Default: any free port.",
)
def console(path: Path, address: str) -> None:
    """Show a run, a folder of runs, or a server's jobs and devices in a browser.

    RUN_OR_SERVER is a run's directory, a folder with such directories, or a server's state
    directory; runs may go on meanwhile. The printed address has a token: only this user can open
    it. Ctrl-C ends it.
    """
    from isthmus_server.read.console.access import kept_token
    from isthmus_server.read.console.serving import ConsoleListener

    host, port = split_address(address, "--address")
    token = kept_token(default_state("console"))
    listener = ConsoleListener(path, host, port, token=token, option="--address")
    click.echo(f"console at {listener.address}?token={token}")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listener.serve())
