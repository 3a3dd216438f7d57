"""Time and memory of `isthmus job check --memory` for large decoders, and what real ranks take.

Llama 3's configurations of 8B and 70B parameters on 64 and 1,024 GPUs, with `zero_stage = 3`,
AdamW and one sequence at a time. Nothing is trained, and no rank is there.

A small Llama, the same with most of it frozen, and a small Mixtral are also distributed over two
and four real ranks, in 41 layouts. They count the tensors of a step; the reported peak is divided
by that of the rank that has most. Tokens are reported as if they were spread evenly over experts,
and go where the router sends them on the ranks.

    python benchmarks/memory_report.py --quick

Figures: `cpu_seconds/<size>/<ranks>` and `memory_gib/<size>/<ranks>`, the peak of the resident
memory of the command's process; `reported_over_real/<layout>`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import command_line, figures
from harness.figures import Target
from harness.process_group import on_ranks
from harness.processes import ISTHMUS

from isthmus.errors import UserError
from isthmus.job import Job, load_job, with_changes
from isthmus.task import Participant, Task, load_task
from isthmus_datacenter.training.memory_report import (
    examples_at_once,
    memory_of,
    memory_of_tensors,
)

JOB = Path(__file__).parent / "harness" / "llama_job.toml"
FULL = [("8B", 64), ("8B", 1024), ("70B", 64), ("70B", 1024)]
QUICK = [("8B", 64), ("70B", 1024)]
SMOKE = [("tiny", 4)]
TARGETS = {
    "cpu_seconds/*": Target(at_most=60),
    "memory_gib/*": Target(at_most=2),
    "reported_over_real/*": Target(at_least=0.95, at_most=1.05),
}
Layout = Mapping[str, Any]
"""Keys of [datacenter], `ranks` among them; and the name of another task than `Llama`."""


def _layouts() -> dict[str, Layout]:
    sequence = {"tensor_parallel": 2, "sequence_parallel": True}
    pipeline = {"pipeline_parallel": 2}
    two: list[Layout] = [
        *({"zero_stage": stage} for stage in range(4)),
        {"tensor_parallel": 2},
        sequence,
        {"context_parallel": 2},
        {"zero_stage": 3, "checkpoint_activations": True},
        *({**pipeline, "schedule": each} for each in ("gpipe", "1f1b", "interleaved")),
        {"task": "AdaptedLlama", "zero_stage": 3},
        {"task": "Mixtral", "expert_parallel": 2},
    ]
    four: list[Layout] = [
        *({"zero_stage": stage} for stage in range(4)),
        *({"zero_stage": stage, "tensor_parallel": 2} for stage in range(4)),
        *({"zero_stage": stage, **sequence} for stage in (1, 3)),
        *({"zero_stage": stage, "context_parallel": 2} for stage in (0, 3)),
        {"tensor_parallel": 4},
        {"zero_stage": 2, "shard_groups": 2},
        {"zero_stage": 1, "accumulate": 2},
        {"zero_stage": 2, "checkpoint_activations": "operators"},
        *({"zero_stage": stage, **pipeline} for stage in range(4)),
        {**pipeline, "tensor_parallel": 2},
        {**pipeline, **sequence},
        {**pipeline, "context_parallel": 2},
        {"pipeline_parallel": 4},
        {"task": "AdaptedLlama", **pipeline, "zero_stage": 3},
        {"task": "Mixtral", "expert_parallel": 2, "zero_stage": 3},
        {"task": "Mixtral", "expert_parallel": 4},
        {"task": "Mixtral", "expert_parallel": 2, **pipeline},
    ]
    layouts = [
        {"ranks": ranks, "zero_stage": 0, **each}
        for ranks, group in ((2, two), (4, four))
        for each in group
    ]
    return {_name(each): each for each in layouts}


def _name(layout: Layout) -> str:
    parts = [
        f"{value}-ranks" if key == "ranks" else f"{key}-{value}" for key, value in layout.items()
    ]
    return "-".join(parts).replace("_", "-").lower()


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv)
    command_line.needs("transformers", "transformers")
    results: dict[str, float] = {}
    rows = []
    for size, ranks in command_line.of_size(options, full=FULL, quick=QUICK, smoke=SMOKE):
        seconds, memory, lines = measure(size, ranks)
        results[f"cpu_seconds/{size}/{ranks}"] = seconds
        results[f"memory_gib/{size}/{ranks}"] = memory / 2**30
        rows.append(
            (size, f"{ranks:,}", f"{seconds:.0f} s", f"{memory / 2**20:,.0f} MiB", _peak(lines))
        )
    print(figures.table(("model", "ranks", "CPU time", "memory", "peak of a rank"), rows))
    layouts = _layouts()
    if options.smoke:
        layouts = dict(list(layouts.items())[:2])
    ratios = compare(layouts)
    results.update({f"reported_over_real/{name}": ratio for name, ratio in ratios.items()})
    print()
    print(
        figures.table(
            ("layout", "reported / real peak"),
            [(name, f"{ratio:.3f}") for name, ratio in ratios.items()],
        )
    )
    figures.write(options.json, "memory_report", figures.machine(), results, TARGETS)
    return 0


def measure(size: str, ranks: int) -> tuple[float, int, list[str]]:
    """CPU time in seconds and peak memory in bytes of the command, and its lines.

    Raises:
        UserError: it failed; with the end of its output.
    """
    command = [ISTHMUS, "job", "check", str(JOB), "--memory", "--ranks", str(ranks)]
    command += ["--set", f'task.settings.size="{size}"']
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"`{' '.join(command)}` failed: {output[-500:].strip()}")
    seconds = usage.ru_utime + usage.ru_stime
    return seconds, 1024 * usage.ru_maxrss, output.splitlines()


def _peak(lines: Sequence[str]) -> str:
    """Number and unit of the line `peak 58.2 MiB of a step, ...` of the command's report."""
    for line in lines:
        match line.split():
            case ["peak", number, unit, *_]:
                return f"{number} {unit}"
    raise UserError("`isthmus job check --memory` reported no peak")


