"""Bytes per rank of parameters, gradients and optimizer state, by layout, compared with a formula.

The formula for P float32 parameters: 4 P bytes of parameters, as many of gradients and twice as
many of Adam's moments, each divided by tensor_parallel x pipeline_parallel, and by data_parallel
where the ZeRO stage is above 0. PyTorch's `fully_shard` keeps gradients and parameters sharded
between steps in stages 1 and 2 as well; the stages differ in what is gathered during one.

Also the peak memory of the exchange of the whole model, as a fraction of the model's size: private
memory of a rank in addition to what it had before, and mapped pages of the file, which the kernel
may drop.

    python benchmarks/parallel_memory.py --quick

Figures: `<param|grad|optimizer>_over_formula/<layout>`, of the largest rank;
`exchange_<own|mapped>_over_model/<layout>`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import command_line, figures
from harness.figures import Target
from harness.process_group import on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.task import Participant, Task
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.model_shard import local
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.training.forward_backward import ForwardBackward

KINDS = ("param", "grad", "optimizer")
TARGETS = {
    "*_over_formula/*": Target(at_least=0.9, at_most=1.1),
    "exchange_own_over_model/*": Target(at_most=0.1),
}
FACTORS = {"param": 4, "grad": 4, "optimizer": 8}
"""Bytes for each parameter."""
QUICK = [(1, 1, 1, 0)] + [(2, 1, 1, stage) for stage in range(4)] + [(1, 2, 1, 0), (1, 1, 2, 0)]
FULL = [
    *QUICK,
    *((4, 1, 1, stage) for stage in range(4)),
    *((2, 2, 1, stage) for stage in range(4)),
    *((2, 1, 2, stage) for stage in range(4)),
    (1, 2, 2, 0),
    *((2, 2, 2, stage) for stage in range(4)),
]
SMOKE = [(1, 1, 1, 0), (2, 1, 1, 2)]
"""data_parallel, tensor_parallel, pipeline_parallel, zero_stage."""


class Stack(Task):
    """A stack of transformer MLPs, two matrices each."""

    def model(self) -> nn.Module:
        width = self.settings["width"]
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(8)
            )
        )

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square()

    def local_data(self, participant: Participant) -> TensorDataset:
        return self.eval_data()

    def eval_data(self) -> TensorDataset:
        rows = torch.randn(4, self.settings["width"])
        return TensorDataset(rows, rows)

    def optimizer(self, parameters: Any, participant: Participant) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


def measure(
    rank: int, layouts: list[tuple[int, int, int, int]], width: int, directory: str
) -> list[list[int]]:
    """Measure on one rank the bytes of each kind in each layout after a step, and the exchange."""
    return [
        _measure(rank, layout, width, Path(directory) / f"{len(layouts)}-{at}")
        for at, layout in enumerate(layouts)
    ]


def _measure(rank: int, degrees: tuple[int, int, int, int], width: int, file: Path) -> list[int]:
    dp, tp, pp, stage = degrees
    task = Stack({"width": width})
    torch.manual_seed(0)
    dims = ParallelDims(
        ranks=dp * tp * pp, zero_stage=stage, tensor=tp, pipeline=pp, microbatches=pp
    )
    device = torch.device("cpu")
    (batch, _) = task.eval_data().tensors
    model = task.model()
    layout = TensorLayout.of(model)
    shard = parallelize(task, model, dims, rank, device, sample=lambda: batch)
    optimizer = ShardedOptimizer(
        shard,
        lambda parameters: task.optimizer(parameters, Participant(name="", regime="datacenter")),
        None,
        False,
    )
    forward_backward = ForwardBackward(task, shard, rank, device, len(batch))
    forward_backward.run((batch, batch), 1.0, lambda: ControlSignal.CONTINUE)
    gradients = sum(local(each).nbytes for each in shard.gradients().values())
    optimizer.step(1.0)
    parameters = sum(local(each).nbytes for each in shard.parameters().values())
    moments = sum(
        local(value).nbytes
        for _, parameter in optimizer.named_parameters()
        for value in optimizer.state_of(parameter).values()
        if value.ndim
    )
    if rank == 0:
        file.write_bytes(layout.header)
        os.truncate(file, layout.nbytes)
    dist.barrier()
    with _peaks() as (own, mapped):
        store_shards(file, layout, shard)
        dist.barrier()
        load_shards(file, layout, shard)
    return [parameters, gradients, moments, own[0], mapped[0]]


@contextlib.contextmanager
def _peaks() -> Iterator[tuple[list[int], list[int]]]:
    """Measure the peak growth of the process's private and mapped memory in the block, in bytes."""
    own, mapped, done = [0], [0], threading.Event()
    page = os.sysconf("SC_PAGE_SIZE")

    def now() -> tuple[int, int]:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return page * (resident - shared), page * shared

    def sample() -> None:
        while not done.is_set():
            for peak, before, size in zip((own, mapped), start, now(), strict=True):
                peak[0] = max(peak[0], size - before)
            # Shorter peaks are missed; sampling more often would slow the ranks down.
            time.sleep(0.0002)  # memory can only be polled

    start = now()
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield own, mapped
    finally:
        done.set()
        thread.join()


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every layout, and fail if one misses a target."""
    options = command_line.options(__doc__ or "", argv)
    width = command_line.of_size(options, full=512, quick=256, smoke=32)
    count = sum(each.numel() for each in Stack({"width": width}).model().parameters())
    layouts = command_line.of_size(options, full=FULL, quick=QUICK, smoke=SMOKE)
    rows, measured = [], {}
    for ranks in sorted({dp * tp * pp for dp, tp, pp, _ in layouts}):
        group = [each for each in layouts if each[0] * each[1] * each[2] == ranks]
        with tempfile.TemporaryDirectory() as directory:
            by_rank = on_ranks(ranks, measure, group, width, directory)
        for at, (dp, tp, pp, stage) in enumerate(group):
            name = f"dp{dp}-tp{tp}-pp{pp}-zero{stage}"
            cells = []
            *kinds, own, mapped = zip(*(rank[at] for rank in by_rank), strict=True)
            for kind, sizes in zip(KINDS, kinds, strict=True):
                formula = FACTORS[kind] * count / (tp * pp * (dp if stage else 1))
                ratio = max(sizes) / formula
                measured[f"{kind}_over_formula/{name}"] = ratio
                cells += [f"{max(sizes) / 2**20:.2f}", f"{formula / 2**20:.2f}", f"{ratio:.3f}"]
            for what, sizes in (("own", own), ("mapped", mapped)):
                measured[f"exchange_{what}_over_model/{name}"] = max(sizes) / (4 * count)
                cells.append(f"{max(sizes) / (4 * count):.3f}")
            rows.append((name, *cells))
    header = [
        "layout",
        *(f"{kind} {what}" for kind in KINDS for what in ("MiB", "formula", "ratio")),
        "exchange: own / model",
        "mapped / model",
    ]
    print(f"largest rank, {count:,} float32 parameters, AdamW, after one step\n")
    print(figures.table(header, rows))
    figures.write(options.json, "parallel_memory", figures.machine(), measured, TARGETS)
    off = [name for name in measured if not _is_met(name, measured[name])]
    # The smallest model is smaller than what else happens in memory.
    if off and not options.smoke:
        print(f"these figures miss their targets: {', '.join(off)}", file=sys.stderr)
        return 1
    return 0


def _is_met(name: str, value: float) -> bool:
    target = figures.target_of(name, TARGETS)
    return target is None or target.is_met(value)


if __name__ == "__main__":
    sys.exit(main())
