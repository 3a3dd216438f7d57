"""Call a task's `optimizer()`, and check what it made: one or several, with schedulers or not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from isthmus.errors import TaskError
from isthmus.task.definition import Parameters, Participant, Task
from isthmus.task.loading import user_code

SEVERAL = (
    "optimizer() returned several optimizers, which only training_step() can use, each with a loss "
    "of its own; define it, or return one optimizer"
)


def made_by(task: Task, parameters: Parameters, participant: Participant) -> object:
    """What a task's `optimizer()` returns; the same parameters can be trained as before.

    A parameter that it froze would stay so in the participant's later rounds, and which rounds a
    participant was in would decide what it trains. One that it unfroze would be trained, and not
    exchanged.

    Raises:
        TaskError: it failed, froze a parameter, or unfroze one.
    """
    trainable = {name: each.requires_grad for name, each in parameters.named.items()}
    changed = None
    try:
        with user_code("optimizer()"):
            made: object = task.optimizer(parameters, participant)
    finally:
        for name, parameter in parameters.named.items():
            if parameter.requires_grad != trainable[name]:
                changed = changed or name
                parameter.requires_grad_(trainable[name])
    if changed is not None and trainable[changed]:
        raise TaskError(
            f"optimizer() froze {changed!r}, which would stay so in later rounds; freeze it in "
            "model(), or leave it out of the optimizer"
        )
    if changed is not None:
        raise TaskError(
            f"optimizer() unfroze {changed!r}, which is not exchanged, because it is frozen; do "
            "not freeze it in model() or by the job, and leave it out of the optimizer until it is "
            "trained"
        )
    return made


def pairs_by_name(
    made: object, parameters: Sequence[torch.Tensor]
) -> dict[str, tuple[torch.optim.Optimizer, LRScheduler | None]]:
    """The optimizers and schedulers that a task's `optimizer()` returned, by name."""
    if not isinstance(made, Mapping):
        return {"": _pair(made, parameters)}
    if not made or not all(isinstance(name, str) and name for name in made):
        raise TaskError("optimizer() returned a dictionary, whose keys must be names; name each")
    pairs = {name: _pair(each, parameters) for name, each in made.items()}
    owner: dict[int, str] = {}
    for name, (optimizer, _) in pairs.items():
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if owner.setdefault(id(parameter), name) != name:
                raise TaskError(
                    f"optimizer() gives one parameter to {owner[id(parameter)]!r} and to {name!r}; "
                    "give each to one optimizer, by parameters.of(prefix)"
                )
    return pairs


def _pair(
    made: object, parameters: Sequence[torch.Tensor]
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """The optimizer and the scheduler that a task's `optimizer()` returned."""
    if not isinstance(made, (tuple, list)):
        return check_optimizer(made, parameters), None
    kinds = ", ".join(type(each).__name__ for each in made)
    if len(made) != 2 or not isinstance(made[1], LRScheduler):
        raise TaskError(
            f"optimizer() returned ({kinds}), and not an optimizer or a pair of an optimizer and "
            "its torch.optim.lr_scheduler.LRScheduler"
        )
    optimizer = check_optimizer(made[0], parameters)
    scheduler = made[1]
    kind = type(scheduler).__name__
    required = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if isinstance(scheduler, ReduceLROnPlateau) or required:
        needed = required[0] if required else "a metric"
        raise TaskError(
            f"optimizer() returned the scheduler {kind}, whose step() needs {needed}; choose one "
            "whose rates follow from the number of steps alone"
        )
    if scheduler.optimizer is not optimizer:
        raise TaskError(
            f"optimizer() returned a {kind} of another optimizer; build it with the optimizer "
            "that is returned with it"
        )
    return optimizer, scheduler


def check_optimizer(made: object, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Check that an optimizer of a task can train the given parameters.

    Raises:
        TaskError: it is not an optimizer, or has none of the parameters.
    """
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"optimizer() returned {type(made).__name__}, not a torch.optim.Optimizer")
    given = {id(each) for each in parameters}
    if not any(id(each) in given for group in made.param_groups for each in group["params"]):
        raise TaskError("optimizer() uses none of the parameters that were passed to it; use them")
    return made
