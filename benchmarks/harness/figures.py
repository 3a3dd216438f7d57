"""The table, the targets and the JSON file of figures that all benchmarks share.

A benchmark measures Isthmus and the compared system in turn, prints one table of ratios with the
medians, and passes its figures to `write` under the keys that its docstring lists, with the targets
of some. Medians and ratios are formatted here, so that they mean the same in every benchmark.

>>> rows = [("a round", "0.01 s", "600x"), ("two", "5 s", "2x")]
>>> print(table(("what", "Isthmus", "ratio"), rows))
what     Isthmus  ratio
a round   0.01 s   600x
two          5 s     2x
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A bound that the project sets itself for a figure."""

    at_least: float | None = None
    at_most: float | None = None
    full_size: bool = False
    """The bound is for the full sizes, and figures of `--quick` are not comparable to it."""

    def is_met(self, value: float) -> bool:
        """Whether a figure is within the bound.

        >>> Target(at_least=2.0).is_met(1.9), Target(at_most=2.0).is_met(1.9)
        (False, True)
        """
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        """`>= 2`, or `<= 3, full size`."""
        bounds = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.at_least), ("<=", self.at_most))
            if bound is not None
        ]
        return ", ".join([*bounds, *(["full size"] if self.full_size else [])])


Targets = Mapping[str, Target]
"""By the key of the figure; `*` in a key stands for any text."""


def target_of(key: str, targets: Targets) -> Target | None:
    """The target of a figure, if it has one.

    >>> str(target_of("speedup/1M/2", {"speedup/1M/*": Target(at_least=20)}))
    '>= 20'
    """
    return next((each for name, each in targets.items() if fnmatch.fnmatchcase(key, name)), None)


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
    return f"{short(median)} s [{short(min(seconds))}..{short(max(seconds))}]"


def times(ratio: float) -> str:
    """Format a ratio: `612x`, `4.3x`."""
    return f"{short(ratio)}x"


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
    path: Path | None,
    benchmark: str,
    on: Mapping[str, object],
    figures: Mapping[str, float],
    targets: Targets | None = None,
) -> None:
    """Write `{"benchmark", "machine", "figures", "targets"}` to `path`, if there is one."""
    if path is None:
        return
    found = {key: target_of(key, targets or {}) for key in figures}
    document = {
        "benchmark": benchmark,
        "machine": dict(on),
        "figures": dict(figures),
        "targets": {
            key: dataclasses.asdict(target) for key, target in found.items() if target is not None
        },
    }
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def short(value: float) -> str:
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
