"""Losses of a batch as a whole: a task's `training_step` and `evaluation_step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.definition import StepLoss, Task
from isthmus.task.loading import user_code
from isthmus.task.scoring.inputs import tensors_of
from isthmus.task.scoring.units import check_name


def training_step(task: Task, model: nn.Module, batch: Any, optimizer: str = "") -> StepLoss:
    """The loss of a batch, with its weight.

    Args:
        task: it defines `training_step`.
        model: the model, or what runs it.
        batch: what the loader gave.
        optimizer: the name of the optimizer that is about to step, if there are several.

    Raises:
        TaskError: the task's code raised an exception, or returned something else.
    """
    with user_code("training_step()"):
        step: Callable[..., object] = task.training_step
        returned = step(model, batch, optimizer=optimizer) if optimizer else step(model, batch)
    return _checked(returned, batch, "training_step()", optimizer)


def evaluation_step(task: Task, model: nn.Module, batch: Any) -> StepLoss:
    """The loss of a held-out batch, with its weight.

    Raises:
        TaskError: the task's code raised an exception, or returned something else.
    """
    with user_code("evaluation_step()"):
        returned = task.evaluation_step(model, batch)
    return _checked(returned, batch, "evaluation_step()")


def _checked(returned: Any, batch: Any, what: str, optimizer: str = "") -> StepLoss:
    step = StepLoss(returned) if isinstance(returned, torch.Tensor) else returned
    if not isinstance(step, StepLoss) or not _is_number(step.loss):
        shape = f" of shape {tuple(step.loss.shape)}" if _has_shape(step) else ""
        raise TaskError(
            f"{what} must return one number as a tensor, or an isthmus.StepLoss of one, not "
            f"{type(returned).__name__}{shape}"
        )
    taken = f"{optimizer}_loss" if optimizer else "loss"
    for name, part in step.parts.items():
        check_name(name, what)
        if name in ("loss", taken) or not _is_number(part):
            raise TaskError(
                f"{what} has the part {name!r}, which must be one number as a tensor and have "
                f"another name than {taken!r}"
            )
    if step.loss.is_complex() or any(part.is_complex() for part in step.parts.values()):
        raise TaskError(f"{what} returned complex numbers; return real ones, as by .abs()")
    if step.weight is None:
        return dataclasses.replace(step, weight=_examples(batch, what))
    if not 0 <= step.weight < float("inf"):
        raise TaskError(f"{what} has the weight {step.weight}; give a number that is not negative")
    return step


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _has_shape(step: object) -> bool:
    return isinstance(step, StepLoss) and isinstance(step.loss, torch.Tensor)


def _examples(batch: Any, what: str) -> int:
    """The number of examples of a batch: the rows of its tensors."""
    rows = {len(each) for each in tensors_of(batch) if each.ndim}
    if len(rows) != 1:
        raise TaskError(
            f"the tensors of a batch have different numbers of rows, so that {what} must say how "
            "many examples its loss is of; return isthmus.StepLoss(loss, weight=...)"
        )
    return rows.pop()
