"""``isthmus authority``: an enrolment authority that is separate from the server.

Tokens, revocation, the list of participants and the audit log have the same commands as a server
that is its own authority, because the state directories have the same files.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus_server.cli import server as server_commands


@click.group()
def authority() -> None:
    """Run the enrolment authority of a server, on a machine and by a person other than its own."""


_STATE = click.argument("state", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))


@authority.command()
@_STATE
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address at which participants join; may be repeated. Default: this machine's "
    "own.",
)
@click.option(
    "--server",
    required=True,
    metavar="HOST:PORT",
    help="Address of the server that participants connect to after joining; behind a balancer that "
    "ends TLS its address with wss://.",
)
def init(state: Path, hosts: tuple[str, ...], server: str) -> None:
    """Create a new authority in DIR: its keys, and the registry of participants."""
    from isthmus_server.fleet.authority import default_hosts, initialise
    from isthmus_server.fleet.registry import Registry

    names = list(hosts) or default_hosts()
    initialise(state, names, server)
    Registry(state).close()
    click.echo(f"an authority for the server at {server} is ready in {state}; keep it private")


@authority.command()
@_STATE
@click.option(
    "--address",
    default="0.0.0.0:9500",
    show_default=True,
    help="Where the server connects; the next port is for joining.",
)
def start(state: Path, address: str) -> None:
    """Let participants join, and tell the server who they are."""
    from isthmus_server.cli.run import run_until_stopped
    from isthmus_server.fleet.authority_service import AuthorityService

    host, port = tls.split_address(address, "--address")
    if port == server_commands.LAST_PORT:
        raise UserError(f"--address {address!r} has no next port, which is needed for joining")
    logging.getLogger("isthmus_server").setLevel(logging.INFO)

    async def serve() -> None:
        service = AuthorityService(state)
        async with service.listening(host, port):
            click.echo(f"server at {host}:{service.port}, joining at {host}:{service.join_port}")
            await asyncio.Event().wait()

    run_until_stopped(serve())


for command in (
    server_commands.token,
    server_commands.revoke,
    server_commands.participants,
    server_commands.verify,
    server_commands.show_audit,
    server_commands.backup,
    server_commands.restore,
):
    authority.add_command(command)
