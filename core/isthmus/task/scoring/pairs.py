"""Find losses and metrics that have a value for each pair of examples, which few tasks mean.

PyTorch broadcasts an output of shape (n, 1) and a target of shape (n,) to (n, n): each output is
then compared with each target, and the model learns the mean of all targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isthmus.task.definition import Task, defines
from isthmus.task.scoring.inputs import batches
from isthmus.task.scoring.units import figures_of, losses

if TYPE_CHECKING:
    from torch.utils.data import Dataset

_FEW, _MORE = 3, 4
"""Examples of the two batches that are compared."""


@torch.no_grad()
def pairs_in_words(task: Task, model: nn.Module, dataset: Dataset[Any], examples: int) -> str:
    """Which figures grow with the square of the batch, as ", where loss has a value for ...".

    Empty if none does, or if the dataset has too few examples to know.

    Raises:
        TaskError: the task's code raised.
    """
    if examples < _MORE or not defines(task, "loss"):
        return ""
    was_training = model.training
    model.eval()
    try:
        few, more = (_counts(task, model, dataset, rows) for rows in (_FEW, _MORE))
    finally:
        model.train(was_training)
    pairs = [
        name
        for name, count in more.items()
        if count and count * _FEW**2 == few.get(name, 0) * _MORE**2
    ]
    if not pairs:
        return ""
    return (
        f", where {' and '.join(pairs)} {'has' if len(pairs) == 1 else 'have'} a value for each "
        f"pair of examples ({more[pairs[0]]} for {_MORE}); unless that is meant, give output and "
        "target one shape"
    )


def _counts(task: Task, model: nn.Module, dataset: Dataset[Any], rows: int) -> dict[str, int]:
    """The number of values of each figure of the first rows."""
    counts = {}
    for inputs, target in batches(task, dataset, range(rows), rows, torch.device("cpu")):
        output, values = losses(task, model, inputs, target)
        for name, units in {"loss": values, **figures_of(task, output, target)}.items():
            counts[name] = units.values.numel()
    return counts
