"""A task's optimizers with their learning-rate schedules, at a position of the run.

The position counts optimizer steps over the whole run, in both regimes. A schedule is rebuilt
wherever an optimizer is, and brought to the position by its own `step()`, so that no state of it is
stored and its values are PyTorch's bit for bit; the position is `schedule_step` of a run's state.

>>> import torch
>>> parameters = [torch.nn.Parameter(torch.zeros(3))]
>>> optimizer = torch.optim.SGD(parameters, lr=0.8)
>>> made = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
>>> optimizers = TaskOptimizers(made, parameters)
>>> optimizers.go_to(25)
>>> optimizers.rates()
{'': 0.2}
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.learning_rate import LearningRateSection, RoundPosition
from isthmus.task.loading import user_code
from isthmus.task.made_optimizers import pairs_by_name

NO_LENGTH = (
    "optimizer() returns an LRScheduler, and the job does not say how many steps of it a federated "
    "round is; set federated.local_steps or learning_rate.federated_round_steps"
)

MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler | None]
"""The job's schedule of an optimizer: scales its rates, and returns a scheduler or None."""


def job_schedule(job: Job, batch: int) -> MakeSchedule | None:
    """The schedule of a job's `[learning_rate]`; None if the job leaves the rates as they are.

    Args:
        job: the job.
        batch: examples of all participants in one step, for the scaling.
    """
    section = job.learning_rate
    if not section.is_used:
        return None

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * section.scale(batch)
        return _job_scheduler(section, job.schedule_steps, optimizer) if section.varies else None

    return make


def _job_scheduler(
    section: LearningRateSection, total: int | None, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    """The schedulers of PyTorch that a job's section names, in sequence."""
    warmup = section.warmup_steps
    stages: list[LRScheduler] = []
    starts: list[int] = []
    if warmup:
        stages.append(LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup))
        starts.append(warmup)
    if section.schedule == "linear":
        assert total is not None
        stages.append(LinearLR(optimizer, 1.0, section.end_factor, total - warmup))
    elif section.schedule == "cosine":
        assert total is not None
        stages.append(_cosine(section, total - warmup, optimizer))
        stages.append(ConstantLR(optimizer, section.end_factor, _FOREVER))
        starts.append(total)
    elif section.schedule == "step":
        assert section.step_size is not None
        stages.append(StepLR(optimizer, section.step_size, section.factor))
    elif section.schedule == "inverse_sqrt":
        knee = max(warmup, 1)
        stages.append(LambdaLR(optimizer, lambda step: (knee / (knee + step)) ** 0.5))
    else:
        stages.append(ConstantLR(optimizer, 1.0, _FOREVER))
    return SequentialLR(optimizer, stages, starts) if starts else stages[0]


