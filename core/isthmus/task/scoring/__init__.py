"""Batches, losses and exact averages for training and evaluation in every regime.

Reading order: `inputs` (from rows to batches), `order` (which rows), `units` (what a task returns
of a batch, and averages), `steps` (losses of a batch as a whole), `evaluation`, `building`.
"""

from isthmus.task.scoring.building import (
    build_model,
    build_rank_model,
    build_same_model,
    build_small_model,
    build_start_model,
)
from isthmus.task.scoring.evaluation import evaluate
from isthmus.task.scoring.inputs import (
    batches,
    count_examples,
    map_tensors,
    pair_of,
    read,
    training_batches,
)
from isthmus.task.scoring.units import (
    Averages,
    UnitValues,
    figures_of,
    losses,
    losses_of,
    output_of,
)

__all__ = [
    "Averages",
    "UnitValues",
    "batches",
    "build_model",
    "build_rank_model",
    "build_same_model",
    "build_small_model",
    "build_start_model",
    "count_examples",
    "evaluate",
    "figures_of",
    "losses",
    "losses_of",
    "map_tensors",
    "output_of",
    "pair_of",
    "read",
    "training_batches",
]
