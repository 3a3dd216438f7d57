"""The model of one device, as the loop of its steps trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from isthmus.task.optimizers import TaskOptimizers
from isthmus.task.scoring import Averages
from isthmus_clients.training.accelerator import Arithmetic
from isthmus_clients.training.low_rank import Factors
from isthmus_clients.training.steps.gradient_terms import GradientTerms


class BatchGradient(Protocol):
    """`StepGradient`, or `PrivateSteps` in its place."""

    def add(self, parts: Any, averages: Averages, optimizer: str) -> torch.Tensor:
        """Add a batch's gradient to those of the parameters; returns its loss, a scalar."""


class DeviceModel:
    """Takes the steps of one device; a `step_loop.SteppedModel`.

    With factors in place of matrices (`low_rank`), gradients and terms are of the matrices, and are
    moved to the factors, which are what is clipped and trained.
    """

    def __init__(
        self,
        model: nn.Module,
        gradient: BatchGradient,
        arithmetic: Arithmetic,
        optimizers: TaskOptimizers,
        factors: Factors,
        watch: Callable[[int, float], None],
        report: Callable[[int, float], None],
    ) -> None:
        """Begin the steps of a round.

        Args:
            model: on the device.
            gradient: of a batch.
            arithmetic: how it is computed and applied.
            optimizers: of the parameters of `factors`.
            factors: what is trained.
            watch: called with the number of a step, from 1, and the loss of each optimizer; it may
                raise.
            report: called after each step with its number and the last loss.
        """
        self.averages = Averages()
        """The losses, and the named parts of a step's loss."""
        self._model = model
        self._gradient = gradient
        self._arithmetic = arithmetic
        self._optimizers = optimizers
        self._factors = factors
        self._watch = watch
        self._report = report
        self._loss = torch.zeros(())
        self._value = 0.0

    def compute_gradients(self, parts: Iterable[Any], optimizer: str) -> None:
        """See `step_loop.SteppedModel`."""
        self._loss = self._gradient.add(parts, self.averages, optimizer)
        self._factors.collect()
        self._arithmetic.unscale(self._optimizers, optimizer)

    def add_terms(self, terms: GradientTerms, step: int) -> None:
        """See `step_loop.SteppedModel`."""
        terms.add_to(dict(self._model.named_parameters()), step)
        self._factors.collect()

    def clip(self) -> None:
        """See `step_loop.SteppedModel`."""
        self._arithmetic.clip(self._factors.trained.values())

    def apply(self, optimizer: str) -> None:
        """See `step_loop.SteppedModel`."""
        self._arithmetic.step(self._optimizers, optimizer)
        self._factors.merge()

    def count(self, step: int) -> None:
        """See `step_loop.SteppedModel`."""
        self._value = float(self._loss)
        self._watch(step + 1, self._value)

    def finish(self, step: int) -> None:
        """See `step_loop.SteppedModel`."""
        self._report(step + 1, self._value)
