"""The task's optimizer for the stacked models of several devices.

Shape legend: K = devices of a stack.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task
from isthmus.task.made_optimizers import pairs_by_name
from isthmus.task.optimizers import ScheduleState, TaskOptimizers
from isthmus_clients.training.steps.made_optimizer import make_optimizer, round_optimizers
from isthmus_simulation.devices.stacks.gradients import Stacked

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Others, and subclasses, may compute something of a whole tensor, which has all devices' rows."""


def stacked_optimizers(
    run: tuple[Task, Job, nn.Module],
    stacked: Stacked,
    indices: Sequence[Sequence[list[int]]],
    participants: Sequence[Participant],
    position: RoundPosition,
    earlier: Mapping[str, ScheduleState],
    reference: Participant,
) -> tuple[TaskOptimizers, Callable[[], None]]:
    """The task's optimizers over all devices' parameters at once, with the round's first rates.

    The task makes them for the parameters of one model, whose places the stacked ones take.

    Args:
        run: the task, the job, and a model with the names of the stacked parameters.
        stacked: the parameters.
        indices: the examples of each step of each device.
        participants: the devices, of which the first one's optimizers are used.
        position: of the round.
        earlier: the schedules of the round before.
        reference: a device, in the same round, whose optimizers all others' have to be like.

    Returns:
        The optimizers, and what refuses schedules that have meanwhile asked for the device.

    Raises:
        TaskError: an optimizer is not element-wise, devices have others, or are at different
            positions, or the task changes gradients by hooks.
    """
    task, job, model = run
    named = dict(model.named_parameters())
    watched = _Watched.of(participants[0])
    made = _made(task, watched, named)
    if is_compared := watched.is_told_apart:
        _check_alike(task, participants, reference, named)
        made = _made(task, participants[0], named)  # the last one, as it may change the task
    _check_hooks(named)
    optimizers = round_optimizers(job, made, named, position, earlier)
    _check_elementwise(optimizers.named.values())
    if optimizers.needs_position and len(set(map(len, indices))) > 1:
        raise TaskError(
            "stacked models are trained together, and with a schedule of the learning rate all "
            "need the same number of steps; set federated.local_steps, or train one by one"
        )
    for optimizer in optimizers.named.values():
        _use_stacked(optimizer, {named[name]: part for name, part in stacked.items()})

    def check() -> None:
        if not is_compared and watched.is_told_apart:
            raise TaskError(
                "stacked models have one schedule, and that of optimizer() asks in its steps which "
                "device it is for; train one by one"
            )

    return optimizers, check


def _made(task: Task, participant: Participant, named: Mapping[str, nn.Parameter]) -> object:
    return make_optimizer(task, participant, participant.round, named)


class _Watched(Participant):
    """A device that notes whether the task's `optimizer()` asks which one it is.

    If it does not, it makes the same for all devices of a round.
    """

    @classmethod
    def of(cls, participant: Participant) -> _Watched:
        watched = cls(**vars(participant))
        vars(watched)["read"] = set()
        return watched

    def __getattribute__(self, name: str) -> Any:
        read = super().__getattribute__("__dict__").get("read")
        if read is not None:
            read.add(name)
        return super().__getattribute__(name)

    @property
    def is_told_apart(self) -> bool:
        """Whether anything that differs between devices was read."""
        read: set[str] = super().__getattribute__("__dict__")["read"]
        return not read <= {"round", "regime", "is_told_apart"}


def _check_alike(
    task: Task,
    participants: Sequence[Participant],
    reference: Participant,
    named: Mapping[str, nn.Parameter],
) -> None:
    """Compare what `optimizer()` makes for devices, and what it leaves in the task.

    Raises:
        TaskError: it differs from that of `reference`.
    """

    def made(participant: Participant) -> str:
        return _options(_made(task, participant, named), named) + _numbers(task)

    own = made(reference)
    for each in participants:
        if made(each) != own:
            raise TaskError(
                "stacked models have one optimizer, and optimizer() makes another one for "
                f"{each.name} than for {reference.name}, or prepares the task otherwise; train one "
                "by one"
            )


