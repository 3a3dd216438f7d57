"""``isthmus datacenter``: what a person types, and what the schedulers' scripts type for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from isthmus.errors import UserError
from isthmus.identity.membership import Membership
from isthmus.identity.tls import split_address
from isthmus_datacenter.launch import Launch, check_private, kubernetes, parse_options, slurm

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_PATH = click.Path(exists=True, path_type=Path)


@click.group()
def datacenter() -> None:
    """The datacenter's part of a run: a group of ranks behind one service."""


def _service_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What `launch` and `serve` have in common."""
    for option in (
        click.option(
            "--server", metavar="HOST:PORT", help="The server to dial. Default: the one joined."
        ),
        click.option(
            "--name", help="Name on the server. Default: as joined, or else `datacenter`."
        ),
        click.option(
            "--ranks", required=True, type=click.IntRange(1, 1024), help="Ranks on each node."
        ),
        click.option(
            "--nodes",
            default=1,
            show_default=True,
            type=click.IntRange(1, 1024),
            help="Machines; more than one needs a scheduler.",
        ),
        click.option(
            "--state",
            required=True,
            type=_DIRECTORY,
            help="Directory for checkpoints and logs; keep it to go on after a restart.",
        ),
        click.option(
            "--data",
            type=_PATH,
            help="Where this datacenter's data is, instead of where the job says.",
        ),
        click.option(
            "--tasks",
            type=_DIRECTORY,
            help="Where the tasks are that may be loaded here. Default: tasks, in --state.",
        ),
        click.option(
            "--grace",
            default=60.0,
            show_default=True,
            type=click.FloatRange(0),
            help="Seconds for a running round to end when told to leave (SIGTERM, SIGUSR1).",
        ),
    ):
        command = option(command)
    return command


@datacenter.command()
@click.argument("url", metavar="HOST:PORT")
@click.argument("token")
@click.option(
    "--state", required=True, type=_DIRECTORY, help="The directory that `launch` is given."
)
def join(url: str, token: str, state: Path) -> None:
    """Join the server at HOST:PORT with a TOKEN from its operator."""
    from isthmus.identity import joining

    parsed = joining.Token.parse(token)
    member = asyncio.run(joining.join(url, parsed, state / "membership", "datacenter"))
    click.echo(f"this datacenter is {member.name!r} at {member.server}")


@datacenter.command()
@_service_options
@click.option(
    "--scheduler",
    type=click.Choice(["local", "slurm", "kubernetes"]),
    default="local",
    show_default=True,
    help="What starts the ranks.",
)
@click.option(
    "--env-file", type=_PATH, help="Variables for service and ranks; mode 0600 if it has secrets."
)
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="For the scheduler; repeat."
)
@click.option("--dry-run", is_flag=True, help="Print the script or manifest and start nothing.")
@click.option("--die-with-parent", is_flag=True, help="End when the starting process ends.")
def launch(
    server: str | None,
    name: str | None,
    ranks: int,
    nodes: int,
    state: Path,
    data: Path | None,
    tasks: Path | None,
    grace: float,
    scheduler: str,
    env_file: Path | None,
    options: tuple[str, ...],
    dry_run: bool,
    die_with_parent: bool,
) -> None:
    """Start ranks and offer them to a server."""
    if env_file is not None:
        check_private(env_file)
    server, name, member = _membership(server, name, state)
    asked = Launch(
        server=server,
        name=name,
        ranks=ranks,
        nodes=nodes,
        state=state.resolve(),
        data=None if data is None else data.resolve(),
        tasks=None if tasks is None else tasks.resolve(),
        environment=None if env_file is None else env_file.resolve(),
        options=parse_options(options),
        grace_seconds=grace,
    )
    if scheduler == "local":
        if nodes > 1 or options or env_file is not None:
            raise UserError("--nodes, --option and --env-file need --scheduler slurm or kubernetes")
        if dry_run:
            click.echo(asked.serve("127.0.0.1:0"))
            return
        if die_with_parent:
            from isthmus.system import process

            process.die_with_parent()
        # Whoever starts us like that ends us when nobody wants the round any more.
        grace = 0.0 if die_with_parent else grace
        _serve(server, name, ranks, state, data, tasks, None, grace, member)
        return
    renderer = slurm if scheduler == "slurm" else kubernetes
    if dry_run:
        click.echo(renderer.render(asked), nl=False)
    else:
        click.echo(f"{scheduler}: {renderer.submit(asked)}")


@datacenter.command()
@_service_options
@click.option("--control", required=True, metavar="HOST:PORT", help="Where agents find this.")
def serve(
    server: str | None,
    name: str | None,
    ranks: int,
    nodes: int,
    state: Path,
    data: Path | None,
    tasks: Path | None,
    grace: float,
    control: str,
) -> None:
    """Be the service of a cluster whose nodes each run `isthmus datacenter agent`."""
    host, port = split_address(control, "--control")
    from isthmus_datacenter.service.rank_group import Nodes

    place = None if port == 0 else Nodes(count=nodes, host=host, port=port)
    server, name, member = _membership(server, name, state)
    _serve(server, name, ranks, state, data, tasks, place, grace, member)


@datacenter.command()
@click.option("--control", required=True, metavar="HOST:PORT", help="The service's.")
def agent(control: str) -> None:
    """Run this node's ranks for the service at --control, until told to leave."""
    host, port = split_address(control, "--control")
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: told.set())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from isthmus_datacenter.service.agents import serve_node

    serve_node(host, port, told.is_set)


def _membership(
    server: str | None, name: str | None, state: Path
) -> tuple[str, str, Membership | None]:
    """Where to dial and as whom: as joined, or, on one machine, as told."""
    member = None
    if (state / "membership").exists():
        member = Membership(state / "membership")
        server, name = server or member.server, name or member.name
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
) -> None:
    if tasks is not None and not tasks.is_dir():
        raise UserError(f"--tasks {tasks} is not a directory of this machine")
    # Before torch is imported: its store warns about every wait that ends without an answer.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
        asyncio.run(_until_told(service, service.serve(server, member), grace))


async def _until_told(service: Any, serving: Coroutine[Any, Any, None], grace: float) -> None:
    """Serve until a signal: the first asks to leave in good order, another one ends at once."""
    work = asyncio.ensure_future(serving)
    loop = asyncio.get_running_loop()

    def told() -> None:
        if service.leaving:
            work.cancel()
        else:
            service.leave(grace)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, told)
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
