"""Running one job on a server whose participants are elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_server.coordinator import Coordinator
from isthmus_server.fleet.server import FleetServer
from isthmus_server.progress import Progress
from isthmus_server.store import Store


async def serve_job(
    server: FleetServer, job: Job, base: Path, state: Path, host: str, port: int, console: Console
) -> Path:
    """Listen, and run one job to its end, from where it last stood; returns the run directory.

    Raises:
        UserError: the job cannot be run here, or did not reach its end.
    """
    check_job(job)
    store = open_run(state / "runs" / job.name, job, base)
    try:
        async with server.listening(host, port):
            say_where(server, host, console)
            await run(server, store, console)
    finally:
        store.close()
    return store.directory


def say_where(server: FleetServer, host: str, console: Console) -> None:
    """Print the two addresses."""
    console.print(
        f"link at {host}:{server.link_port}, joining at {host}:{server.join_port}", soft_wrap=True
    )


async def run(server: FleetServer, store: Store, console: Console) -> None:
    """One run on a server that listens."""
    torch.set_num_threads(1)  # what the server computes is small beside the link's work
    with Progress(console) as progress:
        await Coordinator(store, server.link, progress).run()


def check_job(job: Job) -> None:
    """Refuse a job that wants its participants started here.

    Raises:
        UserError: with the keys to change.
    """
    for key, count in (
        ("federated.clients", job.federated.clients),
        ("datacenter.ranks", job.datacenter.ranks),
    ):
        if count:
            raise UserError(
                f"{key}={count} are started by `isthmus run`; here participants join by "
                f"themselves: add --set {key}=0"
            )


def open_run(directory: Path, job: Job, base: Path) -> Store:
    """The run in a directory: a new one, or the one that was cut off.

    Raises:
        UserError: a run of another job is in it, or one that is done.
    """
    if not (directory / "job.json").exists():
        return Store.create(directory, job, base)
    store = Store.open(directory)
    if store.job != job:
        store.close()
        raise UserError(
            f"{directory} holds a run of another job named {job.name!r}; change the job's name, or "
            "move that directory away"
        )
    return store
