"""What the ranks of benchmarks/datacenter.py do: our loop and one written by hand, in turn.

The hand-written loop is what a PyTorch user writes from its tutorials: a DistributedSampler and a
DataLoader, DDP or `fully_shard` per block, a mean loss, `backward`, `step`, `zero_grad`. Both loops
hold a model of their own in the same processes and take turns in stretches of a few steps, each
begun together and timed until the device is done. Ours is `Engine.train` with the time it reports
itself: checkpoints, once a round, are written by neither. Beside the time by the clock stands that
of the processors, which other programs on the machine change less.
"""

from __future__ import annotations

import dataclasses
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
from isthmus_datacenter.service.messages import Command, ControlSignal
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.round import train_round

HERE = Path(__file__).parent
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    peer: str
    """`single`, `ddp` or `fsdp`: what the hand-written loop wraps its model in."""
    device: Device
    ranks: int
    steps: int
    """In one stretch."""
    stretches: int
    """Of each loop, after one of each that is not counted."""
    job: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of each stretch of a case, as its slowest rank saw them."""

    ours: list[float]
    theirs: list[float]
    ours_cpu: list[float]
    """The same in seconds of processors, user and system, of all ranks together."""
    theirs_cpu: list[float]
    words: int
    """Trained on in one stretch by all ranks."""
    flops: float
    """Of one stretch on all ranks, by the usual count."""
    peak_bytes: int
    """Of the first device's memory, with both models; 0 on a CPU."""


def compare(rank: int, case: Case) -> dict[str, Any]:
    """The `Timing` of a case, as a dictionary, on one of its ranks."""
    device = torch.device(case.device, rank) if case.device == "cuda" else CPU
    with tempfile.TemporaryDirectory() as state:
        job = Job.model_validate(case.job)
        task = load_task(job.task.source, job.task.settings, base=HERE)
        model = build_model(task, job.seed)
        flops_per_word: int = model.flops_per_word()  # type: ignore[assignment, operator]  # of our own Gpt
        ours = Ours(case, job, model, device, rank, Path(state))
        theirs = ByHand(case, job, task, model, device, rank)
        seconds: dict[str, list[float]] = {
            name: [] for name in ("ours", "theirs", "ours_cpu", "theirs_cpu")
        }
        for stretch in range(case.stretches + 1):
            # Who begins changes: what came before is never the same for only one of them.
            turns = [("ours", ours), ("theirs", theirs)]
            for name, loop in turns if stretch % 2 else reversed(turns):
                dist.barrier()
                busy = time.process_time()
                took = torch.tensor(loop.train(case.steps), dtype=torch.float64)
                cpu = torch.tensor(time.process_time() - busy, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(cpu)
                if stretch:
                    seconds[name].append(float(took))
                    seconds[f"{name}_cpu"].append(float(cpu))
    words = case.steps * case.ranks * job.datacenter.batch_size * job.task.settings["length"]
    flops = float(words * flops_per_word)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return dataclasses.asdict(Timing(**seconds, words=words, flops=flops, peak_bytes=peak))


class Ours:
    """The engine, as a rank of the service drives it."""

    def __init__(
        self, case: Case, job: Job, model: nn.Module, device: torch.device, rank: int, state: Path
    ) -> None:
        """`model` is only looked at: the engine makes its own."""
        header = TensorLayout.of(model).header.decode("latin-1")
        command = Command(
            op="open", run_id="run", job=job.model_dump_json(), base=str(HERE), layout=header
        )
        placement = RankPlacement(
            rank=rank, ranks=case.ranks, device=device, participant="benchmark", state=state
        )
        self.engine = Engine(command, placement)
        self.engine.checkpoints.begin_save = lambda *_: None  # type: ignore[method-assign]  # the peer writes none
        self.step = 0

    def train(self, steps: int) -> float:
        """Seconds that so many more steps took."""
        command = Command(
            op="train", run_id="run", from_step=self.step, until_step=self.step + steps
        )
        self.step += steps
        values = train_round(
            self.engine, command, lambda report: None, lambda: ControlSignal.CONTINUE
        )
        return float(values["seconds"])  # type: ignore[arg-type]  # an object to mypy


class ByHand:
    """Plain PyTorch."""

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
            for block in model.blocks:  # type: ignore[union-attr]  # of our own Gpt
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
        """Seconds that so many more steps took."""
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
    """Seconds of loading a model into a sharded one and storing it again, on one of the ranks.

    And, in turn with it, of copying as many bytes twice in memory, each rank its share.
    """
    job = Job.model_validate(job_)
    task = load_task(job.task.source, job.task.settings, base=HERE)
    case = Case(name="", peer="", device="cpu", ranks=ranks, steps=0, stretches=0, job=job_)
    with tempfile.TemporaryDirectory() as state:
        engine = Ours(case, job, build_model(task, job.seed), CPU, rank, Path(state)).engine
        source = torch.ones(engine.layout.size // ranks)
        target = torch.zeros_like(source)
        taken: dict[str, list[float]] = {"exchanged": [], "copied": []}
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
                taken["exchanged"].append(between - started)
                taken["copied"].append(time.monotonic() - between)
    return taken
