"""DP-SGD on a decoder: time of a step and peak memory, with and without gradients of examples.

A decoder like that of `examples/shakespeare` (21 million parameters; 3 million with `--quick`), 32
examples of 64 characters, float32, one thread for each rank. Measured are the clipped gradients
alone: no optimizer and no noise, which costs the same in all. Memory is what a rank's peak exceeds
its memory before, with the model, so it includes one gradient. Each variant runs in a process of
its own:

  * plain: gradients without privacy;
  * per_example: `datacenter.privacy.clipping = "per_example"`;
  * ghost: the same with "ghost", on one rank and on two, which share the examples, with every
    sharded layout;
  * opacus: `GradSampleModuleFastGradientClipping` of Opacus, whose norms are float32.

    python benchmarks/ghost_clipping.py --quick

Figures: `seconds/<variant>`, `cpu_seconds/<variant>` of all ranks, `peak_bytes/<variant>` of the
rank with most.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import command_line, figures
from harness.process_group import on_ranks
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.job.datacenter import DatacenterSection
from isthmus.task import Task, load_task
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.private.ghost_step import GhostForwardBackward
from isthmus_datacenter.training.private.step import PerExampleForwardBackward
from isthmus_privacy.dp_sgd.examples import SampledExamples

EXAMPLES, CONTEXT = 32, 64
STEPS = 3
"""Steps that are timed, after one that is not."""
FULL = {"width": 384, "head_width": 64, "depth": 12}
QUICK = {"width": 192, "head_width": 64, "depth": 6}
SMOKE = {"width": 16, "head_width": 16, "depth": 1}
VARIANTS = [("plain", 1, 0), ("opacus", 1, 0), ("per_example", 1, 0), ("ghost", 1, 0)]
VARIANTS += [("ghost", 2, stage) for stage in (1, 2, 3)]
"""Variant, ranks, zero_stage."""
SMOKE_VARIANTS = [*VARIANTS[:3], ("ghost", 2, 2)]
CLIP = 1.0
_MMAP_THRESHOLD = -3
"""Parameter `M_MMAP_THRESHOLD` of glibc's `mallopt`."""
SHAKESPEARE = Path(__file__).parents[1] / "examples" / "shakespeare"


