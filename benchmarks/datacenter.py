"""The datacenter's training loop against plain PyTorch, and a regime switch against copying memory.

  * Throughput: our loop and one written by hand with DDP or FSDP (datacenter_ranks.py) train the
    same model on the same data with the same ranks, in turn, in the same processes; on CPUs with
    two gloo ranks and a small transformer, on a GPU, where one is, with one rank, bf16 and
    compilation, a GPT-2 of 124M parameters and one of a billion.
  * A regime switch: a model goes from the file that the link fills to the sharded parameters of
    the ranks and from them into the file that the link reads, against two copies of as many bytes
    in memory by as many processes. Beside it, a whole request through the service: with the
    checkpoint of the step and the digest that names the model on the link.

Figures: `throughput_ratio/<device>/<model>` (above 1, ours is faster), `tokens_per_s/...`,
`mfu/...` (GPUs whose peak is known here), `switch_over_memcpy/<parameters>` and
`switch_request_over_memcpy/<parameters>`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it once; waits would warn

import figures
import torch
import torch.multiprocessing
from datacenter_ranks import Case, Timing, compare, exchange, memory_copy

from isthmus.exchange import Layout
from isthmus.job import Job
from isthmus.scoring import build_model
from isthmus.task import load_task
from isthmus.wire import link_pb2
from isthmus_datacenter.service import Service

HERE = Path(__file__).parent
SMALL = {"words": 512, "length": 64, "width": 128, "heads": 4, "layers": 4, "examples": 4096}
GPT2 = {"words": 50304, "length": 1024, "width": 768, "heads": 12, "layers": 12, "examples": 2048}
BILLION = {**GPT2, "width": 2048, "heads": 16, "layers": 18}
SWITCHED = {**SMALL, "words": 8192, "width": 512, "heads": 8, "layers": 6}

DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Operations a second by the vendor's data sheet, without sparsity."""


def main() -> None:
    """Measure, print, write."""
    asked = figures.options(__doc__ or "")
    found: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="datacenter-") as scratch:
        for case in [*_cpu_cases(asked.quick), *_gpu_cases(asked.quick)]:
            timing = Timing(**_on_ranks(case.ranks, Path(scratch), compare, case))
            rows.append(_row(case, timing, found))
            print(f"{case.device} {case.name}: {rows[-1][-1]}", flush=True)
        switched = _switch(Path(scratch), 3 if asked.quick else 7)
    header = ("model, device, peer", "tokens/s", "by hand", "MFU", "of by hand")
    print(figures.table(header, rows))
    if not torch.cuda.is_available():
        print("no GPU is here: the GPU part was left out")
    size, ours, inside, floor = switched
    found[f"switch_over_memcpy/{size / 1e6:.0f}M"] = inside / floor
    found[f"switch_request_over_memcpy/{size / 1e6:.0f}M"] = ours / floor
    print()
    print(
        figures.table(
            (f"{size / 1e6:.0f}M parameters to 2 ranks and back", "seconds", "of the floor"),
            [
                (what, f"{seconds:.4f}", figures.times(seconds / floor))
                for what, seconds in (
                    ("a request, with checkpoint and digest", ours),
                    ("into the ranks and out", inside),
                    ("copied in memory", floor),
                )
            ],
        )
    )
    machine = figures.machine()
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    figures.write(asked.json, "datacenter", machine, found)


def _cpu_cases(quick: bool) -> list[Case]:
    shape = {"device": "cpu", "ranks": 2, "steps": 3, "stretches": 7 if quick else 30}
    return [
        Case(
            name=f"small-{peer}",
            peer=peer,
            job=_job(SMALL, ranks=2, batch_size=32, zero_stage=stage),
            **shape,
        )
        for peer, stage in (("ddp", 0), ("fsdp", 2))
    ]


def _gpu_cases(quick: bool) -> list[Case]:
    if not torch.cuda.is_available():
        return []
    shape = {"device": "cuda", "peer": "single", "ranks": 1, "stretches": 4 if quick else 8}
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


