"""What the process of a federated comparison runs: a server, and real devices in one process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.parity.tasks import DEVICES
from tests.server.deployment import FaultyDevice, never_delayed
from tests.server.loopback import LoopbackNetwork
from tests.server.waiting import wait_until

import isthmus
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store

HERE = Path(__file__).parent
_RUNNER = asyncio.Runner()
"""One event loop for all jobs: gRPC keeps the first one of a process."""


def train(rank: int, job: str, directory: str) -> str:
    """Train a job in a run directory; return the sentence if it is refused."""
    try:
        _RUNNER.run(_train(Job.model_validate_json(job), Path(directory)))
    except UserError as error:
        return str(error)
    return ""


async def _train(job: Job, directory: Path) -> None:
    network = LoopbackNetwork()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        link = await network.listen()
        lock = asyncio.Lock()
        for name in DEVICES:
            network.dial(FaultyDevice(name, lock, {}, never_delayed), name)
        await wait_until(lambda: DEVICES.keys() <= link.peers.keys())
        store = stack.enter_context(contextlib.closing(Store.create(directory, job, HERE)))
        await Coordinator(RunParts.of(store, link)).run()


def run(rank: int, job: str, directory: str) -> str:
    """The same by `isthmus.run`, with a process for each device."""
    tables = Job.model_validate_json(job).model_dump(mode="json", exclude_none=True)
    tables["task"]["source"] = f"{HERE}/{tables['task']['source']}"
    try:
        isthmus.run(tables, run_dir=directory, quiet=True)
    except UserError as error:
        return str(error)
    return ""
