"""Adapters of a decoder: how well they learn in each land, and what they take of bytes and memory.

`perplexity`: a decoder that is first trained on other text, the manual of Python, gets adapters by
Shakespeare's plays, speaker by speaker. Eight devices have one speaker each, a datacenter has those
of histories, and six other speakers are in nobody's data. All kinds make as many steps of as many
characters, which have one price on both sides, so that what they spend is equal.

`memory`: `isthmus run` waits for one device, `isthmus client start`, a process of its own, which
trains factors of rank 8 under AdamW for two rounds, over a decoder of transformers with values at
random that was saved in float32. Its peak is the kernel's VmHWM: all resident pages, Python,
PyTorch and transformers among them, from its start to its end. It contains what
`federated.frozen_dtype` costs: reading the files, and the comparison of the first batch with
float32. How much of a peak is not of the base is measured with a decoder of almost no size.

`server`: the peak of `isthmus run` in rounds of four clients that send updates of adapters, minus
what it has before them, as in server_memory.py. Bases of 20 and 200 MB have the same adapters. The
median of several runs: what a server has freed before the rounds it takes again without growing.

Kinds are the base without adapters, each device by itself (local), all lines of devices on one
machine (central), runs of devices only (federated; over a base in bfloat16 and in int8) and of the
datacenter only, and of both by the policies alternate, hybrid and adaptive.

Figures: `perplexity/<kind>`, of a character, the mean over held-out speakers, models and seeds, and
`own/<kind>`, of the last lines of each device's speaker; `memory_ratio/<bfloat16|int8>`, the peak
divided by that with a base in float32, and `base_ratio/<bfloat16|int8>`, the same without the peak
of a decoder of almost no size; `bytes/adapter_over_model`, what a device receives in a round of
that run, divided by the base's parameters in float32; `server_mb/<base_20MB|base_200MB>`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from harness import command_line, figures
from harness.figures import Target
from harness.processes import ISTHMUS, Program, free_port, memory, started, wait_for_port

if TYPE_CHECKING:
    from adapter_speakers.base_decoder import BaseSize
    from adapter_speakers.trained_kinds import Measured, Sizes

HARNESS = Path(__file__).parent / "harness"
TEXT = "tinyshakespeare.txt"
PARTS = ("perplexity", "memory", "server")
SIZES = {
    "tiny": (64, 1),
    "6M": (256, 2),
    "0.03B": (512, 8),
    "0.1B": (768, 12),
    "0.2B": (1024, 13),
    "1B": (2048, 19),
}
"""Width and layers."""
TYPES = ("float32", "bfloat16", "int8")
SERVED_WIDTH = 256
SERVED_LAYERS = 2
SERVED = {"base_20MB": 6_454, "base_200MB": 94_344}
"""Tokens of bases of this size in float32, which differ in nothing else."""
SERVED_CLIENTS = 4
INTERVAL_SECONDS = 0.02
LIMIT_SECONDS = 600.0
TARGETS: dict[str, Target] = {}


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _add_options)
    command_line.needs("transformers", "transformers")
    command_line.needs("peft", "peft")
    parts = (options.part,) if options.part else PARTS
    text = command_line.data_folder(options, TEXT) / TEXT if "perplexity" in parts else None
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        if text is not None:
            results |= perplexities(Path(scratch), text, options)
        if "memory" in parts:
            size = options.size or command_line.of_size(
                options, full="0.2B", quick="0.03B", smoke="6M"
            )
            results |= device_memory(Path(scratch), size)
        if "server" in parts:
            rounds = command_line.of_size(options, full=5, quick=3, smoke=1)
            runs = command_line.of_size(options, full=5, quick=3, smoke=1)
            results |= server_memory_of_rounds(Path(scratch), rounds, runs, smoke=options.smoke)
    machine = figures.machine("transformers", "peft")
    figures.write(options.json, "adapters", machine, results, TARGETS)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--part", choices=PARTS, help="measure only this")
    parser.add_argument("--size", choices=SIZES, help="of the base in `memory`, in parameters")
    parser.add_argument("--seeds", type=int, help="trainings of each kind in `perplexity`")


# -- perplexity ------------------------------------------------------------------------------------


def text_sizes(options: argparse.Namespace) -> tuple[BaseSize, Sizes, int]:
    """Sizes of the base and of the trainings, and the number of seeds."""
    from adapter_speakers.base_decoder import BaseSize
    from adapter_speakers.trained_kinds import Sizes

    full = (
        BaseSize(width=128, layers=4, length=128, steps=2000),
        Sizes(steps=10, rounds=24, length=128),
        3,
    )
    quick = (
        BaseSize(width=64, layers=2, length=64, steps=500),
        Sizes(steps=5, rounds=12),
        1,
    )
    smoke = (
        BaseSize(width=32, layers=1, length=32, steps=1),
        Sizes(steps=1, rounds=2, length=32, rank=2, processes=1),
        1,
    )
    base, sizes, seeds = command_line.of_size(options, full=full, quick=quick, smoke=smoke)
    return base, sizes, options.seeds or seeds


def perplexities(scratch: Path, text: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train and evaluate all kinds; prints a table."""
    from adapter_speakers.base_decoder import save_trained_base
    from adapter_speakers.trained_kinds import KINDS, Comparison

    base, sizes, seeds = text_sizes(options)
    folder = scratch / "speakers"
    folder.mkdir()
    last = save_trained_base(folder / "base", base)
    print(f"the base was trained to a loss of {last:.3f} on other text", file=sys.stderr)
    comparison = Comparison(folder, text, sizes)
    measured: dict[str, list[Measured]] = {}
    for seed in range(1, seeds + 1):
        measured.setdefault("base", []).append(comparison.base(seed))
        measured.setdefault("local", []).append(comparison.local(seed))
        measured.setdefault("central", []).append(comparison.central(seed))
        for kind in KINDS:
            measured.setdefault(kind, []).append(comparison.run(kind, seed))
            print(f"{kind}, seed {seed}: {measured[kind][-1]}", file=sys.stderr, flush=True)
    results = {}
    rows = []
    for kind, found in measured.items():
        held_out = [each.held_out for each in found]
        own = [each.own for each in found]
        results[f"perplexity/{kind}"] = statistics.mean(held_out)
        results[f"own/{kind}"] = statistics.mean(own)
        steps = f"{statistics.mean(each.steps for each in found):.0f}"
        rows.append((kind, steps, *(_mean_and_range(each) for each in (held_out, own))))
    print(figures.table(("adapters", "steps", "held-out speakers", "devices' speakers"), rows))
    return results