def _row(case: Case, timing: Timing, found: dict[str, float]) -> tuple[str, ...]:
    """One line of the table, its figures added to those found."""
    key = f"{case.device if case.device == 'cpu' else _gpu()}/{case.name}"
    # Neighbours in time see the same machine: the ratio is taken pair by pair.
    pairs = zip(timing.ours, timing.theirs, strict=True)
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    ours, theirs = statistics.median(timing.ours), statistics.median(timing.theirs)
    found[f"throughput_ratio/{key}"] = ratio
    found[f"tokens_per_s/{key}"] = timing.words / ours
    mfu = "-"
    peak = next((rate for name, rate in DENSE_BF16.items() if name.lower() in key), None)
    if peak is not None:
        found[f"mfu/{key}"] = timing.flops / ours / peak
        mfu = f"{100 * timing.flops / ours / peak:.1f} %"
    return (
        f"{case.name}, {key.partition('/')[0]}, {case.peer}",
        f"{timing.words / ours:,.0f}",
        f"{timing.words / theirs:,.0f}",
        mfu,
        f"{ratio:.3f}x",
    )


def _gpu() -> str:
    """`h200` for "NVIDIA H200"."""
    return torch.cuda.get_device_name().split()[-1].lower()


def _on_ranks(ranks: int, scratch: Path, work: Callable[..., None], *arguments: Any) -> Any:
    """Run a function of datacenter_ranks on new processes; what the first of them wrote."""
    name = time.monotonic_ns()
    rendezvous, result = scratch / f"meet-{name}", scratch / f"result-{name}"
    torch.multiprocessing.spawn(
        work, args=(*arguments, str(rendezvous), str(result)), nprocs=ranks, join=True
    )
    return json.loads(result.read_text())


# -- the switch -----------------------------------------------------------------------------------


def _switch(scratch: Path, repeats: int) -> tuple[int, float, float, float]:
    """Parameters; median seconds through the service, in the ranks alone, and of copying."""
    size, content, through = asyncio.run(_through_the_service(scratch, repeats))
    file = scratch / "model"
    file.write_bytes(content)
    Path(f"{file}.back").write_bytes(content)
    inside = _on_ranks(2, scratch, exchange, 2, _switched_job(), str(file))
    floor = _on_ranks(2, scratch, memory_copy, 2, 4 * size)
    return size, through, statistics.median(inside), statistics.median(floor)


def _switched_job() -> dict[str, Any]:
    return _job(SWITCHED, ranks=2, batch_size=1, zero_stage=2)


async def _through_the_service(scratch: Path, repeats: int) -> tuple[int, bytes, float]:
    """Parameters, a model, and median seconds from a request with it to a reply with another."""
    job = Job.model_validate(_switched_job())
    task = load_task(job.task.source, job.task.settings, base=HERE)
    model = build_model(task, job.seed)
    layout = Layout.of(model)
    content = bytes(layout.encode(layout.gather(model)))
    service = Service("benchmark", 2, scratch / "state")
    ask = partial(_ask, service)
    try:
        service.start()
        opening = link_pb2.OpenRun(
            run_id="run", job=job.model_dump_json(), base=str(HERE), layout=layout.header
        )
        await ask(link_pb2.Request(id="open", open=opening), None)
        taken = []
        for number in range(repeats + 1):
            work = link_pb2.TrainSteps(run_id="run", hand_back=True)
            request = link_pb2.Request(id=str(number), train_steps=work)
            taken.append(await ask(request, content))
    finally:
        service.close()
    return layout.size, content, statistics.median(taken[1:])


async def _ask(service: Service, request: link_pb2.Request, model: bytes | None) -> float:
    """Seconds from the request with its model to the reply with another one."""
    buffer = None
    if model is not None:
        buffer = service.buffer(request, len(model))
        buffer[:] = model
    started = time.monotonic()
    await service.work(request, buffer, lambda progress: None)
    seconds = time.monotonic() - started
    service.settled(request, True, "")
    return seconds


if __name__ == "__main__":
    main()
