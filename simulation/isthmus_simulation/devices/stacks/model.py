"""Stacked models of several devices, as the loop of their steps trains them.

Shape legend: K = devices of a stack, the empty places at its end included, B = examples of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from isthmus.task.optimizers import TaskOptimizers
from isthmus_clients.training.steps.gradient_terms import GradientTerms
from isthmus_simulation.devices.stacks.gradients import Gradients, Stacked
from isthmus_simulation.devices.stacks.optimizers import clip_each, plain_descent


class StackedModel:
    """Takes the steps of a stack; a `step_loop.SteppedModel`.

    All devices take as many steps as the one with the most. The parameters of a device are copied
    after its own last step, and what follows is padding.
    """

    def __init__(
        self,
        gradients: Gradients,
        start: Stacked,
        stacked: Stacked,
        optimizers: TaskOptimizers,
        steps: Sequence[int],
        clip_norm: float | None,
        *,
        may_descend: bool,
    ) -> None:
        """Begin the steps of a round.

        Args:
            gradients: of the stacked parameters.
            start: the parameters of a model before the round (*shape).
            stacked: those of all devices (K, *shape), which the steps change.
            optimizers: of the stacked parameters.
            steps: of each device; fewer than K where there are empty places.
            clip_norm: maximum 2-norm of each device's gradient.
            may_descend: whether nothing comes between gradients and optimizer, so that both can be
                one computation if that is a plain descent.
        """
        count = len(steps)
        self.ends = {name: part.expand(count, *part.shape) for name, part in start.items()}
        """The parameters after each device's last step; those at the start without any step."""
        self.losses: list[torch.Tensor] = []
        """The losses of the examples (K, B) of each step."""
        self._gradients = gradients
        self._stacked = stacked
        self._optimizers = optimizers
        self._steps = steps
        self._clip_norm = clip_norm
        self._may_descend = may_descend
        self._rates: list[float] | None = None
        """The rates of a plain descent; None if the optimizer has to step."""

    def compute_gradients(self, parts: Iterable[torch.Tensor], optimizer: str) -> None:
        """Compute the gradients, or apply them at once in a plain descent.

        Args:
            parts: inputs and targets (K, B, ...), and weights (K, B).
            optimizer: not used, as there is one only.

        Raises:
            TaskError: the task's code raised.
        """
        inputs, targets, weights = parts
        # What they are depends on the schedule only.
        if self._may_descend and (not self.losses or self._optimizers.needs_position):
            self._rates = plain_descent(self._optimizers, self._stacked)
        if self._rates is not None:
            examples = self._gradients.descend(self._stacked, inputs, targets, weights, self._rates)
        else:
            gradients, examples = self._gradients(self._stacked, inputs, targets, weights)
            for name, gradient in gradients.items():
                if name not in self._gradients.unused:
                    self._stacked[name].grad = gradient
        self.losses.append(examples)

    def add_terms(self, terms: GradientTerms, step: int) -> None:
        """See `step_loop.SteppedModel`."""
        terms.add_to(self._stacked, step)

    def clip(self) -> None:
        """See `step_loop.SteppedModel`."""
        clip_each(self._stacked, self._clip_norm)

    def apply(self, optimizer: str) -> None:
        """See `step_loop.SteppedModel`."""
        if self._rates is None:
            self._optimizers.step(only=optimizer)

    def count(self, step: int) -> None:
        """Do nothing: losses are checked after the round, because that waits for all of them."""

    def finish(self, step: int) -> None:
        """Keep the parameters of the devices whose last step it was."""
        done = [k for k, count in enumerate(self._steps) if count == step + 1]
        if len(done) == len(self._steps):
            self.ends = {name: part.detach()[: len(done)] for name, part in self._stacked.items()}
        elif done:
            for name, part in self._stacked.items():
                # A copy only where devices end at different steps.
                if self.ends[name].stride(0) == 0:
                    self.ends[name] = self.ends[name].clone()
                self.ends[name][done] = part.detach()[done]
