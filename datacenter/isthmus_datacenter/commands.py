"""The ``isthmus datacenter`` commands, for people and for the scripts of schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from isthmus.errors import UserError
from isthmus.identity.membership import Membership
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import NAMES, proxy_options
from isthmus.identity.tls import split_address
from isthmus.identity.token_options import token_options
from isthmus_datacenter.launch import NodeShell, check_private, parse_options
from isthmus_datacenter.launch.datacenter import DatacenterLaunch
from isthmus_datacenter.launch.options import find_launcher, launch_options, start

if TYPE_CHECKING:
    from isthmus.identity.joining import Token

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_PATH = click.Path(exists=True, path_type=Path)


@click.group()
def datacenter() -> None:
    """Run a datacenter: a group of ranks behind one service."""


def _service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `launch` and `serve` share."""
    for option in (
        click.option(
            "--server",
            metavar="HOST:PORT",
            help="The server to connect to, also as wss://HOST/PATH behind a balancer that ends "
            "TLS. Default: the server joined.",
        ),
        click.option(
            "--name", help="Name on the server. Default: the name joined with, else `datacenter`."
        ),
        click.option(
            "--ranks", required=True, type=click.IntRange(1, 1024), help="Ranks on each node."
        ),
        click.option(
            "--nodes",
            default=1,
            show_default=True,
            type=click.IntRange(1, 1024),
            help="Number of machines; more than one needs a scheduler.",
        ),
        click.option(
            "--state",
            required=True,
            type=_DIRECTORY,
            help="Directory for checkpoints and logs; keep it to resume after a restart.",
        ),
        click.option(
            "--data",
            type=_PATH,
            help="Directory of this datacenter's data, instead of the one in the job.",
        ),
        click.option(
            "--tasks",
            type=_DIRECTORY,
            help="Directory of the tasks that may be loaded. Default: membership/tasks in --state.",
        ),
        click.option(
            "--blobs",
            multiple=True,
            metavar="KIND:TARGET",
            help="Where models and packages may be besides the server, such as file:/srv/blobs; "
            "may be repeated.",
        ),
        click.option(
            "--grace",
            default=60.0,
            show_default=True,
            type=click.FloatRange(0),
            help="Seconds for a running round to end after SIGTERM or SIGUSR1.",
        ),
    ):
        command = option(command)
    return proxy_options(command)


@datacenter.command()
@token_options
@click.option("--state", required=True, type=_DIRECTORY, help="The directory to pass to `launch`.")
@proxy_options
def join(url: str, token: Token, state: Path, proxy: ProxyChoice) -> None:
    """Join the server with a TOKEN from its operator.

    It is at HOST:PORT, or behind a balancer that ends TLS at wss://HOST/PATH.
    """
    from isthmus.identity import joining

    member = asyncio.run(joining.join(url, token, state / "membership", "datacenter", proxy))
    begin = f"isthmus datacenter launch --ranks N --state {shlex.quote(str(state))}"
    click.echo(
        f"this datacenter is {member.name!r} at {member.server}; begin, with N ranks on this "
        f"machine, with: {begin}"
    )


@datacenter.command()
@_service_options
@click.option(
    "--scheduler",
    metavar="NAME",
    default="local",
    show_default=True,
    help="Program that starts the ranks: local, slurm, kubernetes, ray, or one of an installed "
    "package.",
)
@launch_options
@click.option("--die-with-parent", is_flag=True, help="End when the starting process ends.")
def launch(
    server: str | None,
    name: str | None,
    ranks: int,
    nodes: int,
    state: Path,
    data: Path | None,
    tasks: Path | None,
    blobs: tuple[str, ...],
    proxy: ProxyChoice,
    grace: float,
    scheduler: str,
    env_file: Path | None,
    prologue: Path | None,
    options: tuple[str, ...],
    dry_run: bool,
    die_with_parent: bool,
) -> None:
    """Start ranks and connect them to a server."""
    if env_file is not None:
        check_private(env_file)
    server, name, member = _membership(server, name, state, proxy)
    request = DatacenterLaunch(
        server=server,
        name=name,
        ranks=ranks,
        nodes=nodes,
        state=state.resolve(),
        data=None if data is None else data.resolve(),
        tasks=None if tasks is None else tasks.resolve(),
        environment=None if env_file is None else env_file.resolve(),
        prologue=None if prologue is None else prologue.resolve(),
        blobs=blobs,
        proxy=proxy,
        options=parse_options(options),
        grace_seconds=grace,
    )
    if scheduler == "local":
        if nodes > 1 or options or env_file is not None or prologue is not None:
            raise UserError(
                "--nodes, --option, --env-file and --prologue need --scheduler slurm, kubernetes "
                "or ray"
            )
        if dry_run:
            click.echo(request.first(NodeShell("127.0.0.1:0", "")))
            return
        if die_with_parent:
            from isthmus.system import process

            process.die_with_parent()
        # The process that starts this one ends it only when the round is not needed any more.
        grace = 0.0 if die_with_parent else grace
        _serve(server, name, ranks, state, data, tasks, None, grace, member, blobs, proxy)
        return
    start(request, find_launcher(scheduler), dry_run)