def compare(layouts: Mapping[str, Layout]) -> dict[str, float]:
    """The reported peak of each layout divided by that of the real rank that has most."""
    ratios = {}
    for ranks in sorted({each["ranks"] for each in layouts.values()}):
        group = {name: each for name, each in layouts.items() if each["ranks"] == ranks}
        by_rank = on_ranks(ranks, _real_peaks, list(group.values()))
        for at, (name, layout) in enumerate(group.items()):
            job, task, rows = _prepared(layout)
            reported = memory_of(task, job, rows, ranks, accelerators=False).peak
            ratios[name] = reported / max(peaks[at] for peaks in by_rank)
    return ratios


def _real_peaks(rank: int, layouts: list[Layout]) -> list[int]:
    peaks = []
    for layout in layouts:
        job, task, rows = _prepared(layout)
        peaks.append(memory_of_tensors(task, job, rows, layout["ranks"]).peak)
    return peaks


def _prepared(layout: Layout) -> tuple[Job, Task, list[Any]]:
    """The job of a small Llama in a layout, its task, and the rows of a step of a replica."""
    changes: dict[str, object] = {
        f"datacenter.{key}": value for key, value in layout.items() if key != "task"
    }
    changes |= {
        "datacenter.batch_size": 4,
        "task.source": f"llama_task.py:{layout.get('task', 'Llama')}",
        "task.settings": {"size": "small", "length": 32},
    }
    job = with_changes(load_job(JOB), changes)
    task = load_task(job.task.source, job.task.settings, base=JOB.parent)
    data: Any = task.local_data(Participant(name="datacenter", regime="datacenter"))
    return job, task, [data[index] for index in range(examples_at_once(job, layout["ranks"]))]


if __name__ == "__main__":
    sys.exit(main())