def _cosine(
    section: LearningRateSection, steps: int, optimizer: torch.optim.Optimizer
) -> LRScheduler:
    """From the full rate to its last value in a number of steps.

    Raises:
        TaskError: one last value is needed for several rates.
    """
    end = section.end_factor
    rates = {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    if end and len(rates) > 1:
        raise TaskError(
            "learning_rate.end_factor with schedule='cosine' needs one rate for all parameter "
            f"groups, and optimizer() made groups with {sorted(rates)}; set it to 0"
        )
    return CosineAnnealingLR(optimizer, steps, end * max(rates))


_FOREVER = 1 << 62

_RATE = frozenset({"lr", "initial_lr"})
"""Options of a parameter group that every schedule controls."""


class TaskOptimizers:
    """The optimizers that a task's `optimizer()` returned, and the schedules of their rates."""

    def __init__(
        self,
        made: object,
        parameters: Iterable[torch.Tensor],
        job_schedule: MakeSchedule | None = None,
        earlier: Mapping[str, ScheduleState] | None = None,
    ) -> None:
        """Check what the task made, and attach the schedules.

        Args:
            made: an optimizer, or a pair of an optimizer and its `LRScheduler`; or a dictionary of
                these by name.
            parameters: those that were given to `optimizer()`.
            job_schedule: the job's schedule; None if the job has none.
            earlier: `schedules` of optimizers that were made in the same way before; saves the
                steps up to their position.

        Raises:
            TaskError: it is neither, an optimizer cannot train the parameters, or a schedule cannot
                be followed.
        """
        parameters = list(parameters)
        pairs = pairs_by_name(made, parameters)
        self.named: dict[str, torch.optim.Optimizer] = {
            name: optimizer for name, (optimizer, _) in pairs.items()
        }
        """The optimizers by name; that of a task with a single one has the empty name."""
        used = {
            id(parameter)
            for optimizer in self.named.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._unused = [parameter for parameter in parameters if id(parameter) not in used]
        """Parameters of no optimizer, whose gradients count in the norm that is clipped."""
        self._schedules: dict[str, _Schedule] = {}
        for name, (each, scheduler) in pairs.items():
            if job_schedule is not None:
                if scheduler is not None:
                    raise TaskError(
                        f"optimizer() returned its own {type(scheduler).__name__}, and the job's "
                        "table [learning_rate] has another schedule; remove one of them"
                    )
                scheduler = job_schedule(each)
                self._schedules[name] = _Schedule(each, scheduler)
            elif scheduler is not None:
                self._schedules[name] = _Schedule(each, scheduler)
            if earlier and name in earlier and name in self._schedules:
                self._schedules[name].adopt(earlier[name])

    @property
    def needs_position(self) -> bool:
        """Whether the rates depend on the position."""
        return any(schedule.scheduler is not None for schedule in self._schedules.values())

    @property
    def scheduled_rate(self) -> float | None:
        """The rate of the first group of the first optimizer; None without a schedule."""
        return next(iter(self.rates().values())) if self._schedules else None

    @property
    def schedules(self) -> dict[str, ScheduleState]:
        """The state of all schedules, without the optimizers; for optimizers made later."""
        return {name: schedule.state() for name, schedule in self._schedules.items()}

    def check_round(self, position: RoundPosition) -> None:
        """Refuse a round of devices whose length in the schedules is not known.

        Raises:
            TaskError: the schedules depend on it.
        """
        if self.needs_position and not position.steps:
            raise TaskError(NO_LENGTH)

    def go_to(self, position: int, check: Callable[[], None] = lambda: None) -> None:
        """Give all optimizers the rates of a position; `check` is called during long ways to it.

        Raises:
            TaskError: a schedule failed.
        """
        for schedule in self._schedules.values():
            with user_code("the step of the LRScheduler"):
                schedule.go_to(position, check)

    def restored(self) -> None:
        """Undo what restored options of the parameter groups have changed of the rates."""
        for schedule in self._schedules.values():
            schedule.write()

    def groups_split(self, name: str, parts: Sequence[int]) -> None:
        """Note that the parameter groups of an optimizer were split.

        Args:
            name: of the optimizer.
            parts: for each group that it has now, the index of the original group.
        """
        if name in self._schedules:
            self._schedules[name].parts = list(parts)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Within it only the parameters of one optimizer require gradients."""
        others = [
            parameter
            for other, optimizer in self.named.items()
            if other != name
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def rates(self) -> dict[str, float]:
        """The learning rate of the first parameter group of each optimizer."""
        return {name: float(each.param_groups[0]["lr"]) for name, each in self.named.items()}

    def zero_grad(self) -> None:
        """Delete all gradients."""
        for optimizer in self.named.values():
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._unused:
            parameter.grad = None

    def step(
        self,
        apply: Callable[[torch.optim.Optimizer], object] | None = None,
        only: str | None = None,
    ) -> None:
        """Apply the gradients, by `apply` instead of each optimizer's `step()` if it is given.

        `only` is the name of the one optimizer to step; None for all.

        Raises:
            TaskError: an optimizer failed.
        """
        for name, optimizer in self.named.items():
            if only is not None and name != only:
                continue
            with user_code("the optimizer's step"):
                optimizer.step() if apply is None else apply(optimizer)


@dataclasses.dataclass(frozen=True)
class ScheduleState:
    """The state of a schedule at a position."""

    made: str
    """What it was made from: the scheduler's class and the options of the groups at its start."""
    position: int
    scheduler: Mapping[str, Any]
    options: Sequence[Mapping[str, Any]]
    """Options of each parameter group, as the task made them."""
    controlled: frozenset[str]
    """Names of the options that the schedule has changed."""


class _Schedule:
    """Runs a scheduler on the parameter groups as the task made them.

    A sharded optimizer has more groups, and restoring a checkpoint changes their options. So the
    scheduler has groups of its own, whose values are written to those of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.parts = list(range(len(optimizer.param_groups)))
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._controlled = _RATE
        self._position = 0
        options = [sorted(each.items()) for each in self._options()]
        state = {} if scheduler is None else scheduler.state_dict()
        self._made = f"{type(scheduler).__name__} {state} {options}"
        self._origin = self.state()

    def go_to(self, position: int, check: Callable[[], None]) -> None:
        if self.scheduler is not None:
            if position < self._position:
                self.adopt(self._origin)
            while self._position < position:
                if self._position % _CHECK_INTERVAL == 0:
                    check()
                self._step(self.scheduler)
        self.write()

    def _step(self, scheduler: LRScheduler) -> None:
        own = self.optimizer.param_groups[:]
        before = self._options()
        self.optimizer.param_groups[:] = self._groups
        # PyTorch warns if no optimizer step precedes; here it was made by an earlier optimizer.
        vars(self.optimizer)["_opt_called"] = True
        try:
            scheduler.step()
            self._groups = self.optimizer.param_groups[:]
        finally:
            self.optimizer.param_groups[:] = own
        self._position += 1
        self._controlled |= {
            key
            for old, new in zip(before, self._options(), strict=True)
            for key, value in new.items()
            if key not in self._controlled and not _same(value, old.get(key))
        }

    def write(self) -> None:
        """Write the scheduled options to the groups of the optimizer."""
        for part, group in zip(self.parts, self.optimizer.param_groups, strict=True):
            source = self._groups[part]
            group.update({key: source[key] for key in self._controlled if key in source})

    def state(self) -> ScheduleState:
        scheduler = {} if self.scheduler is None else self.scheduler.state_dict()
        options = self._options()
        return ScheduleState(
            self._made,
            self._position,
            copy.deepcopy(scheduler),
            copy.deepcopy(options),
            self._controlled,
        )

    def adopt(self, state: ScheduleState) -> None:
        """Continue from a state; one of a schedule that was made in another way is ignored."""
        if state.made != self._made or self.scheduler is None:
            return
        self.scheduler.load_state_dict(copy.deepcopy(dict(state.scheduler)))
        for group, options in zip(self._groups, copy.deepcopy(state.options), strict=True):
            group.update(options)
        self._position = state.position
        self._controlled = state.controlled

    def _options(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._groups
        ]


_CHECK_INTERVAL = 4096
"""Steps of a schedule between two checks whether they are still needed."""


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)
