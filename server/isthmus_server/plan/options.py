"""What `isthmus plan` is asked for besides the job; the command and `isthmus.plan` share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import click

from isthmus.errors import UserError
from isthmus_server.plan.goodput import Failures
from isthmus_server.plan.gpus import gpu_of
from isthmus_server.plan.step_time import GpuNodes


class PolicyNames(click.ParamType):  # type: ignore[type-arg]  # which click has from 8.3 on only
    """Names that commas separate, as an option of a command."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """The names; a default has them already, and a caller from Python may."""
        if not isinstance(value, str):
            return tuple(value)
        return tuple(name for name in value.split(",") if name)


def _option(text: str, **declared: Any) -> Mapping[str, Any]:
    """The arguments of `click.option` for a field, whose default and name it has.

    Args:
        text: the help of the option, and what the field is.
        **declared: other arguments.
    """
    return {"help": text, **declared}


_POSITIVE = click.FloatRange(0, min_open=True)
_RANGE = (1e-12, 1e12)
"""Numbers that are planned with, and 0 where an option allows it: what follows from others may be
none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan is asked for besides the job: each field is an option of `isthmus plan`."""

    ranks: int | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Ranks of the datacenter, which need not be here. Default: datacenter.ranks.",
            type=click.IntRange(1, 1 << 20),
        ),
    )
    device: str | None = dataclasses.field(
        default=None,
        metadata=_option(
            "What the ranks are. Default: gpu, and cpu with --measure.",
            type=click.Choice(["gpu", "cpu"]),
        ),
    )
    layouts: bool = dataclasses.field(
        default=False,
        metadata=_option("Compare all layouts that so many ranks allow.", is_flag=True),
    )
    memory_gib: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Memory of a rank in GiB: say which layouts fit.", type=_POSITIVE, metavar="N"
        ),
    )
    tflops: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Operations of a rank in 10**12 per second, for the time of a step.",
            type=_POSITIVE,
            metavar="N",
        ),
    )
    measure: bool = dataclasses.field(
        default=False,
        metadata=_option(
            "Train some steps on this machine's processors for a few seconds, to measure that "
            "rate.",
            is_flag=True,
        ),
    )
    gpu: str | None = dataclasses.field(
        default=None,
        metadata=_option(
            "What the ranks are: a100, h100, h200 or b200. Its data sheet gives the time of a "
            "step.",
            metavar="NAME",
        ),
    )
    gpus_per_node: int | None = dataclasses.field(
        default=None,
        metadata=_option(
            "With --gpu: ranks with NVLink between them. Default: 8.",
            type=click.IntRange(1, 1 << 12),
            metavar="N",
        ),
    )
    peak_share: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "With --gpu: share of the peak rate that a step reaches. Default: 0.4; 0.3 in float8.",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="X",
        ),
    )
    mtbf_hours: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Mean hours between failures of one rank: say how much of the time trains.",
            type=_POSITIVE,
            metavar="H",
        ),
    )
    checkpoint_seconds: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "With --mtbf-hours: seconds that training waits for a checkpoint.",
            type=_POSITIVE,
            metavar="S",
        ),
    )
    restart_seconds: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "With --mtbf-hours: seconds from a failure to the next step. Default: 60.",
            type=click.FloatRange(0),
            metavar="S",
        ),
    )
    collectives: bool = dataclasses.field(
        default=False,
        metadata=_option(
            "Compare what the ranks send each other in a step, and refuse where they would hang.",
            is_flag=True,
        ),
    )
    mbit: float | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Rate of a device's link in Mbit/s. Default: time.least_rate, if the job sets it.",
            type=_POSITIVE,
            metavar="N",
        ),
    )
    trial: int | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Simulate the first N rounds with each policy here, and forecast quality at the end.",
            type=click.IntRange(3, 10_000),
            metavar="N",
        ),
    )
    policies: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_option(
            "Policies of --trial. Default: the job's own, and those of one regime that it can "
            "have.",
            type=PolicyNames(),
            metavar="A,B",
        ),
    )
    calibrate: Path | None = dataclasses.field(
        default=None,
        metadata=_option(
            "Use what the run in this directory, of the same task, measured.",
            type=click.Path(path_type=Path),
            metavar="RUN",
        ),
    )

    @classmethod
    def of_values(cls, given: Mapping[str, Any]) -> Self:
        """The options with values from Python, which are checked as those of the command are.

        Args:
            given: values by the names of the fields; None for a default.

        Raises:
            UserError: a value is none that the option can have.
        """
        found: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            value = given.get(each.name)
            if value is None:
                continue
            untyped = click.BOOL if "is_flag" in each.metadata else click.STRING
            kind = each.metadata.get("type", untyped)
            # As a word of the command: of a number, click would cut off what is no whole one.
            word = value if isinstance(value, list | tuple) else str(value)
            try:
                found[each.name] = kind.convert(word, None, None)
            except click.BadParameter as error:
                raise UserError(f"{each.name}={value!r} cannot be planned with: {error}") from None
        return cls(**found)

    @property
    def words(self) -> list[str]:
        """The options as words of the command, without those that have their default."""
        found = []
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value == each.default:
                continue
            found.append(f"--{each.name.replace('_', '-')}")
            if each.name == "policies":
                found.append(",".join(value))
            elif "is_flag" not in each.metadata:
                found.append(f"{value:.15g}" if isinstance(value, float) else str(value))
        return found

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            UserError: with what to leave out.
        """
        if self.measure and self.tflops is not None:
            raise UserError("--measure finds the rate that --tflops gives; leave one of them out")
        if self.measure and self.device == "gpu":
            raise UserError(
                "--measure trains on this machine's processors, whose rate says nothing of GPUs; "
                "give theirs by --tflops, or plan for --device cpu"
            )
        self._check_gpu()
        self._check_failures()
        self._check_numbers()
        if self.policies and self.trial is None:
            raise UserError("--policies names the policies of a trial; give its rounds by --trial")

    def _check_numbers(self) -> None:
        least, most = _RANGE
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and value and not least <= value <= most:
                raise UserError(
                    f"--{each.name.replace('_', '-')} {value:g} is nothing to plan with; give a "
                    f"number from {least:g} to {most:g}"
                )

    def _check_gpu(self) -> None:
        if self.gpu is None:
            for option, given in (
                ("--gpus-per-node", self.gpus_per_node),
                ("--peak-share", self.peak_share),
            ):
                if given is not None:
                    raise UserError(f"{option} is about the GPU that --gpu names; add it")
            return
        gpu_of(self.gpu)
        if self.tflops is not None or self.measure:
            raise UserError(
                "--gpu has its own rate, and --tflops and --measure give one; leave one out"
            )
        if self.device == "cpu":
            raise UserError("--gpu and --device cpu contradict each other; leave one out")

    def _check_failures(self) -> None:
        if self.mtbf_hours is None:
            for option, given in (
                ("--checkpoint-seconds", self.checkpoint_seconds),
                ("--restart-seconds", self.restart_seconds),
            ):
                if given is not None:
                    raise UserError(
                        f"{option} says what failures cost; give their rate by --mtbf-hours"
                    )
            return
        if not math.isfinite(self.mtbf_hours):
            raise UserError(
                "--mtbf-hours has to be a number of hours; leave it out if nothing fails"
            )
        if self.checkpoint_seconds is None:
            raise UserError(
                "--mtbf-hours needs the seconds of a checkpoint; give them by --checkpoint-seconds"
            )

    @property
    def memory_of_rank(self) -> float | None:
        """Memory of a rank in GiB: what is given, or that of the GPU that is named."""
        if self.memory_gib is None and self.gpu is not None:
            return gpu_of(self.gpu).memory_gib
        return self.memory_gib

    @property
    def nodes(self) -> GpuNodes | None:
        """Where the ranks are, if their GPU is named."""
        if self.gpu is None:
            return None
        return GpuNodes(gpu=gpu_of(self.gpu), gpus_per_node=self.gpus_per_node or 8)

    def failures(self, ranks: int) -> Failures | None:
        """Failures of so many ranks; None if nothing is said of them."""
        if self.mtbf_hours is None or self.checkpoint_seconds is None or not ranks:
            return None
        restart = 60.0 if self.restart_seconds is None else self.restart_seconds
        return Failures(
            rank_mtbf_seconds=self.mtbf_hours * 3600,
            ranks=ranks,
            checkpoint_seconds=self.checkpoint_seconds,
            restart_seconds=restart,
        )

    @property
    def on_gpus(self) -> bool:
        """Whether ranks are GPUs."""
        return self.device == "gpu" or (self.device is None and not self.measure)
