"""Memory of a device that trains adapters, by the type in which it holds the frozen base.

`isthmus run` waits for one device, `isthmus client start`, which is a process of its own. It trains
factors of rank 8 under AdamW for two rounds, over a decoder of transformers that was made from a
configuration and saved in float32. Its peak is the kernel's VmHWM: all resident pages, Python,
PyTorch and transformers among them, from its start to its end. It contains what
`federated.frozen_dtype` costs: reading the files, and the comparison of the first batch with
float32. How much of a peak is not of the base is measured with a decoder of almost no size.

Figures: `memory_ratio/<bfloat16|int8>`, the peak divided by that with a base in float32, and
`base_ratio/<bfloat16|int8>`, the same without the peak of a decoder of almost no size.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command_line, figures
from harness.figures import Target
from harness.processes import ISTHMUS, Program, free_port, memory, started, wait_for_port

HARNESS = Path(__file__).parent / "harness"
SIZES = {
    "tiny": (64, 1),
    "0.03B": (512, 8),
    "0.1B": (768, 12),
    "0.2B": (1024, 13),
    "1B": (2048, 19),
}
"""Width and layers."""
TYPES = ("float32", "bfloat16", "int8")
INTERVAL_SECONDS = 0.02
LIMIT_SECONDS = 1800.0
TARGETS: dict[str, Target] = {}


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _add_options)
    command_line.needs("transformers", "transformers")
    command_line.needs("peft", "peft")
    size = options.size or command_line.of_size(options, full="1B", quick="0.2B", smoke="0.03B")
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        parameters = save_base(Path(scratch) / "base", *SIZES[size])
        save_base(Path(scratch) / "tiny", *SIZES["tiny"])
        peaks = {each: measure(Path(scratch), "base", size, each) for each in TYPES}
        least = measure(Path(scratch), "tiny", "tiny", "float32")
    results: dict[str, float] = {}
    rows = [("a decoder of almost no size", _megabytes(least), "", "")]
    for name, peak in peaks.items():
        ratio = peak / peaks["float32"]
        of_base = (peak - least) / max(peaks["float32"] - least, 1)
        rows.append((name, _megabytes(peak), figures.times(ratio), figures.times(of_base)))
        if name != "float32":
            results[f"memory_ratio/{name}"] = ratio
            results[f"base_ratio/{name}"] = of_base
    print(f"a base of {parameters / 1e6:.0f}M parameters, factors of rank 8, AdamW")
    header = ("the base in", "peak of the device, MB", "of float32", "without the first")
    print(figures.table(header, rows))
    machine = figures.machine("transformers", "peft")
    figures.write(options.json, "adapters", machine, results, TARGETS)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, help="of the base, in parameters")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}"


def save_base(folder: Path, width: int, layers: int) -> int:
    """Write a base as transformers does; returns the number of its parameters."""
    from harness.adapters_task import decoder

    torch.manual_seed(1)
    base = decoder(width, layers)
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


if __name__ == "__main__":
    sys.exit(main())
