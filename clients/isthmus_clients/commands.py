"""``isthmus client``: commands for device owners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus.identity import joining
from isthmus.identity.membership import Membership, default_state
from isthmus.identity.proxies import ProxyChoice, Road
from isthmus.identity.proxy_options import NAMES, proxy_options
from isthmus.identity.token_options import token_options
from isthmus.system import process
from isthmus.task import Participant
from isthmus.transport.blob_sources import NamedSource
from isthmus_clients.device import resource_limits
from isthmus_clients.device.agent import Agent, serve
from isthmus_clients.device.own_figures import OwnFigures
from isthmus_clients.device.own_link import OwnLink
from isthmus_clients.device.owner_limits import LimitsGuard, load
from isthmus_clients.device.sandbox.process_host import ProcessHost
from isthmus_clients.device.systemd import GRACE_SECONDS, unit
from isthmus_clients.device.task_host import own_secret
from isthmus_clients.device.update_tally import UpdateTally
from isthmus_clients.device.weights.keeper import WeightKeeper
from isthmus_clients.device.weights.store import DIRECTORY as WEIGHTS
from isthmus_clients.device.weights.store import WeightStore
from isthmus_clients.training.accelerator import check_choice
from isthmus_clients.training.examples_account import LEDGER_NAME, ExamplesAccount, spent_of
from isthmus_clients.training.history_files import begin_history, replace_history
from isthmus_clients.training.personal_state import PersonalStates
from isthmus_privacy.dp_sgd.device_examples import EXAMPLE, ZERO_OUT


@click.group()
def client() -> None:
    """Run an edge device: train on its own data and send updates."""


_STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state("client"),
    show_default="~/.local/state/isthmus/client",
    help="Directory of this device's keys and history of rounds.",
)


@client.command()
@token_options
@_STATE
@proxy_options
def join(url: str, token: joining.Token, state: Path, proxy: ProxyChoice) -> None:
    """Join the server with a TOKEN from its operator.

    It is at HOST:PORT, or behind a balancer that ends TLS at wss://HOST/PATH.
    """
    member = asyncio.run(joining.join(url, token, state, "client", proxy))
    begin = "isthmus client start"
    if state != default_state("client"):
        begin += f" --state {shlex.quote(str(state))}"
    click.echo(f"this device is {member.name!r} at {member.server}; begin with: {begin}")


@client.command("new-history")
@_STATE
def new_history(state: Path) -> None:
    """Begin a new record of the sums this device was in, if the old one is lost or damaged.

    A device takes part for a model again only with exactly the same devices. With a new record it
    does not know its earlier sums: a lying server could repeat one of them without some of its
    devices, and subtract to learn what these have contributed. The limits on participations begin
    at zero. An intact record is left as it is; the files of a damaged one are kept in old-history.
    """
    from isthmus_clients.training.history_log import HistoryLog

    member = Membership(state)
    with member.locked():
        try:
            entries = HistoryLog(member.history).entries
        except UserError:
            moved = replace_history(member)
        else:
            raise UserError(
                f"{member.history} is intact, with {len(entries)} entries; nothing was changed"
            )
    where = "" if moved is None else f"; the files of the old one are in {moved}"
    click.echo(f"{member.name} has a new, empty record of its sums{where}")


@client.command()
@_STATE
@click.option(
    "--delta",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=1e-6,
    show_default=True,
    help="Delta at which epsilon is computed: the job's, to compare it with the job's budget.",
)
def spent(state: Path, delta: float) -> None:
    """Verify this device's account of its examples, and print what each run has spent.

    It has the participations in jobs that protect the examples of devices ([federated.privacy]).
    """
    if math.isnan(delta):  # which is in no range, and out of none
        raise UserError("--delta nan is no number; give the job's delta")
    accounts = sorted(state.rglob(LEDGER_NAME))
    if not accounts:
        raise UserError(
            f"{state} has no account: this device was in no run with a table [federated.privacy]"
        )
    for account in accounts:
        together, runs = spent_of(account.parent, delta)
        for run, (count, epsilon) in runs.items():
            click.echo(f"{run}: {count} participations, epsilon {epsilon:.4g}")
        click.echo(
            f"together: epsilon {together:.4g} at delta {delta:g} for one {EXAMPLE} of this device "
            f"({ZERO_OUT}); the chain of {account} is intact"
        )


@client.command()
@_STATE
def status(state: Path) -> None:
    """Say where this device is linked, what its updates did, and what models achieve on its data.

    The address of the link is that of the server or of an aggregator, as the device dials it.
    """
    member = Membership(state)
    click.echo(f"{member.name} of {member.server}: {UpdateTally.read(state).sentence}")
    if link := OwnLink.read(state).sentence:
        click.echo(link if member.is_in_use else "not running")
    for sentence in OwnFigures.read(state).sentences:
        click.echo(f"on its own data: {sentence}")


@client.command()
@_STATE
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Address of the server (also wss://HOST/PATH, behind a balancer that ends TLS), if it "
    "differs from the one that was joined, or of an aggregator; several are tried in turn.",
)
@click.option(
    "--name", help="Name of the device, for a server on this machine that requires no certificate."
)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="Data of this device; overrides the job's task.data.",
)
@click.option(
    "--tasks",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Directory of the tasks that this device may load. Default: tasks in --state.",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Use shard I (from 0) of N of one data set, for tasks that split it.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="CPU threads used for training.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="auto|cpu|cuda|mps",
    help="What to train on; auto takes a GPU if there is one, and cuda:1 the second one.",
)
@click.option(
    "--hours",
    multiple=True,
    metavar="[DAYS ]HH:MM-HH:MM",
    help="Work only in these hours (UTC), such as 22:00-06:00; may be repeated.",
)
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The owner's limits. Default: policy.toml in --state.",
)
@click.option(
    "--blobs",
    multiple=True,
    metavar="KIND:TARGET",
    help="Where models and packages may be besides the server, such as file:/srv/blobs; may be "
    "repeated.",
)
@click.option(
    "--weights",
    "store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Store of the files that models start from, which devices of one machine may share. "
    "Default: weights in --state.",
)
@proxy_options
@click.option("--print-systemd", is_flag=True, help="Print a systemd unit and exit.")
@click.option("--die-with-parent", is_flag=True, help="Exit when the parent process exits.")
@click.option(
    "--log-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that standard error goes to, to be named in failures; only with --name.",
)
def start(
    state: Path,
    servers: tuple[str, ...],
    name: str | None,
    data: Path | None,
    tasks: Path | None,
    shard: str | None,
    threads: int,
    device: str,
    hours: tuple[str, ...],
    policy_file: Path | None,
    blobs: tuple[str, ...],
    store: Path | None,
    proxy: ProxyChoice,
    print_systemd: bool,
    die_with_parent: bool,
    log_file: Path | None,
) -> None:
    """Connect to the server and take part in its rounds until stopped.

    SIGTERM or Ctrl-C lets a running request end, for up to 30 s; a second one gives it up.

    The log goes to standard error. With secure aggregation it is the only place that says why this
    device could not do something: the server is not told.
    """
    if die_with_parent:
        process.die_with_parent()
    logging.getLogger("isthmus").setLevel(logging.INFO)
    _check_hours(hours)
    check_choice(device)
    split = _parse_shard(shard)
    sources = [NamedSource(named) for named in blobs]
    if name is not None:
        if proxy:
            raise UserError(f"{NAMES} need a device that has joined; remove --name")
        if policy_file is not None or tasks is not None or store is not None or print_systemd:
            raise UserError(
                "--policy, --tasks, --weights and --print-systemd need a device that has joined; "
                "remove --name"
            )
        if len(servers) != 1:
            raise UserError("--name is for a server on this machine; give it with --server")
        participant = Participant(name=name, regime="federated", shard=split)
        states = PersonalStates(state / "personal")
        agent = Agent(
            participant,
            data,
            threads,
            hours,
            log_file=log_file,
            device=device,
            states=states,
            residuals=state / "residuals",
            account=ExamplesAccount(state / "examples" / name),
            own_figures=OwnFigures(None),
            shares=die_with_parent,
        )
        asyncio.run(_serve_until_stopped(servers, agent, None, sources))
        return
    if log_file is not None:
        raise UserError("--log-file would tell a remote server about this machine; remove it")
    member = Membership(state)
    limits = load(policy_file or state / "policy.toml")
    if print_systemd:
        command = [sys.executable, "-m", "isthmus.cli", *sys.argv[1:]]
        command = [word for word in command if word != "--print-systemd"]
        command += _of_variables(member.road(proxy, servers[0] if servers else ""), proxy)
        writable = [str(path.resolve()) for path in (state, tasks, store) if path is not None]
        click.echo(unit(command, str(Path.cwd()), limits, writable))
        return
    process.protect_memory()
    resource_limits.apply_limits(limits)
    guard = LimitsGuard(limits, state / "usage.json")
    participant = Participant(name=member.name, regime="federated", shard=split)
    tasks = tasks or member.tasks
    threads = resource_limits.max_threads(threads, limits)
    keeper = WeightKeeper(
        WeightStore(store or state / WEIGHTS), guard, tasks, hours=hours, blobs=sources
    )
    with member.locked():
        host = ProcessHost(
            participant,
            data,
            tasks,
            threads,
            state=state,
            limits=limits,
            device=device,
            weights=keeper,
            secret=own_secret(member.identity),
        )
        agent = Agent(
            participant,
            data,
            threads,
            hours or limits.hours,
            signing_key=member.identity,
            history_file=begin_history(member),
            residuals=state / "residuals",
            account=ExamplesAccount(state, limits.privacy.examples_epsilon, limits.privacy.delta),
            tally=UpdateTally(state),
            own_figures=OwnFigures(state),
            own_link=OwnLink(state),
            tasks=tasks,
            guard=guard,
            host=host,
            group=limits.privacy.group or "",
            weights=keeper,
        )
        asyncio.run(
            _serve_until_stopped(servers or (member.server,), agent, member, sources, proxy)
        )


def _of_variables(road: Road, proxy: ProxyChoice) -> list[str]:
    """The options for the proxy of a variable, which a systemd service does not have.

    `proxy` is what the command line has already.

    Raises:
        UserError: the variable has a password, which has no place in a unit.
    """
    if road.proxy is None or not road.by_variable:
        return []
    if road.proxy.in_url:
        raise UserError(
            f"a systemd unit has no place for the proxy's password in {road.reason}: write "
            "USER:PASSWORD into a file of mode 0600 and give it with --proxy-login"
        )
    options = ["--proxy", str(road.proxy)]
    if road.proxy.login_file is not None and not proxy.login:
        options += ["--proxy-login", str(road.proxy.login_file)]
    return options


async def _serve_until_stopped(
    addresses: Sequence[str],
    agent: Agent,
    member: Membership | None,
    sources: Sequence[NamedSource],
    proxy: ProxyChoice | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM: the first lets the running request end, a second does not."""
    uplink = agent.uplink(addresses[0], member, sources, proxy, addresses[1:])
    serving = asyncio.create_task(serve(uplink, agent))
    leaving: asyncio.Task[None] | None = None

    def stop() -> None:
        nonlocal leaving
        if leaving is None:
            leaving = asyncio.create_task(uplink.leave(GRACE_SECONDS))
        else:
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    click.echo(f"{agent.participant.name} stopped")


def _check_hours(hours: tuple[str, ...]) -> None:
    """Refuse hours that are not of the form the server expects."""
    if hours:
        from isthmus.job.section import Hours

        for text in hours:
            Hours.parse(text)


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