def _numbers(task: Task) -> str:
    """The numbers and words among a task's attributes."""
    return repr({k: v for k, v in vars(task).items() if isinstance(v, bool | int | float | str)})


def _options(made: object, named: Mapping[str, nn.Parameter]) -> str:
    """The kinds and options of optimizers and schedules, and the names of their parameters."""
    names = {id(parameter): name for name, parameter in named.items()}

    def plain(options: Mapping[str, Any]) -> dict[str, object]:
        return {
            name: _plain(value)
            for name, value in options.items()
            if name not in ("params", "optimizer")
        }

    return repr(
        [
            (
                name,
                type(optimizer),
                [
                    (plain(group), [names.get(id(each)) for each in group["params"]])
                    for group in optimizer.param_groups
                ],
                type(scheduler),
                None if scheduler is None else plain(vars(scheduler)),
            )
            for name, (optimizer, scheduler) in pairs_by_name(made, [*named.values()]).items()
        ]
    )


def _plain(value: object) -> object:
    """A value whose text is that of equal values only."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, value.__defaults__, cells
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def _check_hooks(named: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in named.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TaskError(
                f"stacked models cannot use hooks of the gradient of a parameter ({name!r}), which "
                "would get those of several devices; remove them, or train one by one"
            )


def _use_stacked(
    optimizer: torch.optim.Optimizer, stacked: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Replace parameters by stacked ones, also in the state; frozen ones are left out."""
    for part in stacked.values():
        part.requires_grad_()
    for group in optimizer.param_groups:
        group["params"] = [stacked[each] for each in group["params"] if each in stacked]
    for parameter, state in list(optimizer.state.items()):
        del optimizer.state[parameter]
        if parameter in stacked:
            part = stacked[parameter]
            optimizer.state[part] = {
                name: value.expand(part.shape).clone()
                if isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and name != "step"
                else value
                for name, value in state.items()
            }


def _check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in _ELEMENTWISE:
            raise TaskError(
                f"stacked models cannot use {name}, which may not be element-wise; choose one of "
                f"PyTorch's ({', '.join(each.__name__ for each in _ELEMENTWISE)}), or train one by "
                "one"
            )
        if _has_hooks(optimizer):
            raise TaskError(
                f"stacked models cannot use hooks of the steps of {name}, which would get the "
                "parameters of several devices; remove them, or train one by one"
            )


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something of the task's is called in a step."""
    step = vars(optimizer).get("step")  # schedulers of PyTorch replace it, to count steps
    is_replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return is_replaced or any(hooks)


def clip_each(stacked: Stacked, clip_norm: float | None) -> None:
    """Scale each device's gradient down to a 2-norm; see `torch.nn.utils.clip_grad_norm_`."""
    gradients = [part.grad for part in stacked.values() if part.grad is not None]
    if clip_norm is None or not gradients:
        return
    rows = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    norms = torch.stack([each.norm(dim=1) for each in rows]).norm(dim=0)
    factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)  # (K)
    for each in rows:
        each.mul_(factors.unsqueeze(1))


def plain_descent(optimizers: TaskOptimizers, stacked: Stacked) -> list[float] | None:
    """The learning rate of each parameter; None for all but SGD without options."""
    rates: dict[int, float] = {}
    for optimizer in optimizers.named.values():
        if type(optimizer) is not torch.optim.SGD:
            return None
        for group in optimizer.param_groups:
            used = [group[name] for name in ("momentum", "weight_decay", "maximize")]
            if any(used) or isinstance(group["lr"], torch.Tensor):
                return None
            rates |= {id(parameter): group["lr"] for parameter in group["params"]}
    return [rates[id(part)] for part in stacked.values()] if len(rates) == len(stacked) else None
