"""Run a scenario: the real coordinator with virtual devices, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from regime_simulation import data_sets
from regime_simulation.scenario import HOUR, Scenario, job_for

from isthmus.errors import JobError, TaskError
from isthmus.job import Job
from isthmus.task.scoring import build_model
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.virtual import VirtualDatacenter
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import Event, EventStream, RoundCommitted, RunFinished
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.store import Store
from isthmus_server.transport.inprocess import InProcessLink
from isthmus_simulation.devices.device import VirtualDevice, devices_of
from isthmus_simulation.devices.fleet import VirtualFleet

P = ParamSpec("P")
T = TypeVar("T")

MONDAY = 4 * 24 * HOUR
"""Start of every scenario: the first Monday after 1970-01-01, 00:00 UTC."""

TOLERANCE = 0.04
"""Tolerance of `run.target_edge_share`, because classes are not equally frequent."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Cost, transfers and score of a run after a round."""

    cost: float
    transfers: int
    """Models, gradients and updates sent to or by devices so far."""
    score: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of a run."""

    score: float
    """Score of the served model on the test set: `data_sets.score`."""
    rounds: Mapping[str, int]
    """Committed rounds by regime."""
    comparisons: int
    """Number of model comparisons on devices."""
    decisions: str
    """Digest of the regime and the reason of each round; the reasons contain the numbers."""
    cost: float
    ended: str
    """Reason for the end of the run."""
    seconds: float
    """Duration in real time."""
    trace: tuple[Point, ...]
    """Empty unless it was requested."""


class SynchronousExecutor(ThreadPoolExecutor):
    """Runs submitted work at once in the calling thread, which has nothing else to do."""

    def submit(self, work: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Run the work and return a completed future."""
        future: Future[T] = Future()
        try:
            future.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)
        return future