class PositionsOfExamples(nn.Module):
    """The decoder with positions for each example, as Opacus needs them."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        decoder = self.decoder
        positions = torch.arange(numbers.shape[1]).repeat(len(numbers), 1)
        hidden = decoder.characters(numbers) + decoder.positions(positions)
        for block in decoder.blocks:
            hidden = block(hidden)
        output: torch.Tensor = decoder.scores(decoder.norm(hidden))
        return output


def seconds(
    rank: int, variant: str, ranks: int, stage: int, shape: dict[str, int]
) -> tuple[float, float]:
    """Medians of a step's seconds and CPU seconds."""
    step, _ = _prepared(rank, variant, ranks, stage, shape)
    durations, cpu = [], []
    for _ in range(STEPS + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        durations.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return statistics.median(durations[1:]), statistics.median(cpu[1:])


def memory(
    rank: int, variant: str, ranks: int, stage: int, shape: dict[str, int]
) -> tuple[int, int]:
    """Peak bytes of a step, and the number of parameters."""
    # Tensors that are freed return their memory at once: glibc would keep it, and use it in parts.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    step, size = _prepared(rank, variant, ranks, stage, shape)
    step()
    before = _reset_peak()
    step()
    return _memory("VmHWM") - before, size


def _prepared(
    rank: int, variant: str, ranks: int, stage: int, shape: dict[str, int]
) -> tuple[Callable[[], object], int]:
    """Computes the gradients of this rank's examples once; and the number of parameters."""
    task = load_task("task.py:Shakespeare", {"context": CONTEXT, "model": shape}, base=SHAKESPEARE)
    torch.set_num_threads(1)  # threads that wait for each other count as CPU time
    torch.manual_seed(0)
    model = PositionsOfExamples(task.model())
    size = sum(each.numel() for each in model.parameters())
    compute = _step(task, model, rank, variant, ranks, stage)

    def step() -> None:
        compute()
        model.zero_grad()

    return step, size


def _step(
    task: Task, model: nn.Module, rank: int, variant: str, ranks: int, stage: int
) -> Callable[[], object]:
    """Computes the gradients of this rank's examples once."""
    device, count = torch.device("cpu"), EXAMPLES // ranks
    numbers = torch.randint(96, (EXAMPLES, CONTEXT + 1))
    data = TensorDataset(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())
    own = range(rank, EXAMPLES, ranks)
    if variant == "opacus":
        return _opacus_step(task, model, data)
    private = variant != "plain"
    dims = ParallelDims(ranks=ranks, zero_stage=stage, private=private and stage == 0)
    shard = parallelize(task, model, dims, rank, device, sample=lambda: numbers[:2, :-1])
    if not private:
        forward_backward = ForwardBackward(task, shard, rank, device, count)
        return lambda: forward_backward.run(data.tensors, 1.0, lambda: ControlSignal.CONTINUE)
    section = DatacenterSection(
        ranks=ranks,
        zero_stage=stage,
        batch_size=count,
        privacy={
            "epsilon": 1.0,
            "delta": 1e-6,
            "examples": 60_000,
            "clip": CLIP,
            "noise": 1.0,
            "clipping": variant,
        },
    )
    kind = {"per_example": PerExampleForwardBackward, "ghost": GhostForwardBackward}[variant]
    steps = kind(task, shard, rank, device, section)
    steps._adds_noise = False
    source = SampledExamples(task, data, own, 1.0, device)
    if isinstance(steps, GhostForwardBackward):
        steps.check(source.read([0, 1])[0])
    batch = source.read(own)
    return lambda: steps.run(batch, 1.0, lambda: ControlSignal.CONTINUE)


def _opacus_step(task: Task, model: nn.Module, data: TensorDataset) -> Callable[[], object]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=CLIP, loss_reduction="sum", use_ghost_clipping=True
    )
    inputs, target = data.tensors

    def step() -> None:  # as its DPTensorFastGradientClipping does
        wrapped.enable_hooks()
        losses = task.loss(wrapped(inputs), target).mean(1)
        losses.sum().backward(retain_graph=True)
        wrapped.zero_grad()
        factor = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (losses * factor).sum().backward()

    return step


def _reset_peak() -> int:
    """Forget the highest memory of this process; returns that of now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    """A field of this process' status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure all variants."""
    options = command_line.options(__doc__ or "", argv)
    command_line.needs("opacus", "opacus")
    shape = command_line.of_size(options, full=FULL, quick=QUICK, smoke=SMOKE)
    rows, measured, size = [], {}, 0
    for variant, ranks, stage in SMOKE_VARIANTS if options.smoke else VARIANTS:
        durations, cpu_seconds = zip(
            *on_ranks(ranks, seconds, variant, ranks, stage, shape), strict=True
        )
        peaks, (size, *_) = zip(*on_ranks(ranks, memory, variant, ranks, stage, shape), strict=True)
        duration, cpu, peak = max(durations), sum(cpu_seconds), max(peaks)
        name = variant if ranks == 1 else f"{variant}-zero{stage}-ranks{ranks}"
        measured |= {f"seconds/{name}": duration, f"cpu_seconds/{name}": cpu}
        measured[f"peak_bytes/{name}"] = float(peak)
        rows.append((name, f"{duration:.2f} s", f"{cpu:.2f} s", f"{peak / 2**20:.0f} MiB"))
    print(f"{size:,} parameters, {EXAMPLES} examples of {CONTEXT} characters\n")
    print(figures.table(("variant", "step", "CPU", "peak"), rows))
    figures.write(options.json, "ghost_clipping", figures.machine("opacus"), measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
