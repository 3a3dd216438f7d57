"""Messages between the service and the ranks, each one JSON value in the control store.

`Command` goes to all ranks, `ControlSignal` interrupts the command that runs, `ProgressReport` and
`Activity` come back while it runs and `Outcome` ends it. `RankFailure` comes from an agent.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from isthmus.system.process import signal_name

PROFILES = "profiles"
"""Name of the directory with traces of ranks, among those of runs."""


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """One start of all ranks: the `restart`-th under the agent of a `generation`."""

    generation: int
    restart: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.restart}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """An operation that all ranks perform together."""

    op: Literal["open", "train_steps", "mean_gradient", "export", "close"]
    """Name of the operation, as in the link's request."""
    run_id: str
    job: str = ""
    """open: the validated job as JSON."""
    base: str = ""
    """open: directory that relative task paths start from."""
    data: str | None = None
    """open: path of the data that the ranks train on."""
    layout: str = ""
    """open: the exchange set's safetensors header, as latin-1."""
    frozen: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """open: some values of each parameter that is not exchanged."""
    from_step: int = 0
    """train_steps, export: the step whose state is needed first; mean_gradient: the first step
    whose batch is used."""
    until_step: int = 0
    """train_steps: the absolute step to stop at, so that a repetition is exact; mean_gradient: the
    first step whose batch is not used."""
    model: str | None = None
    """train_steps, mean_gradient: file of a model to load first."""
    model_digest: str = ""
    """train_steps: SHA-256 of that model, in hexadecimal digits."""
    round: int = 0
    """train_steps: the round, from 1."""
    position: int = 0
    """train_steps: that of from_step in the schedules of the learning rate."""
    evaluate: bool = False
    """train_steps: evaluate the model afterwards."""
    statistics: bool = False
    """mean_gradient: with the running statistics over the batches, else with zeros there."""
    result: str | None = None
    """train_steps, export, mean_gradient: file to write the model, or the gradient, into."""


class ControlSignal(enum.IntEnum):
    """An interruption of the running command; the larger value wins over the smaller."""

    CONTINUE = 0
    """No interruption."""
    SAVE = 1
    """Save the state at the next step and stop: the machines are about to be taken."""
    CANCEL = 2
    """Stop at the next step: the result is not needed."""


ReadSignal = Callable[[], ControlSignal]
"""Returns the strongest signal that this rank has received for the running command."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """Figures of one optimizer step."""

    step: int
    """Steps of the run so far, this one included."""
    loss: float
    """Mean over the units of all replicas."""
    gradient_norm: float
    """2-norm of the whole gradient of that mean, before it is clipped."""
    learning_rate: float | None
    """Learning rate of the first group of parameters; None if it has none."""
    units_per_second: float
    """Rate of all replicas since the step before that has figures."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressReport:
    """Progress of a training command."""

    steps: int
    """Completed steps."""
    total_steps: int
    loss: float
    """Mean over the units scored since the last report, on the replica that reports."""
    examples_per_second: float
    """Rate of all replicas since the last report."""
    units_per_second: float
    """Rate of all replicas since the last report."""
    note: str = ""
    """For the user, in place of figures."""
    step_figures: Sequence[Mapping[str, float | None]] = ()
    """The last `RecordedStep` of the command, each as a mapping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """The last collective of a rank in one of its process groups."""

    group: str
    """Backend and name of the group."""
    axis: str
    """The mesh axis of the group; empty for others, such as that of all ranks."""
    ranks: Sequence[int]
    """Members of the group; empty for all ranks."""
    number: int
    """Position among the group's collectives, from 1."""
    operation: str
    """Name of the operation, such as `all_reduce`."""
    elements: int
    """Elements of its inputs."""
    done: bool
    """Whether it is over; the rank has then begun no further one."""

    @property
    def position(self) -> int:
        """Number of the collective that the rank is in, or has to begin next."""
        return self.number + 1 if self.done else self.number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activity:
    """What a rank's main thread does."""

    waits: bool
    """Whether it waits for other ranks."""
    seconds: float
    """How long it has been there, less the time without a processor, or half if that is less."""
    where: str
    """Line and function, of the user's code if it is in any."""
    in_task: bool = False
    """Whether it is in the user's code, or waits for a process that reads for it; not while that
    code is compiled."""
    longest: float = 0.0
    """Longest time from one step, or batch of an evaluation, to the next; 0 before there were two.
    """
    collectives: Sequence[Collective] = ()
    """Last collectives of the rank, if it has been there for a while."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a command: its values or its failure."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: str | None = None
    """One sentence for a person; None on success."""
    failure_code: str = ""
    """`IsthmusError.code` of the failure."""
    rank_exits: bool = False
    """The rank that failed exits, which ends the incarnation: other ranks may be waiting for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The exit of the rank that ended an incarnation, as its agent observed it."""

    rank: int
    exit_code: int
    """Negative: minus the number of the signal that killed it."""
    last_line: str
    """The last useful line of the rank's standard error; after a signal, what native code said."""

    def __str__(self) -> str:
        reason = f": {self.last_line}" if self.last_line else ""
        if self.exit_code < 0:
            return f"rank {self.rank} was ended by {signal_name(-self.exit_code)}{reason}"
        return f"rank {self.rank} ended (exit code {self.exit_code}){reason}"
