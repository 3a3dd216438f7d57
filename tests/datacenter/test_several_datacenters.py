"""Several datacenters train one model with DiLoCo (Douillard et al. 2023)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.job import Job
from isthmus.task import Participant
from isthmus.task.scoring import build_model, losses
from isthmus_datacenter.service.service import DatacenterService
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

STEPS = 4
DATACENTERS = {1: ["first"], 2: ["first", "late"], 3: ["first", "late"]}
"""The datacenters that take part in each round."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@pytest.fixture
def job(make_setup: Any) -> Job:
    settings = {"own_data": True, "options": {"lr": 0.02}}
    job: Job = make_setup("Table", settings, ranks=0, steps=STEPS, optimizer_on_load="keep").job
    strategy = job.strategy.model_copy(
        update={
            "policy": "datacenter",
            "server_optimizer": job.strategy.server_optimizer.model_copy(update={"options": OUTER}),
        }
    )
    time = job.time.model_copy(update={"join_seconds": 600.0})
    return job.model_copy(update={"rounds": len(DATACENTERS), "strategy": strategy, "time": time})


class ReferenceWorker:
    """One datacenter in plain PyTorch; it keeps its optimizer from round to round."""

    def __init__(self, job: Job, task: Any, name: str) -> None:
        participant = Participant(name=name, regime="datacenter")
        self.task = task
        self.model = build_model(task, job.seed)
        self.optimizer = task.optimizer(self.model.parameters(), participant)
        self.data = task.local_data(participant)
        size = job.datacenter.batch_size
        self.order = ExampleOrder(
            examples=len(self.data), replicas=1, batch_size=size, seed=job.seed
        )

    def train(self, model: nn.Module, first: int) -> list[torch.Tensor]:
        """The pseudo-gradient of a round."""
        self.model.load_state_dict(model.state_dict())
        for step in range(first, first + STEPS):
            rows = [self.data[i] for i in self.order.indices(step, step + 1, 0)]
            inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
            _, values = losses(self.task, self.model, inputs, target)
            values.mean().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return [(before - after).detach() for before, after in pairs]


def reference_model(setup: Any, job: Job) -> nn.Module:
    model = build_model(setup.task, job.seed)
    outer = torch.optim.SGD(model.parameters(), **OUTER)  # type: ignore[arg-type]
    workers: dict[str, ReferenceWorker] = {}
    for round_, names in DATACENTERS.items():
        parts = []
        for name in names:
            worker = workers.setdefault(name, ReferenceWorker(job, setup.task, name))
            parts.append(worker.train(model, (round_ - 1) * STEPS))
        if len(parts) == 1:  # a round of one datacenter is plain training
            model.load_state_dict(workers[names[0]].model.state_dict())
            continue
        for parameter, *both in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(both) / len(both)
        outer.step()
    return model


@contextlib.asynccontextmanager
async def serving(name: str, state: Path, port: int) -> AsyncIterator[None]:
    service = DatacenterService(name, 1, state)
    task = asyncio.create_task(service.serve(f"127.0.0.1:{port}"))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class ArrivalClock(Clock):
    """A clock that waits for participants before every round: the coordinator sleeps there."""

    def __init__(self, wait_for_arrivals: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._wait_for_arrivals = wait_for_arrivals

    async def sleep(self, seconds: float) -> None:
        await self._wait_for_arrivals()
        await super().sleep(seconds)


async def test_two_datacenters_and_one_that_joins_late(
    job: Job, make_setup: Any, tmp_path: Path
) -> None:
    setup = make_setup("Table", job.task.settings)
    store = Store.create(tmp_path / "run", job, Path(__file__).parent)
    link = Link(job.time.lease_seconds)
    port = await link.start()
    async with contextlib.AsyncExitStack() as services:

        async def wait_for_datacenters() -> None:
            names = DATACENTERS[store.run_state().round + 1]
            if names[-1] not in link.peers:
                await services.enter_async_context(serving(names[-1], tmp_path / names[-1], port))
            assert await coordinator.roster.wait_for(datacenters=names)

        coordinator = Coordinator(
            RunParts.of(store, link, clock=ArrivalClock(wait_for_datacenters))
        )
        try:
            await coordinator.run()
        finally:
            store_document = read_report(store).to_json()
            await link.stop()
            store.close()
    expected = setup.layout.gather(reference_model(setup, job))
    assert (coordinator.model.vector - expected).abs().max() < 1e-6
    receipts = [
        [(receipt["participant"], receipt["reason"]) for receipt in row["receipts"]]
        for row in store_document["rounds"]
    ]
    note = (
        "the optimizer kept at step 4 is a new one: this datacenter did not train the steps before"
    )
    assert receipts == [
        [("first", "")],
        [("first", ""), ("late", note)],
        [("first", ""), ("late", "")],
    ]
