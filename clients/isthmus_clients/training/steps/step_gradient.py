"""The gradient of a local step on a device, of a batch or of parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from isthmus.task import Task, user_code
from isthmus.task.definition import defines
from isthmus.task.scoring import Averages, losses, pair_of
from isthmus.task.scoring.steps import training_step
from isthmus_clients.training.accelerator import Arithmetic
from isthmus_clients.training.local_data import StepPart

Backward = Callable[[torch.Tensor], None]


class StepGradient:
    """Adds the gradients of a task's loss to those of the parameters."""

    def __init__(
        self, task: Task, model: nn.Module, arithmetic: Arithmetic, *, accumulates: bool
    ) -> None:
        """`model` is what runs a step; `accumulates` tells whether a step may have parts."""
        self._task = task
        self._model = model
        self._arithmetic = arithmetic
        self._accumulates = accumulates
        self._by_step = defines(task, "training_step")

    def add(self, parts: Iterable[StepPart], averages: Averages, optimizer: str) -> torch.Tensor:
        """Add the gradient of the mean loss of a batch, and return that loss, a scalar.

        Args:
            parts: of the batch.
            averages: the losses are added to it, and the named parts of a step's loss.
            optimizer: name of the one that is about to step; empty if there is one only.

        Raises:
            TaskError: the task's code raised.
        """
        if not self._accumulates:
            (part,) = parts
            loss, _ = self._loss(part.batch, averages, optimizer)
            self._backward(loss)
            return loss.detach()
        # How many units the parts score is known after the last one. Until then the sums are
        # divided by the number of examples, which keeps gradients in the range of fp16.
        size = None
        total = torch.zeros((), device=self._arithmetic.device)
        count: float | torch.Tensor = 0.0
        for part in parts:
            size = size or part.examples
            loss, weight = self._loss(part.batch, averages, optimizer)
            summed = loss * weight
            self._backward(summed / size)
            total = total + summed.detach()
            count = count + weight
        factor = (size or 1) / torch.as_tensor(count).clamp(min=1e-30)
        # Now that the number of units is known, to the gradient of the mean over them.
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad))
        return total / torch.as_tensor(count).clamp(min=1e-30).to(total)

    def add_share(self, part: StepPart, share: float, optimizer: str) -> None:
        """Add the gradient of the mean loss of a part, times `share`, in full precision.

        Raises:
            TaskError: the task's code raised.
        """
        loss, _ = self._loss_of(part.batch, Averages(), optimizer)
        with user_code("the backward pass"):
            torch.autograd.backward(loss * share)

    def add_alone(self, part: StepPart, optimizer: str) -> torch.Tensor:
        """Add the gradient of the mean loss of a part, which is not scaled; returns the loss.

        In the precision of steps, but nothing is kept for a step.

        Raises:
            TaskError: the task's code raised.
        """
        loss, _ = self._loss(part.batch, Averages(), optimizer)
        with user_code("the backward pass"):
            torch.autograd.backward(loss)
        return loss.detach()

    @torch.no_grad()
    def loss_of(self, model: nn.Module, part: StepPart) -> torch.Tensor:
        """The mean loss of a part by a model, a scalar, for the first optimizer of the task.

        Raises:
            TaskError: the task's code raised.
        """
        with self._arithmetic.autocast():
            if self._by_step:
                return training_step(self._task, model, part.batch).loss
            inputs, target = pair_of(self._task, part.batch)
            _, values = losses(self._task, model, inputs, target)
            return values.mean()

    def _backward(self, loss: torch.Tensor) -> None:
        with user_code("the backward pass"):
            self._arithmetic.backward(loss)

    def _loss(
        self, batch: Any, averages: Averages, optimizer: str
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        with self._arithmetic.autocast():
            return self._loss_of(batch, averages, optimizer)

    def _loss_of(
        self, batch: Any, averages: Averages, optimizer: str
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """The mean loss of one batch, and its weight."""
        if self._by_step:
            step = training_step(self._task, self._model, batch, optimizer)
            assert step.weight is not None
            averages.add_step(step, optimizer)
            return step.loss, step.weight
        inputs, target = pair_of(self._task, batch)
        _, values = losses(self._task, self._model, inputs, target)
        averages.add({"loss": values})
        return values.mean(), values.count()
