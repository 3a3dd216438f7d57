"""Functions that benchmarks/datacenter.py runs on each rank: the engine and a plain PyTorch loop.

The plain loop is what a PyTorch user writes from its tutorials: a DistributedSampler and a
DataLoader, DDP or `fully_shard` per block, a mean loss, `backward`, `step`, `zero_grad`. Both loops
have a model of their own in the same processes and take turns in intervals of a few steps, each
begun on all ranks together and timed until the device is done. The engine runs `train_round`, which
measures its time itself; neither writes the checkpoint of a round. CPU time is measured as well as
wall-clock time, because other programs on the machine influence it less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.process_group import Device
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from isthmus.job import Job
from isthmus.task import Participant, Task, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.messages import Command, ControlSignal
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.round import train_round

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    peer: str
    """How the plain loop wraps its model: `single` (not at all), `ddp` or `fsdp`."""
    device: Device
    ranks: int
    steps: int
    """Steps in one interval."""
    intervals: int
    """Intervals of each loop, after a first one of each that is not counted."""
    job: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each interval of a case on its slowest rank."""

    engine: list[float]
    plain: list[float]
    engine_cpu: list[float]
    """CPU seconds, user and system, of all ranks together."""
    plain_cpu: list[float]
    words: int
    """Words that all ranks train on in one interval."""
    flops: float
    """Operations of one interval on all ranks, by the usual formula."""
    peak_bytes: int
    """Peak memory of the first device, with both models; 0 on a CPU."""


@contextlib.contextmanager
def _shared_directory(rank: int) -> Iterator[Path]:
    """A new directory that all ranks have in common, as those of a datacenter do."""
    number = torch.empty((), dtype=torch.int64)
    number.random_()
    dist.broadcast(number, 0)
    directory = Path(tempfile.gettempdir()) / f"isthmus-ranks-{int(number)}"
    directory.mkdir(mode=0o700, exist_ok=True)
    yield directory
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)


def compare(rank: int, case: Case) -> dict[str, Any]:
    """Measure a case on one of its ranks; return the `Timing` as a dictionary."""
    device = torch.device(case.device, rank) if case.device == "cuda" else CPU
    with _shared_directory(rank) as state:
        job = Job.model_validate(case.job)
        task = load_task(job.task.source, job.task.settings, base=HERE)
        model = build_model(task, job.seed)
        flops_per_word: int = model.flops_per_word()  # type: ignore[assignment, operator]  # of class Gpt
        engine = EngineLoop(case, job, model, device, rank, state)
        plain = PlainLoop(case, job, task, model, device, rank)
        seconds: dict[str, list[float]] = {
            name: [] for name in ("engine", "plain", "engine_cpu", "plain_cpu")
        }
        for interval in range(case.intervals + 1):
            # The order alternates, so that neither loop always runs after the other.
            turns = [("engine", engine), ("plain", plain)]
            for name, loop in turns if interval % 2 else reversed(turns):
                dist.barrier()
                cpu_started = time.process_time()
                seconds_taken = torch.tensor(loop.train(case.steps), dtype=torch.float64)
                cpu = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
                dist.all_reduce(seconds_taken, dist.ReduceOp.MAX)
                dist.all_reduce(cpu)
                if interval:
                    seconds[name].append(float(seconds_taken))
                    seconds[f"{name}_cpu"].append(float(cpu))
    words = case.steps * case.ranks * job.datacenter.batch_size * job.task.settings["length"]
    flops = float(words * flops_per_word)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return dataclasses.asdict(Timing(**seconds, words=words, flops=flops, peak_bytes=peak))


class EngineLoop:
    """The engine, driven as by a rank of the service."""

    def __init__(
        self, case: Case, job: Job, model: nn.Module, device: torch.device, rank: int, state: Path
    ) -> None:
        """`model` gives the layout; the engine builds its own."""
        header = TensorLayout.of(model).header.decode("latin-1")
        command = Command(
            op="open", run_id="run", job=job.model_dump_json(), base=str(HERE), layout=header
        )
        placement = RankPlacement(
            rank=rank, ranks=case.ranks, device=device, participant="benchmark", state=state
        )
        self.engine = Engine(command, placement)
        self.engine.checkpoints.begin_save = lambda *_: None  # type: ignore[method-assign]  # the plain loop writes none
        self.step = 0

    def train(self, steps: int) -> float:
        """Train a number of steps; return the seconds they took."""
        command = Command(
            op="train_steps", run_id="run", from_step=self.step, until_step=self.step + steps
        )
        self.step += steps
        values = train_round(
            self.engine, command, lambda report: None, lambda: ControlSignal.CONTINUE
        )
        return float(values["seconds"])  # type: ignore[arg-type]  # an object to mypy


class PlainLoop:
    """A training loop in plain PyTorch."""

    def __init__(
        self,
        case: Case,
        job: Job,
        task: Task,
        model: nn.Module,
        device: torch.device,
        rank: int,
    ) -> None:
        self.task, self.device = task, device
        model.to(device)
        self.model: nn.Module = model
        if case.peer == "ddp":
            self.model = DistributedDataParallel(model)
        elif case.peer == "fsdp":
            for block in model.blocks:  # type: ignore[union-attr]  # of class Gpt
                fully_shard(block, reshard_after_forward=False)
            fully_shard(model, reshard_after_forward=False)
        participant = Participant(name="benchmark", regime="datacenter")
        self.optimizer = task.optimizer(self.model.parameters(), participant)
        data = task.local_data(participant)
        self.loader = DataLoader(
            data,
            batch_size=job.datacenter.batch_size,
            sampler=DistributedSampler(data, case.ranks, rank),
            drop_last=True,
            pin_memory=device.type == "cuda",
        )
        self.batches = self._endless()

    def train(self, steps: int) -> float:
        """Train a number of steps; return the seconds they took."""
        started = time.monotonic()
        self.model.train()
        for _ in range(steps):
            inputs, target = next(self.batches)
            inputs = inputs.to(self.device, non_blocking=True)
            target = target.to(self.device, non_blocking=True)
            loss = self.task.loss(self.task.forward(self.model, inputs), target).mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        float(loss.detach())
        return time.monotonic() - started

    def _endless(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.loader


def exchange(
    rank: int, ranks: int, job_: dict[str, Any], model: str, repeats: int
) -> dict[str, list[float]]:
    """Measure loading and storing a model file on one of the ranks, alternating with memory copies.

    Returns the seconds of each repetition, `exchanged` and `copied`: copies of as many bytes in
    memory, two per repetition, each rank its part.
    """
    job = Job.model_validate(job_)
    task = load_task(job.task.source, job.task.settings, base=HERE)
    case = Case(name="", peer="", device="cpu", ranks=ranks, steps=0, intervals=0, job=job_)
    with _shared_directory(rank) as state:
        engine = EngineLoop(case, job, build_model(task, job.seed), CPU, rank, state).engine
        source = torch.ones(engine.layout.size // ranks)
        target = torch.zeros_like(source)
        seconds: dict[str, list[float]] = {"exchanged": [], "copied": []}
        for repeat in range(repeats + 2):
            dist.barrier()
            started = time.monotonic()
            load_shards(Path(model), engine.layout, engine.shard)
            store_shards(Path(f"{model}.back"), engine.layout, engine.shard)
            dist.barrier()
            between = time.monotonic()
            target.copy_(source)
            source.copy_(target)
            dist.barrier()
            if repeat > 1:
                seconds["exchanged"].append(between - started)
                seconds["copied"].append(time.monotonic() - between)
    return seconds