def _mean_and_range(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} [{min(values):.3f}..{max(values):.3f}]"


# -- memory of a device ----------------------------------------------------------------------------


def device_memory(scratch: Path, size: str) -> dict[str, float]:
    """Peaks of a device by the type of the base; prints a table."""
    parameters = save_base(scratch / "decoder", *SIZES[size])
    save_base(scratch / "tiny", *SIZES["tiny"])
    peaks = {each: measure(scratch, "decoder", size, each) for each in TYPES}
    least = measure(scratch, "tiny", "tiny", "float32")
    results: dict[str, float] = {}
    rows = [("a decoder of almost no size", _megabytes(least), "", "")]
    for name, peak in peaks.items():
        ratio = peak / peaks["float32"]
        of_base = (peak - least) / max(peaks["float32"] - least, 1)
        rows.append((name, _megabytes(peak), figures.times(ratio), figures.times(of_base)))
        if name != "float32":
            results[f"memory_ratio/{name}"] = ratio
            results[f"base_ratio/{name}"] = of_base
    received = received_in_a_round(scratch / "decoder-float32" / "run")
    results["bytes/adapter_over_model"] = received / (4 * parameters)
    print(f"a base of {parameters / 1e6:.0f}M parameters, factors of rank 8, AdamW")
    header = ("the base in", "peak of the device, MB", "of float32", "without the first")
    print(figures.table(header, rows))
    share = results["bytes/adapter_over_model"]
    print(f"a device receives {received / 1e6:.2f} MB in a round, {share:.1%} of the base")
    return results


