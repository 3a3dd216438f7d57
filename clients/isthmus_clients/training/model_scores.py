"""Score models on a device's data, so that devices can compare them for a policy.

Scores are bounded, so that no single overconfident prediction decides. By default they follow from
the losses, without units: the same training with another scale of the loss has the same scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import TaskError, UpdateError
from isthmus.task import Task, user_code
from isthmus.task.scoring import batches, count_examples, losses_of, output_of
from isthmus.task.scoring.units import unit_values
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer

Candidates = Sequence[Sequence[int]]
"""Models to score: each is the mean of the received models with these indices."""


@torch.no_grad()
def unit_scores(
    task: Task, model: nn.Module, dataset: Dataset[Any], batch_size: int
) -> tuple[torch.Tensor, bool]:
    """The task's score of every scored unit of a dataset, or its loss if the task has no score.

    Returns:
        The values, in double precision on the CPU (units,), and whether they are losses.
    """
    was_training = model.training
    model.eval()
    order = range(count_examples(dataset, "local_data()"))
    parts = []
    are_losses = False
    try:
        for inputs, target in batches(task, dataset, order, batch_size, torch.device("cpu")):
            output = output_of(task, model, inputs)
            with user_code("score()"):
                returned = task.score(output, target)
            if returned is None:
                values = losses_of(task, output, target)
                are_losses = True
            else:
                scored = unit_values(returned, "score()")
                if scored is None:
                    raise TaskError(
                        "score() must return one value per example, not a single number"
                    )
                values = scored
            parts.append(values.scored("loss()" if are_losses else "score()").double())
    finally:
        model.train(was_training)
    return torch.cat(parts), are_losses


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Turns losses into scores from 0 (best) to 1 which have no units.

    A loss x becomes x / (x + the first model's mean loss). The scale of the loss does not change
    it, and large losses still differ, other than with an exponential.
    """

    lowest: float
    """The first model's lowest loss if that is below 0, else 0: where scores begin."""
    mean: float
    """The first model's mean loss above that, over the units for which it is finite."""

    @classmethod
    def of(cls, losses: torch.Tensor) -> LossScale:
        """Take the scale from the first model's losses (units,)."""
        finite = losses[losses.isfinite()]
        if not len(finite):
            return cls(0.0, 1.0)
        lowest = min(float(finite.min()), 0.0)
        return cls(lowest, float(finite.mean()) - lowest)

    def scores(self, losses: torch.Tensor) -> torch.Tensor:
        """The scores of losses (units,); nan where a loss is not finite."""
        above = (losses - self.lowest).clamp(min=0)
        return above / (above + max(self.mean, torch.finfo(losses.dtype).tiny))


def mean_score(scores: torch.Tensor) -> float:
    """The mean of scores (units,), of which those outside of 0 to 1 are clamped and nan is 1."""
    return float(scores.nan_to_num(nan=1.0).clamp(0, 1).mean())


def score_each(
    task: Task,
    model: nn.Module,
    layout: TensorLayout,
    dataset: Dataset[Any],
    batch_size: int,
    models: Sequence[Buffer],
    candidates: Candidates,
) -> list[float]:
    """Each candidate's mean score on a dataset, 0 (best) to 1; see `Task.score`.

    Args:
        task: the task.
        model: the module that each candidate is loaded into.
        layout: layout of the exchange set.
        dataset: the device's data.
        batch_size: examples per batch.
        models: encoded vectors.
        candidates: indices of the models that each candidate is the mean of.

    Raises:
        UpdateError: a candidate refers to a model that was not received.
        TaskError: the task's code raised.
    """
    vectors = [layout.decode(encoded) for encoded in models]
    scores = []
    scale: LossScale | None = None
    # In their order: the first one gives the scale of the losses for all.
    for indices in candidates:
        if not indices or not all(index < len(vectors) for index in indices):
            raise UpdateError(
                f"a candidate of the models {list(indices)} is to be scored and {len(vectors)} came"
            )
        mean = vectors[indices[0]].clone()
        for index in indices[1:]:
            mean.add_(vectors[index])
        layout.scatter(mean.div_(len(indices)), model)
        # By the task's own score if it has one, which has a scale already.
        values, are_losses = unit_scores(task, model, dataset, batch_size)
        if are_losses:
            scale = scale or LossScale.of(values)
            values = scale.scores(values)
        scores.append(mean_score(values))
    return scores
