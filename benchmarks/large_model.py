"""Memory of all processes of a run whose model is large, divided by its parameters.

`isthmus run` trains a decoder on four ranks with `zero_stage = 3`, for two rounds with a checkpoint
and an evaluation each, and `isthmus export` writes its model. Every 0.2 s the proportional memory
of all their processes is added up: the private pages of each, and its share of those that several
have mapped, files included. The peak, from the first process to the last, over the number of
parameters is to be at most 1.35 times what their states need: in float32 8 bytes with SGD,
for parameters and gradients, and 16 with AdamW. It contains Python and PyTorch in nine
processes, half a gigabyte, so that small models miss the target for that alone.

    python benchmarks/large_model.py --sizes 0.03B,0.1B --optimizers sgd

Figures: `bytes_per_parameter/<optimizer>/<size>`; and `trained/<size>`, which is 1 if a model of
that size, with SGD, was trained for two rounds and exported within the memory of this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import command_line, figures
from harness.decoder_task import OPTIMIZERS, Decoder
from harness.figures import Target
from harness.processes import ISTHMUS, Program, started

from isthmus.errors import UserError
from isthmus.start.unfilled import parameters_without_memory

JOB = Path(__file__).parent / "harness" / "decoder_job.toml"
SIZES = {
    "tiny": (64, 2),
    "0.03B": (384, 17),
    "0.1B": (576, 25),
    "0.3B": (960, 27),
    "1B": (1664, 30),
    "1.5B": (2048, 29),
}
"""Width and layers, in the proportions of published models of these sizes."""
LARGEST = "1.5B"
INTERVAL_SECONDS = 0.2
LIMIT_SECONDS = 3600.0
TARGETS = {
    "bytes_per_parameter/sgd/*": Target(at_most=10.8, full_size=True),
    "bytes_per_parameter/adamw/*": Target(at_most=21.6, full_size=True),
    f"trained/{LARGEST}": Target(at_least=1),
}
MEMORY = ("Pss:", "Pss_Anon:", "Pss_File:", "Pss_Shmem:")
"""Fields of smaps_rollup: all proportional memory, and its kinds."""


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _add_options)
    some = command_line.of_size(options, full="0.3B,1B,1.5B", quick="0.1B", smoke="tiny,1.5B")
    both = ",".join(OPTIMIZERS)
    sizes = (options.sizes or some).split(",")
    optimizers = (
        options.optimizers or command_line.of_size(options, full=both, quick=both, smoke="sgd")
    ).split(",")
    for kind, given, known in (("sizes", sizes, SIZES), ("optimizers", optimizers, OPTIMIZERS)):
        for name in given:
            if name not in known:
                raise UserError(f"--{kind}: there is no {name}; there are {', '.join(known)}")
    results: dict[str, float] = {}
    rows = []
    for size in sizes:
        # A smoke test sees that the largest one is run, not that there is room for it.
        shape = SIZES["tiny" if options.smoke else size]
        count = parameters(*shape)
        for optimizer in optimizers:
            if size == LARGEST and optimizer != "sgd":
                continue
            try:
                peak = measure(shape, optimizer, options.timeline)
            except RuntimeError as error:
                if size != LARGEST:
                    raise
                print(error, file=sys.stderr)
                results[f"trained/{size}"] = 0
                continue
            if size == LARGEST:
                results[f"trained/{size}"] = 1
            else:
                results[f"bytes_per_parameter/{optimizer}/{size}"] = peak["Pss:"] / count
            cells = [f"{peak[kind] / 2**20:,.0f}" for kind in MEMORY]
            rows.append(
                (f"{size}, {optimizer}", f"{count:,}", *cells, f"{peak['Pss:'] / count:.1f}")
            )
    kinds = ("private", "files", "shared")
    header = ("model", "parameters", "peak MiB", *kinds, "bytes per parameter")
    print(figures.table(header, rows))
    figures.write(options.json, "large_model", figures.machine(), results, TARGETS)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", metavar="A,B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--optimizers", metavar="A,B", help=f"of {', '.join(OPTIMIZERS)}")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="add each sample, by process, to this file"
    )


def parameters(width: int, layers: int) -> int:
    """The number of parameters of a decoder."""
    with parameters_without_memory():
        model = Decoder(width, layers)
    return sum(each.numel() for each in model.parameters())


def measure(shape: tuple[int, int], optimizer: str, timeline: Path | None) -> dict[str, int]:
    """Peak bytes of all processes of a run and of its export, with the kinds at that time.

    Raises:
        RuntimeError: a command failed; with the end of its output.
    """
    width, layers = shape
    settings = {
        "task.settings.width": width,
        "task.settings.layers": layers,
        "task.settings.optimizer": f'"{optimizer}"',
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    peaks = []
    with tempfile.TemporaryDirectory(prefix="large-model-") as scratch:
        run = str(Path(scratch) / "run")
        for command in (["run", str(JOB), "--run-dir", run, *given], ["export", run]):
            with started([ISTHMUS, *command], Path(scratch) / "log") as program:
                with sampled(program, timeline) as peak:
                    program.wait(LIMIT_SECONDS)
                peaks.append(peak)
    return max(peaks, key=lambda peak: peak["Pss:"])


@contextmanager
def sampled(program: Program, timeline: Path | None) -> Iterator[dict[str, int]]:
    """The sample in the block with the most memory of a program and its descendants, in bytes."""
    peak = dict.fromkeys(MEMORY, 0)
    ended = threading.Event()
    began = time.monotonic()

    def sample() -> None:
        while not ended.wait(INTERVAL_SECONDS):
            by_process = {pid: proportional(pid) for pid in program.tree.pids()}
            now = {kind: sum(each[kind] for each in by_process.values()) for kind in MEMORY}
            if now["Pss:"] > peak["Pss:"]:
                peak.update(now)
            if timeline is not None:
                row = {
                    "seconds": round(time.monotonic() - began, 1),
                    "total": now,
                    "by_process": {_name(pid): each for pid, each in by_process.items()},
                }
                with timeline.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def proportional(pid: int) -> dict[str, int]:
    """The proportional memory of a process by kind, in bytes; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = dict.fromkeys(MEMORY, 0)
    for line in lines:
        name, *rest = line.split()
        if name in found:
            found[name] = 1024 * int(rest[0])
    return found


def _name(pid: int) -> str:
    """A process's number and program, for a person."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    return f"{pid} {b' '.join(words[:6]).decode(errors='replace')[-60:]}"


if __name__ == "__main__":
    sys.exit(main())