class Unreliable:
    """A virtual device that fails a share of its requests, the same ones in every run."""

    def __init__(self, device: VirtualDevice, dropout: float) -> None:
        self._device = device
        self._draw = random.Random(f"dropout/{device.participant.name}")
        self._dropout = dropout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Do what the device does, or fail."""
        is_training = request.WhichOneof("work") in ("train_local", "score")
        if is_training and self._draw.random() < self._dropout:
            raise TaskError("the device is switched off")
        return await self._device.work(request, model, progress)


class SimulatedClock(Clock):
    """Virtual time, in which devices connect and disconnect at their hours; also counts the work.

    Each committed round takes an hour; a wait takes its own duration.
    """

    def __init__(self, scenario: Scenario, link: InProcessLink) -> None:
        self.scenario = scenario
        self.link = link
        self.elapsed = 0.0
        self.devices = _devices(scenario.split.clients)
        self.rounds: dict[str, int] = {}
        self.comparisons = 0
        self.decisions = hashlib.sha256()
        self.transfers = 0
        self.cost = 0.0
        self.ended = ""
        link.join("datacenter-0", link_pb2.DATACENTER, VirtualDatacenter())
        self._update_connections()

    def now(self) -> float:
        """Seconds since 1970, UTC."""
        return MONDAY + self.elapsed

    utc = now

    async def sleep(self, seconds: float) -> None:
        """Advance the virtual time, and let devices connect whose hours begin."""
        self.elapsed += seconds
        self._update_connections()
        await self.link.idle()

    def count(self, event: Event) -> None:
        """Count rounds, costs and transfers from the coordinator's events."""
        if isinstance(event, RoundCommitted):
            record = event.record
            self.elapsed += HOUR
            self.rounds[record.regime] = self.rounds.get(record.regime, 0) + 1
            self.decisions.update(f"{record.regime}: {record.reason}\n".encode())
            results = [
                comparison.result
                for comparison in record.comparisons
                if comparison.result is not None
            ]
            self.comparisons += len(results)
            self.cost += record.cost.price
            self.transfers += sum(_vectors(receipt) for receipt in record.receipts)
            self.transfers += sum(result.devices * len(result.models) for result in results)
        elif isinstance(event, RunFinished):
            self.ended = event.reason

    def _update_connections(self) -> None:
        available = set(self.scenario.zones_at(int(self.elapsed // HOUR)))
        for index, device in enumerate(self.devices):
            name = device.participant.name
            if index % self.scenario.split.zones in available:
                if name not in self.link.peers:
                    dropout = self.scenario.federated.dropout
                    peer = Unreliable(device, dropout) if dropout else device
                    self.link.join(name, link_pb2.CLIENT, peer)
            elif name in self.link.peers:
                self.link.leave(name, "its window has closed")


def _vectors(receipt: Receipt) -> int:
    """Number of models, gradients and updates of one device; all have the same size."""
    if receipt.regime != "federated" or not receipt.bytes_in:
        return 0
    return 1 + round(receipt.bytes_out / receipt.bytes_in)


@functools.lru_cache(maxsize=1)
def _devices(clients: int) -> list[VirtualDevice]:
    """Virtual devices, cached because runs of the same task and seed share their task."""
    return devices_of(VirtualFleet(clients))


def simulate(
    scenario: Scenario,
    seed: int,
    folder: Path,
    changes: Mapping[str, Any],
    trace_every: int = 0,
    read: Callable[[Store], None] = lambda store: None,
) -> Outcome:
    """Run one policy in a scenario; `changes` are keys of the job's `strategy`.

    Args:
        scenario: the scenario.
        seed: of the data's split and of the training.
        folder: with the files of the data set.
        changes: see `scenario.job_for`.
        trace_every: rounds between scores of the served model; 0: only at the end.
        read: is given the store of the run when it has ended.
    """
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="regimes-", dir=memory if os.access(memory, os.W_OK) else None
    ) as scratch:
        return asyncio.run(
            _simulate(scenario, seed, folder, changes, trace_every, Path(scratch), read)
        )


async def _simulate(
    scenario: Scenario,
    seed: int,
    folder: Path,
    changes: Mapping[str, Any],
    trace_every: int,
    scratch: Path,
    read: Callable[[Store], None],
) -> Outcome:
    started = time.monotonic()
    asyncio.get_running_loop().set_default_executor(SynchronousExecutor())
    job = job_for(scenario, seed, folder, dict(changes))
    _check_target(scenario, job)
    store = Store.create(scratch / "run", job, Path(__file__).parent)
    link = InProcessLink()
    clock = SimulatedClock(scenario, link)
    trace: list[Point] = []

    def trace_score(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.record.round % trace_every == 0:
            trace.append(Point(clock.cost, clock.transfers, _score(scenario, coordinator)))

    events = EventStream()
    events.subscribe(clock.count)
    if trace_every:
        events.subscribe(trace_score)
    try:
        coordinator = Coordinator(RunParts.of(store, link, events, clock))
        await coordinator.run()
        final = _score(scenario, coordinator)
        read(store)
    finally:
        store.close()
    return Outcome(
        score=final,
        rounds=dict(clock.rounds),
        comparisons=clock.comparisons,
        decisions=clock.decisions.hexdigest()[:16],
        cost=coordinator.state.spent,
        ended=clock.ended,
        seconds=time.monotonic() - started,
        trace=(*trace, Point(coordinator.state.spent, clock.transfers, final))
        if trace_every
        else (),
    )


def _check_target(scenario: Scenario, job: Job) -> None:
    """Check the share that is declared to the policies, because they rely on it.

    Raises:
        JobError: the devices have another share of the target.
    """
    task = job.task
    assert task.data is not None
    declared, split = job.strategy.target_edge_share, dict(task.settings["split"])
    share = data_sets.edge_share(scenario.data, Path(task.data), split, task.settings["split_seed"])
    if abs(share - declared) > TOLERANCE:
        raise JobError(
            f"scenario {scenario.name!r} declares run.target_edge_share={declared:g}, and its "
            f"devices have the classes of {share:.0%} of the test rows"
        )


@torch.no_grad()
def _score(scenario: Scenario, coordinator: Coordinator) -> float:
    """Score of the served model on the test set."""
    model = coordinator.model
    module = build_model(model.task, 0)
    model.layout.scatter(model.served_vector, module)
    evaluated = scenario.eval_data == "target"
    rows, _ = data_sets.test_rows(scenario.data, model.task.data, evaluated)
    assert isinstance(model.task, data_sets.Simulated)
    return data_sets.score(scenario.data, module, model.task.named(rows))
