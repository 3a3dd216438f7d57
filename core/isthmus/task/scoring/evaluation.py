"""Evaluate a model on held-out examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.definition import Task, defines
from isthmus.task.scoring.inputs import pair_of, training_batches
from isthmus.task.scoring.steps import evaluation_step
from isthmus.task.scoring.units import Averages, figures_of, losses

if TYPE_CHECKING:
    from torch.utils.data import Dataset


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    indices: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> Averages:
    """Loss and metrics of the examples at `indices`, with the model in evaluation mode.

    Raises:
        TaskError: the task's code raised, or does not say how to evaluate.
    """
    by_step = defines(task, "evaluation_step")
    if not by_step and not defines(task, "loss"):
        raise TaskError(
            "there is held-out data, and the task defines neither loss() nor evaluation_step(); "
            "define one, or return None as eval_data()"
        )
    averages = Averages()
    was_training = model.training
    model.eval()
    try:
        for batch in training_batches(task, dataset, indices, batch_size, device):
            if by_step:
                averages.add_step(evaluation_step(task, model, batch))
                continue
            inputs, target = pair_of(task, batch)
            output, values = losses(task, model, inputs, target)
            averages.add({"loss": values, **figures_of(task, output, target)})
    finally:
        model.train(was_training)
    return averages
