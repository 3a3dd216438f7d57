"""One run of a scenario: the real coordinator over virtual devices, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from regime_simulation import letters
from regime_simulation.scenario import HOUR, Scenario, job_for

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2
from isthmus_clients.virtual.fleet import VirtualFleet
from isthmus_datacenter.virtual import VirtualDatacenter
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import Event, EventStream, RoundCommitted, RunFinished
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.store import Store
from isthmus_server.transport.inprocess import InProcessLink

P = ParamSpec("P")
T = TypeVar("T")

MONDAY = 4 * 24 * HOUR
"""When every scenario begins: the first Monday after 1970-01-01, 00:00 UTC."""


TOLERANCE = 0.04
"""Of `run.target_edge_share`: letters are not equally frequent."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood after a round."""

    cost: float
    transfers: int
    """Models, gradients and updates that went to or came from devices so far."""
    accuracy: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    accuracy: float
    """Of the served model on the test set, in per cent."""
    rounds: Mapping[str, int]
    """Committed ones, by regime."""
    comparisons: int
    """Model comparisons on devices."""
    cost: float
    ended: str
    """Why, in words."""
    seconds: float
    """Real time."""
    trace: tuple[Point, ...]
    """Empty unless it was asked for."""


class AtOnce(ThreadPoolExecutor):
    """Does what is handed to a thread without one: nothing else is there to do meanwhile."""

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Returns a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            future.set_exception(error)
        return future


class World(Clock):
    """Virtual time, and who is there when.

    Each committed round takes an hour; waiting takes what it takes.
    """

    def __init__(self, scenario: Scenario, link: InProcessLink) -> None:
        self.scenario = scenario
        self.link = link
        self.elapsed = 0.0
        self.fleet = _fleet(scenario.split.clients)
        self.rounds: dict[str, int] = {}
        self.comparisons = 0
        self.transfers = 0
        self.cost = 0.0
        self.ended = ""
        link.join("datacenter-0", link_pb2.DATACENTER, VirtualDatacenter())
        self._come_and_go()

    def now(self) -> float:
        """Seconds since 1970, UTC."""
        return MONDAY + self.elapsed

    utc = now

    async def sleep(self, seconds: float) -> None:
        """Let virtual time go by, and whoever comes with it be heard."""
        self.elapsed += seconds
        self._come_and_go()
        await self.link.idle()

    def count(self, event: Event) -> None:
        """Count what the coordinator does."""
        if isinstance(event, RoundCommitted):
            record = event.record
            self.elapsed += HOUR
            self.rounds[record.regime] = self.rounds.get(record.regime, 0) + 1
            results = [one.result for one in record.comparisons if one.result is not None]
            self.comparisons += len(results)
            self.cost += record.cost.price
            self.transfers += sum(_vectors(receipt) for receipt in record.receipts)
            self.transfers += sum(result.devices * len(result.models) for result in results)
        elif isinstance(event, RunFinished):
            self.ended = event.reason

    def _come_and_go(self) -> None:
        here = set(self.scenario.zones_at(int(self.elapsed // HOUR)))
        for index, device in enumerate(self.fleet.devices):
            name = device.participant.name
            if index % self.scenario.split.zones in here:
                if name not in self.link.peers:
                    self.link.join(name, link_pb2.CLIENT, device)
            elif name in self.link.peers:
                self.link.leave(name, "its window has closed")


def _vectors(receipt: Receipt) -> int:
    """What one device was sent and sent, in models; an update is as large as one."""
    if receipt.regime != "federated" or not receipt.bytes_in:
        return 0
    return 1 + round(receipt.bytes_out / receipt.bytes_in)


@functools.lru_cache(maxsize=1)
def _fleet(clients: int) -> VirtualFleet:
    """Kept from run to run: runs of the same task and seed share the data that they read."""
    return VirtualFleet(clients)


def simulate(
    scenario: Scenario, seed: int, data: Path, changes: Mapping[str, Any], trace_every: int = 0
) -> Outcome:
    """Run one policy in a scenario; `changes` are keys of the job's `strategy`.

    Args:
        scenario: what is simulated.
        seed: of the data's split and of the training.
        data: the file of UCI letter recognition.
        changes: see `scenario.job_for`.
        trace_every: score the served model after every so many rounds; 0: at the end only.
    """
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="regimes-", dir=memory if os.access(memory, os.W_OK) else None
    ) as scratch:
        return asyncio.run(_simulate(scenario, seed, data, changes, trace_every, Path(scratch)))


async def _simulate(
    scenario: Scenario,
    seed: int,
    data: Path,
    changes: Mapping[str, Any],
    trace_every: int,
    scratch: Path,
) -> Outcome:
    started = time.monotonic()
    asyncio.get_running_loop().set_default_executor(AtOnce())
    job = job_for(scenario, seed, data, dict(changes))
    _check_target(scenario, job)
    store = Store.create(scratch / "run", job, Path(__file__).parent)
    link = InProcessLink()
    world = World(scenario, link)
    trace: list[Point] = []

    def trace_score(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.record.round % trace_every == 0:
            trace.append(Point(world.cost, world.transfers, score(coordinator)))

    events = EventStream()
    events.subscribe(world.count)
    if trace_every:
        events.subscribe(trace_score)
    try:
        coordinator = Coordinator(store, link, events, world)
        await coordinator.run()
        accuracy = score(coordinator)
    finally:
        store.close()
    return Outcome(
        accuracy=accuracy,
        rounds=dict(world.rounds),
        comparisons=world.comparisons,
        cost=coordinator.state.spent,
        ended=world.ended,
        seconds=time.monotonic() - started,
        trace=(*trace, Point(coordinator.state.spent, world.transfers, accuracy))
        if trace_every
        else (),
    )


def _check_target(scenario: Scenario, job: Job) -> None:
    """What is declared to the policies must be so: they can only go by it.

    Raises:
        JobError: another share of the target lives on the devices.
    """
    task = job.task
    assert task.data is not None
    declared, split = scenario.run.target_edge_share, dict(task.settings["split"])
    share = letters.edge_share(Path(task.data), split, task.settings["split_seed"])
    if abs(share - declared) > TOLERANCE:
        raise JobError(
            f"scenario {scenario.name!r} declares run.target_edge_share={declared:g}, and its "
            f"devices have the classes of {share:.0%} of the test rows"
        )


@torch.no_grad()
def score(coordinator: Coordinator) -> float:
    """Accuracy of the served model on the test set, in per cent."""
    model = coordinator.model
    module = build_model(model.task, 0)
    model.layout.scatter(model.served_vector, module)
    _, (inputs, target) = letters.read(model.task.data)
    return 100.0 * float((module(inputs).argmax(-1) == target).float().mean())
