"""A service with warm ranks that tests share, driven as the link would drive it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.warm_ranks import Ranks

from isthmus.job import Job, with_changes
from isthmus.task import Task, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_datacenter.service.service import DatacenterService

HERE = Path(__file__).parent


def descendants(pid: int) -> list[int]:
    """All processes below one, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")")[-1].split()
                parents[int(entry.name)] = int(fields[1])
            except OSError:
                continue
    found = [pid]
    for known in found:
        found.extend(child for child, parent in parents.items() if parent == known)
    return found[1:]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A job on one of the tasks here, and what a server would know of it."""

    job: Job

    @property
    def task(self) -> Task:
        return load_task(self.job.task.source, self.job.task.settings, base=HERE)

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout.of(build_model(self.task, self.job.seed))

    def opening(self, run_id: str, layout: TensorLayout | None = None) -> link_pb2.OpenRun:
        return link_pb2.OpenRun(
            run_id=run_id,
            job=self.job.model_dump_json(),
            base=str(HERE),
            layout=(layout or self.layout).header,
        )

    def command(self) -> dict[str, Any]:
        """The command by which ranks open this job."""
        return {
            "op": "open",
            "run_id": "run",
            "job": self.job.model_dump_json(),
            "base": str(HERE),
            "layout": self.layout.header.decode("latin-1"),
        }


def make_setup(
    name: str = "Table",
    settings: Mapping[str, Any] | None = None,
    lease_seconds: float = 60.0,
    **datacenter: Any,
) -> Setup:
    job = Job.model_validate(
        {
            "name": "test",
            "seed": 5,
            "task": {"source": f"tasks.py:{name}", "settings": dict(settings or {})},
            "datacenter": {"ranks": 2, "batch_size": 4, **datacenter},
            "time": {"lease_seconds": lease_seconds},
        }
    )
    return Setup(with_changes(job, {}))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models here are so small that a second thread only waits."""
    torch.set_num_threads(1)


@pytest.fixture(name="setup", scope="session")
def setup_() -> Any:
    """`setup("Table", {settings}, zero_stage=3)`."""
    return make_setup


class Driver:
    """Asks a service for things, one at a time, as the link does."""

    def __init__(self, service: DatacenterService) -> None:
        self.service = service
        self._runner = asyncio.Runner()
        self._count = 0

    def ask(self, model: bytes | None = None, **work: Any) -> tuple[link_pb2.Reply, bytes | None]:
        """One request; its reply and a copy of its content."""
        return self._runner.run(self.request(model, **work))

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def request(
        self, model: bytes | None = None, **work: Any
    ) -> tuple[link_pb2.Reply, bytes | None]:
        self._count += 1
        request = link_pb2.Request(id=f"request-{self._count}", **work)
        buffer = None
        if model is not None:
            buffer = self.service.buffer(request, len(model))
            buffer[:] = model
        reply, payload = await self.service.work(request, buffer, lambda progress: None)
        blob = None if payload is None else bytes(payload)
        self.service.acknowledged(request, True, "")
        return reply, blob

    def open(self, run_id: str, setup: Setup) -> int:
        return self.ask(open=setup.opening(run_id))[0].opened.examples

    def train(
        self, run_id: str, first: int, until: int, model: bytes | None = None, **more: Any
    ) -> tuple[link_pb2.Trained, bytes | None]:
        train = link_pb2.TrainSteps(run_id=run_id, from_step=first, until_step=until, **more)
        if model is not None:
            train.model.CopyFrom(describe(model))
        reply, blob = self.ask(model, train_steps=train)
        return reply.trained, blob

    def export(self, run_id: str, step: int) -> bytes:
        _, blob = self.ask(export=link_pb2.Export(run_id=run_id, step=step))
        assert blob is not None
        return blob

    def processes(self) -> list[int]:
        """Process ids of the ranks."""
        return sorted(self.run(self.service.group.rank_pids()).values())

    def close(self) -> None:
        self._runner.close()
        self.service.close()


@pytest.fixture(name="start")
def start_(tmp_path: Path) -> Iterator[Any]:
    """`start(state=...)`: a service of this test's own."""
    started: list[Driver] = []

    def start(state: Path | None = None, ranks: int = 2, **more: Any) -> Driver:
        driver = Driver(DatacenterService("own", ranks, state or tmp_path / "state", **more))
        started.append(driver)
        driver.service.start()
        return driver

    yield start
    for driver in started:
        driver.close()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A service with two ranks, shared by all tests; each opens runs of its own."""
    driver = Driver(DatacenterService("shared", 2, tmp_path_factory.mktemp("datacenter")))
    driver.service.start()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Any]:
    """`on_ranks(4, "train", works)`: what each of 4 ranks made of a function of ranks.py.

    All tests that ask for as many ranks have the same ones.
    """
    groups: dict[int, Ranks] = {}

    def run(count: int, function: str, *arguments: Any) -> list[Any]:
        group = groups.setdefault(count, Ranks(count))
        return group.run(HERE / "ranks.py", function, *arguments)

    yield run
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def vector() -> Any:
    """`vector(content, layout)`: the flat parameters in a content."""

    def read(blob: bytes, layout: TensorLayout) -> torch.Tensor:
        return layout.decode(bytearray(blob)).clone()

    return read
