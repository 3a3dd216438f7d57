"""The command line, the table and the JSON file of figures that all benchmarks share.

A benchmark measures Isthmus and the compared system in turn, prints one table of ratios with the
medians, and passes its figures to `write` under the keys that its docstring lists. Medians and
ratios are formatted here, so that they mean the same in every benchmark.

>>> rows = [("a round", "0.01 s", "600x"), ("two", "5 s", "2x")]
>>> print(table(("what", "Isthmus", "ratio"), rows))
what     Isthmus  ratio
a round   0.01 s   600x
two          5 s     2x
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def options(
    description: str,
    argv: Sequence[str] | None = None,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Parse the command line of a benchmark: `quick` (bool) and `json` (Path or None).

    `more` adds the options of one benchmark.
    """
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="measure a small part, under 100 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    more(parser)
    return parser.parse_args(argv)


def machine(*packages: str) -> dict[str, str | int | float]:
    """Describe the machine, with the versions of the given packages."""
    description: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in ("isthmus", "torch", *packages):
        try:
            description[package] = version(package)
        except PackageNotFoundError:
            description[package] = "not installed"
    return description


def spread(seconds: Sequence[float]) -> str:
    """Format median and range in seconds: `6.07 s [3.06..6.15]`."""
    median = statistics.median(seconds)
    return f"{_short(median)} s [{_short(min(seconds))}..{_short(max(seconds))}]"


def times(ratio: float) -> str:
    """Format a ratio: `612x`, `4.3x`."""
    return f"{_short(ratio)}x"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align a table: the first column to the left, the others to the right."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = (
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def write(
    path: Path | None, benchmark: str, on: Mapping[str, object], figures: Mapping[str, float]
) -> None:
    """Write `{"benchmark", "machine", "figures"}` to `path`, if there is one."""
    if path is None:
        return
    document = {"benchmark": benchmark, "machine": dict(on), "figures": dict(figures)}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) >= 1e-4 else f"{value:.6f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