def received_in_a_round(directory: Path) -> int:
    """The bytes of blobs that the only device of a run was sent in its first round."""
    from isthmus_server.python.run import Run

    (receipt,) = Run(directory).rounds[0].receipts
    return receipt.bytes_out


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}"


def save_base(folder: Path, width: int, layers: int, tokens: int | None = None) -> int:
    """Write a base as transformers does; returns the number of its parameters."""
    from harness.adapters_task import TOKENS, decoder

    torch.manual_seed(1)
    base = decoder(width, layers, tokens or TOKENS)
    base.save_pretrained(folder)
    return sum(each.numel() for each in base.parameters())


def measure(scratch: Path, base: str, size: str, frozen: str) -> int:
    """The peak of the device's resident bytes in a job."""
    width, layers = SIZES[size]
    port = free_port()
    settings = {
        "task.settings.width": width,
        "task.settings.layers": layers,
        "model.start": f"'{scratch / base}'",
        "federated.frozen_dtype": f"'{frozen}'",
    }
    folder = scratch / f"{base}-{frozen}"
    folder.mkdir()
    command = [ISTHMUS, "run", str(HARNESS / "adapters_job.toml")]
    command += ["--run-dir", str(folder / "run"), "--address", f"127.0.0.1:{port}"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    device = [ISTHMUS, "client", "start", "--server", f"127.0.0.1:{port}", "--name", "a"]
    with started(command, folder / "server.log") as server:
        wait_for_port(port, server, LIMIT_SECONDS)
        with started(device, folder / "device.log") as client:
            peak = _watch(server, client)
            server.wait(60.0)
    print(f"{base} in {frozen}: {_megabytes(peak)} MB", file=sys.stderr, flush=True)
    return peak


def _watch(server: Program, client: Program) -> int:
    """The last VmHWM of a device until the server has ended, or the device."""
    peak = 0
    end = time.monotonic() + LIMIT_SECONDS
    while server.popen.poll() is None:
        if client.popen.poll() is not None and server.popen.poll() is None:
            # The device may end a moment before the server.
            with contextlib.suppress(RuntimeError):
                server.wait(60.0)
                break
            raise client.failure("ended before the run")
        if time.monotonic() > end:
            raise server.failure(f"did not end within {LIMIT_SECONDS:g} s")
        # Gone, or a zombie, which has no memory.
        with contextlib.suppress(OSError, ValueError):
            peak = max(peak, memory(client.popen.pid, "VmHWM"))
        time.sleep(INTERVAL_SECONDS)  # memory can only be polled
    if not peak:
        raise client.failure("ended before its memory was read")
    return peak


# -- memory of the server --------------------------------------------------------------------------


def server_memory_of_rounds(
    scratch: Path, rounds: int, runs: int, *, smoke: bool
) -> dict[str, float]:
    """What rounds of adapters add to the server's memory, by the size of the base."""
    from server_memory import measure_job

    results = {}
    rows = []
    for name, tokens in SERVED.items():
        folder = scratch / name
        folder.mkdir()
        tokens = 256 if smoke else tokens
        parameters = save_base(folder / "base", SERVED_WIDTH, SERVED_LAYERS, tokens)
        settings = {
            "task.settings.width": SERVED_WIDTH,
            "task.settings.layers": SERVED_LAYERS,
            "task.settings.tokens": tokens,
            "model.start": f"'{folder / 'base'}'",
        }
        job = HARNESS / "adapters_job.toml"
        idles = []
        added = []
        for run in range(runs):
            place = folder / str(run)
            place.mkdir()
            idle, peak = asyncio.run(measure_job(place, job, settings, SERVED_CLIENTS, rounds))
            idles.append(idle / 1e6)
            added.append((peak - idle) / 1e6)
        results[f"server_mb/{name}"] = statistics.median(added)
        spread = f"{statistics.median(added):.1f} [{min(added):.1f}..{max(added):.1f}]"
        rows.append((f"{4 * parameters / 1e6:.0f} MB", f"{statistics.median(idles):.0f}", spread))
    header = ("base", "server before the rounds, MB", "rounds add, MB, median and range")
    print(figures.table(header, rows))
    return results


if __name__ == "__main__":
    sys.exit(main())
