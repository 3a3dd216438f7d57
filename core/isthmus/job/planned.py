"""What a plan of a job says before it runs: figures with their unit and how they were obtained.

Other packages than the server's compute their parts, and `isthmus plan` puts them together. Each is
a module-level function of the entry-point group `PLANS`: `datacenter`, called as
`plan_ranks(job, task, base, ranks, question) -> PlannedRanks`; `simulation`, called as
`train_trial(job, base, directory, rounds)`, which leaves a run in the directory; and `timing`,
called as `time_rounds(job, base, directory, rounds, seconds)`, whose devices train nothing.

>>> Figure("update", 128, "bytes", EXACT).text
'128 bytes (exact)'
>>> Figure("update", 128, "bytes", EXACT, most=256).text
'128 to 256 bytes (exact)'
>>> Figure("step", 3.8e-05, "s", GIVEN, most=0.25).text
'0.000038 to 0.25 s (given)'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.printable import below_a_second

PLANS = "isthmus.plans"
"""Entry points of the parts of a plan that other packages compute, by what they are about."""

EXACT = "exact"
"""Computed by the code that the run itself uses."""
FAKE = "from fake tensors"
"""Counted of tensors that have shapes and no values."""
MEASURED = "measured on this machine"
GIVEN = "given"
"""By an option or the job."""
WHY_NO_SUM = (
    "the peak is not the sum of the parts: of parameters and gradients that zero_stage 1 to 3 "
    "shards, the parts are the share that a rank keeps, and in a step they are gathered for a "
    "while; not all parts are there at the same time"
)
"""How the memory of a rank is to be read."""
SIMULATED = "from simulated rounds"
"""Forecast from the first rounds of the job, trained with simulated devices."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of a plan."""

    name: str
    value: float
    """The figure, or the least that it can be."""
    unit: str
    how: str
    """How it was obtained: `EXACT`, `FAKE`, `MEASURED`, `GIVEN`, or several in words."""
    most: float | None = None
    """The most that it can be, if that is more than `value`."""

    @property
    def highest(self) -> float:
        """The most that it can be."""
        return self.value if self.most is None else self.most

    @property
    def text(self) -> str:
        """For a terminal."""
        if self.unit == "s":
            most, _, unit = seconds_text(self.highest).partition(" ")
            least = _in_unit(self.value, unit)
            shown = most if least == most else f"{least} to {most}"
            return f"{shown} {unit} ({self.how})"
        shown = _shown(self.value, self.unit)
        if self.most is not None and self.most != self.value:
            shown += f" to {_shown(self.most, self.unit)}"
        return f"{shown} {self.unit} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        """All fields; `most` is the value where the figure is one number."""
        return {**dataclasses.asdict(self), "most": self.highest}


def seconds_text(value: float) -> str:
    """Seconds with four digits at most, in a unit that needs no powers of ten.

    >>> seconds_text(0.00425), seconds_text(0.25), seconds_text(0.0)
    ('4.25 ms', '0.25 s', '0 s')
    """
    return below_a_second(value, digits=4) or f"{_shown(value, 's')} s"


def _in_unit(value: float, unit: str) -> str:
    """Seconds in a unit of `seconds_text`, with four digits and no power of ten."""
    number = value / {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    shown = _shown(number, "s")
    return f"{number:.6f}".rstrip("0").rstrip(".") if "e-" in shown else shown


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value:,.0f}"
    return f"{value:,.0f}" if float(value).is_integer() and value < 1e9 else f"{value:.4g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksQuestion:
    """What is to be found out about ranks."""

    on_gpus: bool = True
    """Whether they are GPUs."""
    layouts: bool = False
    """Whether all layouts are compared, and not only the job's."""
    measure: bool = False
    """Whether some steps are trained on this machine's processors, to measure their rate."""
    traffic: bool = False
    """Whether what a rank sends in a step is found."""
    operations_of_layouts: bool = False
    """Whether operations, and with `traffic` messages, are found of each compared layout."""
    memory: float | None = None
    """Bytes of a rank; of layouts that do not fit, only the memory is found. None for any."""
    collectives: bool = False
    """Whether the collectives of a step are compared over the ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """Messages of one kind that a rank takes part in, in one group, in a step."""

    operation: str
    """As `torch.distributed` calls it."""
    ranks: tuple[int, ...]
    """Ranks of the group."""
    count: int
    size: int
    """Bytes of all of them, each the larger of what a rank gives and receives."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout of ranks, with what the rank that has most needs."""

    keys: Mapping[str, Any]
    """Keys of `[datacenter]` and their values, of those that differ between layouts."""
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of parameters, gradients, optimizer, activations, and the peak of a step; empty if they
    are not known."""
    refused: str = ""
    """Why the layout is impossible, or its memory not known."""
    examples: int = 0
    """Examples of a step, on all ranks; 0 if it was not asked."""
    operations: float | None = None
    """Operations of one rank in a step; None if not asked or not known."""
    traffic: Sequence[RankTraffic] | None = None
    """What the first rank sends and receives in a step; None if not asked or not known."""

    @property
    def peak(self) -> int:
        """Most bytes at any time of a step; 0 if that is not known."""
        return self.memory.get("peak", 0)

    def changes(self, ranks: int) -> dict[str, Any]:
        """Keys of a job and their values, with which it has the layout on so many ranks."""
        found = {f"datacenter.{key}": value for key, value in self.keys.items()}
        return {
            "datacenter.ranks": ranks,
            "datacenter.layout": "given",
            "datacenter.data_parallel": None,
            **found,
        }

    @property
    def text(self) -> str:
        """The keys of the layout in words, without degrees of 1.

        >>> PlannedLayout(keys={"zero_stage": 2, "tensor_parallel": 1, "pipeline_parallel": 2}).text
        'zero_stage=2, pipeline_parallel=2'
        >>> PlannedLayout(keys={"zero_stage": 2, "tensor_parallel": 1}).text
        'zero_stage=2, data parallel only'
        """
        degrees = {key: each for key, each in self.keys.items() if key.endswith("_parallel")}
        shown = {key: each for key, each in self.keys.items() if degrees.get(key) != 1}
        parts = [f"{key}={value}" for key, value in shown.items()]
        if degrees and not degrees.keys() & shown.keys():
            parts.append("data parallel only")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """What the datacenter of a job needs on so many ranks."""

    ranks: int
    on_gpus: bool
    layout: PlannedLayout
    """Layout of the job."""
    others: Sequence[PlannedLayout] = ()
    """All layouts of so many ranks, the job's among them: by their peak, then those refused."""
    largest: tuple[str, int]
    """Name and bytes of the largest parameter of the model."""
    examples: int
    """Examples of a step, on all ranks."""
    operations: float | None
    """Floating-point operations of one rank in a step; None if they are not known."""
    unknown: str = ""
    """Why the operations are not known."""
    rate: float | None = None
    """Operations per second that were measured; None if nothing was."""
    elements: int = 0
    """Number of elements of all parameters of the whole model."""
    expert_elements: int = 0
    """Number of elements of the parameters of experts that ranks divide; 0 if they divide none."""
    traffic: Sequence[RankTraffic] | None = None
    """What the first rank sends and receives in a step; None if not asked or not known."""
    traffic_unknown: str = ""
    """Why it is not known."""
    collectives: str = ""
    """What the comparison of collectives found, or why they cannot be compared; empty if it was not
    asked."""
