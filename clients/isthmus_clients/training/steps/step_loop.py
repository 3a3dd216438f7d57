"""The order of a local step, for one device as for stacked ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from isthmus.job.learning_rate import RoundPosition
from isthmus.task.optimizers import TaskOptimizers
from isthmus_clients.training.steps.gradient_terms import GradientTerms

_Part = TypeVar("_Part")


class SteppedModel(Protocol):
    """What the steps train: the model of a device, or the stacked models of several."""

    def compute_gradients(self, parts: Iterable[Any], optimizer: str) -> None:
        """Forward and backward pass of a batch, for the optimizer of a name.

        Raises:
            TaskError: the task's code raised.
        """

    def add_terms(self, terms: GradientTerms, step: int) -> None:
        """Change the gradients by the terms of step `step`, from 0."""

    def clip(self) -> None:
        """Limit the norm of a model's gradients together."""

    def apply(self, optimizer: str) -> None:
        """Change the model by the gradients of the parameters of one optimizer."""

    def count(self, step: int) -> None:
        """Note the loss of step `step`, from 0, after it was applied.

        Raises:
            TaskError: it is not finite, and the steps end with it.
        """

    def finish(self, step: int) -> None:
        """End step `step`, from 0, of all optimizers."""


def take_steps(
    model: SteppedModel,
    optimizers: TaskOptimizers,
    batches: Iterable[Iterable[_Part]],
    terms: GradientTerms,
    position: RoundPosition,
    count: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Take the local steps of a round.

    Args:
        model: what is trained.
        optimizers: of its parameters.
        batches: the parts of each step's batch; those of one are read before the next begins.
        terms: of the gradients.
        position: of the round in the schedules.
        count: number of steps over which the schedules stretch the round.
        check: called before each step, and during long ways of a schedule; it may raise.

    Returns:
        The number of steps.

    Raises:
        TaskError: the task's code raised, or a loss is not finite.
    """
    steps = 0
    for step, parts in enumerate(batches):
        check()
        # Before the step: a schedule's rate is that of the step it is used in.
        optimizers.go_to(position.of_step(step, count), check)
        for name, own in _each_optimizer(optimizers, parts):
            model.compute_gradients(own, name)
            if terms:
                model.add_terms(terms, step)
            # After the terms: the norm is that of what is applied.
            model.clip()
            model.apply(name)
            model.count(step)
        model.finish(step)
        steps = step + 1
    return steps


def _each_optimizer(
    optimizers: TaskOptimizers, parts: Iterable[_Part]
) -> Iterator[tuple[str, Iterable[_Part]]]:
    """The optimizers of one step in turn, each with the parts of the batch.

    Until the next, there are no gradients yet, and only its parameters require them.
    """
    several = len(optimizers.named) > 1
    # Each optimizer reads them; with a single one they can be read as they come.
    parts = list(parts) if several else parts
    for name in optimizers.named:
        optimizers.zero_grad()
        with optimizers.alone(name):
            yield name, parts
