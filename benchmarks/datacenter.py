"""The datacenter's training loop compared with plain PyTorch, and a regime switch with copying.

  * Throughput: the engine and a plain loop with DDP or FSDP (datacenter_ranks.py) train the same
    model on the same data with the same ranks, in turn, in the same processes; on CPUs with two
    gloo ranks and a small transformer, on a GPU, if there is one, with one rank, bf16 and
    compilation, a GPT-2 of 124M parameters and one of a billion.
  * A regime switch: a model is loaded from the file that the link writes into the sharded
    parameters of the ranks, and stored in the file that the link reads, compared with two copies of
    as many bytes in memory by as many processes. Also a whole request through the service,
    with the checkpoint of the step and the digest that names the model on the link.

Every ratio is the median over pairs of neighbouring intervals, which a busy machine slows down
alike; in brackets, the middle half of them. On CPUs there is also a ratio of CPU times.

Figures: `throughput_ratio/<device>/<model>` (above 1, the engine is faster),
`cpu_time_ratio/<device>/<model>`, `tokens_per_s/<device>/<model>`,
`<mfu|peak_gib>/<device>/<model>` (GPUs whose peak is known), `switch_over_memcpy/<parameters>` and
`switch_request_over_memcpy/<parameters>`. `--only gpu` omits the parts that need no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; waits would warn

import torch
from datacenter_ranks import Case, Timing, compare, exchange
from harness import command_line, figures
from harness.figures import Target
from harness.process_group import on_ranks

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.gpu_rates import known_name
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_datacenter.service.service import DatacenterService
from isthmus_datacenter.training.profile import DENSE_BF16

HERE = Path(__file__).parent
SMALL = {"words": 512, "length": 64, "width": 128, "heads": 4, "layers": 4, "examples": 4096}
GPT2 = {"words": 50304, "length": 1024, "width": 768, "heads": 12, "layers": 12, "examples": 2048}
BILLION = {**GPT2, "width": 2048, "heads": 16, "layers": 18}
TINY = {"words": 16, "length": 8, "width": 16, "heads": 2, "layers": 1, "examples": 64}
SWITCHED = {**SMALL, "words": 8192, "width": 512, "heads": 8, "layers": 6}

TARGETS = {
    "throughput_ratio/*": Target(at_least=0.97),
    "switch_over_memcpy/*": Target(at_most=4),
}
PARTS = ("cpu", "gpu", "switch")


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _only)
    parts = PARTS if options.only is None else (options.only,)
    if options.only == "gpu" and not torch.cuda.is_available():
        raise UserError("--only gpu: this machine has no GPU")
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="datacenter-") as scratch:
        cases = [
            *(_cpu_cases(options) if "cpu" in parts else ()),
            *(_gpu_cases(options) if "gpu" in parts else ()),
        ]
        rows = []
        for case in cases:
            timing = Timing(**on_ranks(case.ranks, compare, case, device=case.device)[0])
            rows.append(_row(case, timing, measured))
            print(f"{case.device} {case.name}: {rows[-1][-2]}", flush=True)
            # Written after each case, because the next one may take long.
            figures.write(options.json, "datacenter", _machine(), measured, TARGETS)
        header = (
            "model, device, peer",
            "tokens/s",
            "plain",
            "MFU",
            "throughput ratio",
            "CPU time ratio",
        )
        if rows:
            print(figures.table(header, rows))
        if "gpu" in parts and not torch.cuda.is_available():
            print("this machine has no GPU: the GPU part was omitted")
        if "switch" in parts:
            settings, repeats = command_line.of_size(
                options, full=(SWITCHED, 15), quick=(SWITCHED, 5), smoke=(TINY, 1)
            )
            print(_switch(Path(scratch), settings, repeats, measured))
    figures.write(options.json, "datacenter", _machine(), measured, TARGETS)
    return 0


def _only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="run only this part")


def _machine() -> dict[str, str | int | float]:
    machine = figures.machine()
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _cpu_cases(options: argparse.Namespace) -> list[Case]:
    settings, steps, intervals, batch_size = command_line.of_size(
        options, full=(SMALL, 5, 24, 32), quick=(SMALL, 5, 7, 32), smoke=(TINY, 1, 2, 2)
    )
    shape = {"device": "cpu", "ranks": 2, "steps": steps, "intervals": intervals}
    return [
        Case(
            name=f"small-{peer}",
            peer=peer,
            job=_job(settings, ranks=2, batch_size=batch_size, zero_stage=stage),
            **shape,
        )
        for peer, stage in (("ddp", 0), ("fsdp", 2))
    ]


def _gpu_cases(options: argparse.Namespace) -> list[Case]:
    if not torch.cuda.is_available():
        return []
    shape = {"device": "cuda", "peer": "single", "ranks": 1, "intervals": 8}
    shape["intervals"] = command_line.of_size(options, full=8, quick=4, smoke=2)
    fast = {"accelerate": True}
    return [
        Case(name="gpt2-124m", job=_job({**GPT2, **fast}, batch_size=64), steps=20, **shape),
        Case(name="gpt-1b", job=_job({**BILLION, **fast}, batch_size=16), steps=10, **shape),
    ]


def _job(settings: Mapping[str, Any], **datacenter: Any) -> dict[str, Any]:
    return {
        "name": "benchmark",
        "task": {"source": "datacenter_tasks.py:Language", "settings": dict(settings)},
        "datacenter": {"ranks": 1, **datacenter},
    }


def _row(case: Case, timing: Timing, measured: dict[str, float]) -> tuple[str, ...]:
    """Return one line of the table, and add its figures to `measured`."""
    key = f"{case.device if case.device == 'cpu' else _gpu()}/{case.name}"
    ratios = _by_pairs(timing.plain, timing.engine)
    ratio = statistics.median(ratios)
    engine, plain = statistics.median(timing.engine), statistics.median(timing.plain)
    measured[f"throughput_ratio/{key}"] = ratio
    measured[f"tokens_per_s/{key}"] = timing.words / engine
    mfu = cpu = "-"
    if case.device == "cpu":
        measured[f"cpu_time_ratio/{key}"] = statistics.median(
            _by_pairs(timing.plain_cpu, timing.engine_cpu)
        )
        cpu = f"{measured[f'cpu_time_ratio/{key}']:.3f}x"
    elif (peak := DENSE_BF16.get(_gpu().upper())) is not None:
        measured[f"mfu/{key}"] = timing.flops / engine / peak
        measured[f"peak_gib/{key}"] = timing.peak_bytes / 2**30
        mfu = f"{100 * timing.flops / engine / peak:.1f} %"
    low, _, high = statistics.quantiles(ratios, n=4)
    return (
        f"{case.name}, {key.partition('/')[0]}, {case.peer}",
        f"{timing.words / engine:,.0f}",
        f"{timing.words / plain:,.0f}",
        mfu,
        f"{ratio:.3f}x [{low:.3f}..{high:.3f}]",
        cpu,
    )


def _by_pairs(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratios of measurements that are neighbours in time."""
    return [numerator / denominator for numerator, denominator in zip(over, under, strict=True)]


