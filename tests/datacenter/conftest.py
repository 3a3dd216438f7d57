"""Datacenter services with warm ranks that tests share, sent requests as the link sends them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_model
from tests.warm_ranks import Ranks

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus.start.files import StartFiles
from isthmus.task import Task, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import InFile, describe
from isthmus.wire import link_pb2
from isthmus_datacenter.commands import datacenter
from isthmus_datacenter.service.service import DatacenterService

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class JobSetup:
    """A job on one of the tasks in tasks.py, with what a server derives from it."""

    job: Job

    @property
    def task(self) -> Task:
        return load_task(self.job.task.source, self.job.task.settings, base=HERE)

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout.of(build_model(self.task, self.job.seed))

    def open_request(self, run_id: str, layout: TensorLayout | None = None) -> link_pb2.OpenRun:
        """The request by which a server opens this job."""
        return link_pb2.OpenRun(
            run_id=run_id,
            job=self.job.model_dump_json(),
            base=str(HERE),
            layout=(layout or self.layout).header,
        )

    def open_command(self) -> dict[str, Any]:
        """The fields of the command by which ranks open this job."""
        return {
            "op": "open",
            "run_id": "run",
            "job": self.job.model_dump_json(),
            "base": str(HERE),
            "layout": self.layout.header.decode("latin-1"),
        }


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The models here are so small that a second thread only waits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_setup() -> Callable[..., JobSetup]:
    """`make_setup("Table", {settings}, zero_stage=3)`: a job on a task, with datacenter keys."""

    def make(
        name: str = "Table",
        settings: Mapping[str, Any] | None = None,
        lease_seconds: float = 60.0,
        **section: Any,
    ) -> JobSetup:
        job = Job.model_validate(
            {
                "name": "test",
                "seed": 5,
                "task": {"source": f"tasks.py:{name}", "settings": dict(settings or {})},
                "datacenter": {"ranks": 2, "batch_size": 4, **section},
                "time": {"lease_seconds": lease_seconds},
            }
        )
        return JobSetup(with_changes(job, {}))

    return make


class DatacenterDriver:
    """Sends requests to a service, one at a time, as the link does."""

    def __init__(self, service: DatacenterService) -> None:
        self.service = service
        self._runner = asyncio.Runner()
        self._count = 0

    def ask(self, model: bytes | None = None, **work: Any) -> tuple[link_pb2.Reply, bytes | None]:
        """Send one request; returns its reply and a copy of its payload."""
        return self._runner.run(self.request(model, **work))

    def run(self, coroutine: Any) -> Any:
        return self._runner.run(coroutine)

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
        if isinstance(payload, InFile):
            payload = payload.read(0, len(payload))
        blob = None if payload is None else bytes(payload)
        self.service.acknowledged(request, True, "")
        return reply, blob

    def open(self, run_id: str, setup: JobSetup) -> int:
        """Open a run; returns the number of the datacenter's examples."""
        return self.ask(open=setup.open_request(run_id))[0].opened.examples

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

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the current ranks, by rank: a restarted rank has another one."""
        pids: dict[int, int] = self.run(self.service.group.rank_pids())
        assert len(pids) == self.service.group.ranks
        return pids

    def close(self) -> None:
        self._runner.close()
        self.service.close()


@pytest.fixture(name="start_datacenter")
def start_datacenter_(tmp_path: Path) -> Iterator[Callable[..., DatacenterDriver]]:
    """`start_datacenter(state=...)`: a service for one test."""
    drivers: list[DatacenterDriver] = []

    def start_datacenter(
        state: Path | None = None, ranks: int = 2, **more: Any
    ) -> DatacenterDriver:
        service = DatacenterService("own", ranks, state or tmp_path / "state", **more)
        drivers.append(DatacenterDriver(service))
        service.start()
        return drivers[-1]

    yield start_datacenter
    for driver in drivers:
        driver.close()


@pytest.fixture(scope="module")
def warm_datacenter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatacenterDriver]:
    """A service with two ranks that the tests of a file share; each test opens runs of its own.

    Not those of all files: each idle group of gloo wakes up a hundred times a second, and there are
    dozens for each layout that ranks have had.
    """
    driver = DatacenterDriver(DatacenterService("shared", 2, tmp_path_factory.mktemp("datacenter")))
    driver.service.start()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Any]:
    """`on_ranks(4, "train", works)`: the results of a function of ranks.py on each of 4 ranks.

    The tests of a file with the same number of ranks share them; see `warm_datacenter`.
    """
    groups: dict[int, Ranks] = {}

    def run(count: int, function: str, *arguments: Any) -> list[Any]:
        group = groups.setdefault(count, Ranks(count))
        return group.run(HERE / "ranks.py", function, *arguments)

    yield run
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def decode() -> Any:
    """`decode(blob, layout)`: the flat parameters in a blob."""

    def read(blob: bytes, layout: TensorLayout) -> torch.Tensor:
        return layout.decode(bytearray(blob)).clone()

    return read


def random_model(layout: TensorLayout, seed: int) -> bytes:
    """A model of small random parameters."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(layout.encode(0.1 * torch.randn(layout.size, generator=generator)))


def dry_run(*more: str, scheduler: str = "slurm", state: Path = Path("/shared/it's state")) -> str:
    """The output of `isthmus datacenter launch --dry-run`."""
    words = ["launch", "--server", "head:9402", "--name", "cluster-0", "--ranks", "4"]
    words += ["--nodes", "2", "--state", str(state), "--scheduler", scheduler, "--dry-run", *more]
    result = CliRunner().invoke(datacenter, words)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def wait_until(condition: Callable[[], Any]) -> None:
    """Poll a condition that other processes make true."""
    deadline = time.monotonic() + 300.0  # a guard against hangs
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start_setup(make_setup: Any, tmp_path: Path) -> Any:
    """A job that starts from a file with the values of another seed, and these values."""

    def start_setup(
        name: str = "Gpt", more: dict[str, Any] | None = None, **section: Any
    ) -> tuple[Any, torch.Tensor]:
        prepared = make_setup(name, **section)
        model = build_model(prepared.task, 99)
        path = tmp_path / "start.safetensors"
        save_model(model, str(path))  # of tied weights one
        digest = StartFiles.find(path).digest()
        changes = {"model.start": str(path), "model.sha256": digest, **(more or {})}
        setup = type(prepared)(with_changes(prepared.job, changes))
        return setup, setup.layout.gather(model)

    return start_setup