@datacenter.command()
@_service_options
@click.option(
    "--control", required=True, metavar="HOST:PORT", help="Address for the agents to connect to."
)
def serve(
    server: str | None,
    name: str | None,
    ranks: int,
    nodes: int,
    state: Path,
    data: Path | None,
    tasks: Path | None,
    blobs: tuple[str, ...],
    proxy: ProxyChoice,
    grace: float,
    control: str,
) -> None:
    """Run the service of a cluster whose nodes each run `isthmus datacenter agent`."""
    host, port = split_address(control, "--control")
    _quiet_store()
    from isthmus_datacenter.service.rank_group import Nodes

    cluster = None if port == 0 else Nodes(count=nodes, host=host, port=port)
    server, name, member = _membership(server, name, state, proxy)
    _serve(server, name, ranks, state, data, tasks, cluster, grace, member, blobs, proxy)


@datacenter.command()
@click.option("--control", required=True, metavar="HOST:PORT", help="Address of the service.")
@click.option(
    "--state",
    required=True,
    type=_DIRECTORY,
    help="State directory of the service, which has the key that this node needs.",
)
def agent(control: str, state: Path) -> None:
    """Run this node's ranks for the service at --control, until SIGTERM or SIGUSR1."""
    host, port = split_address(control, "--control")
    leaving = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: leaving.set())
    _quiet_store()
    from isthmus_datacenter.service.agents import serve_node
    from isthmus_datacenter.service.rank_group import KEY_FILE

    serve_node(host, port, state / KEY_FILE, leaving.is_set)


def _quiet_store() -> None:
    """Silence PyTorch's store, which warns about every wait that times out.

    Only before torch is imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _membership(
    server: str | None, name: str | None, state: Path, proxy: ProxyChoice
) -> tuple[str, str, Membership | None]:
    """The server and name from the membership; options take precedence over it."""
    member = None
    if proxy and not (state / "membership").exists():
        raise UserError(f"{NAMES} need a datacenter that has joined a server")
    if (state / "membership").exists():
        member = Membership(state / "membership")
        server = server or member.server
        name = name or member.name
    if server is None:
        raise UserError(
            "join a server first (isthmus datacenter join HOST:PORT TOKEN --state DIR), or give "
            "the --server on this machine"
        )
    return server, name or "datacenter", member


def _serve(
    server: str,
    name: str,
    ranks: int,
    state: Path,
    data: Path | None,
    tasks: Path | None,
    nodes: Any,
    grace: float,
    member: Membership | None,
    blobs: tuple[str, ...],
    proxy: ProxyChoice,
) -> None:
    from isthmus.transport.blob_sources import NamedSource

    sources = [NamedSource(named) for named in blobs]
    if tasks is not None and not tasks.is_dir():
        raise UserError(f"--tasks {tasks} is not a directory on this machine")
    _quiet_store()
    from isthmus_datacenter.service.fork_server import AgentForkServer
    from isthmus_datacenter.service.service import DatacenterService

    lock = contextlib.nullcontext() if member is None else member.locked()
    with (
        lock,
        AgentForkServer("fork") if nodes is None else contextlib.nullcontext() as fork_server,
    ):
        if member is not None:
            tasks = tasks or member.tasks
        service = DatacenterService(
            name, ranks, state, data, tasks=tasks, nodes=nodes, fork_server=fork_server
        )
        serving = service.serve(server, member, sources, proxy)
        asyncio.run(_serve_until_signal(service, serving, grace))


async def _serve_until_signal(
    service: Any, serving: Coroutine[Any, Any, None], grace: float
) -> None:
    """Serve until a signal: the first leaves in good order, the second ends at once."""
    serve_task = asyncio.ensure_future(serving)
    loop = asyncio.get_running_loop()

    def handle_signal() -> None:
        if service.leaving:
            serve_task.cancel()
        else:
            service.leave(grace)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, handle_signal)
    loop.add_signal_handler(signal.SIGINT, serve_task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serve_task