def _gpu() -> str:
    """`h200` for "NVIDIA H200", `h100` for "NVIDIA H100 80GB HBM3"."""
    name = torch.cuda.get_device_name()
    return (known_name(name) or name.removeprefix("NVIDIA ").replace(" ", "-")).lower()


# -- the switch -----------------------------------------------------------------------------------


def _switch(
    scratch: Path, settings: Mapping[str, Any], repeats: int, measured: dict[str, float]
) -> str:
    """Return a table of a model sent through the service, only through the ranks, and copied."""
    job = _job(settings, ranks=2, batch_size=1, zero_stage=2)
    size, blob, request_seconds = asyncio.run(_measure_requests(scratch, job, repeats))
    file = scratch / "model"
    file.write_bytes(blob)
    Path(f"{file}.back").write_bytes(blob)
    timings = on_ranks(2, exchange, 2, job, str(file), repeats)[0]
    floor = statistics.median(timings["copied"])
    inside = statistics.median(_by_pairs(timings["exchanged"], timings["copied"]))
    measured[f"switch_over_memcpy/{size / 1e6:.0f}M"] = inside
    measured[f"switch_request_over_memcpy/{size / 1e6:.0f}M"] = request_seconds / floor
    return "\n" + figures.table(
        (f"{size / 1e6:.0f}M parameters to 2 ranks and back", "seconds", "ratio to copying"),
        [
            (what, f"{seconds:.4f}", figures.times(ratio))
            for what, seconds, ratio in (
                ("a request, with checkpoint and digest", request_seconds, request_seconds / floor),
                ("into the ranks and back", statistics.median(timings["exchanged"]), inside),
                ("copied in memory", floor, 1.0),
            )
        ],
    )


async def _measure_requests(
    scratch: Path, switched: Mapping[str, Any], repeats: int
) -> tuple[int, bytes, float]:
    """Return the number of parameters, a model, and the median seconds of a request with it."""
    job = Job.model_validate(switched)
    task = load_task(job.task.source, job.task.settings, base=HERE)
    model = build_model(task, job.seed)
    layout = TensorLayout.of(model)
    blob = bytes(layout.encode(layout.gather(model)))
    service = DatacenterService("benchmark", 2, scratch / "state")
    ask = partial(_ask, service)
    try:
        service.start()
        opening = link_pb2.OpenRun(
            run_id="run", job=job.model_dump_json(), base=str(HERE), layout=layout.header
        )
        await ask(link_pb2.Request(id="open", open=opening), None)
        seconds = []
        for number in range(repeats + 1):
            work = link_pb2.TrainSteps(run_id="run", hand_back=True)
            request = link_pb2.Request(id=str(number), train_steps=work)
            seconds.append(await ask(request, blob))
    finally:
        service.close()
    return layout.size, blob, statistics.median(seconds[1:])


async def _ask(service: DatacenterService, request: link_pb2.Request, model: bytes | None) -> float:
    """Send a request with a model; return the seconds until the reply with another one."""
    buffer = None
    if model is not None:
        buffer = service.buffer(request, len(model))
        buffer[:] = model
    started = time.monotonic()
    await service.work(request, buffer, lambda progress: None)
    seconds = time.monotonic() - started
    service.acknowledged(request, True, "")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
