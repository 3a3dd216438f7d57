"""The central held-out data of a run: `eval_data()` and `public_eval()`, where a task has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from isthmus.errors import TaskError
from isthmus.task.definition import PUBLIC, Task
from isthmus.task.loading import user_code
from isthmus.task.not_finite import explain_not_finite
from isthmus.task.scoring import count_examples

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Measure = Callable[["Dataset[Any]", int], Mapping[str, float]]
"""Computes the metrics of a data set with the given number of examples."""


class HeldOut:
    """The held-out data sets, which are loaded on first use and kept."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._loaded: dict[str, tuple[Dataset[Any], int]] | None = None
        """Data set and number of its examples, by the prefix of its metrics."""

    def measure(self, measure: Measure) -> dict[str, float]:
        """Apply `measure` to each data set; metrics of the public one have the prefix `PUBLIC`.

        Raises:
            TaskError: a data set is not usable, a loss is nan, the task's code raised, or two
                metrics have the same name.
        """
        metrics: dict[str, float] = {}
        for prefix, (data, count) in self._data().items():
            for name, value in measure(data, count).items():
                if prefix + name in metrics:
                    raise TaskError(
                        f"metrics() has a figure {prefix + name!r}, which is the name of "
                        f"{name!r} on the data of public_eval(); rename it"
                    )
                if name == "loss" and math.isnan(value):
                    source = "public_eval()" if prefix else "eval_data()"
                    raise TaskError(
                        f"the loss on {source} is nan; "
                        f"{explain_not_finite(data, range(count), source)}"
                    )
                metrics[prefix + name] = value
        return metrics

    def _data(self) -> Mapping[str, tuple[Dataset[Any], int]]:
        if self._loaded is None:
            with user_code("eval_data()"):
                data = self._task.eval_data()
            with user_code("public_eval()"):
                public = self._task.public_eval()
            loaded: dict[str, tuple[Dataset[Any], int]] = {}
            if data is not None:
                loaded[""] = data, count_examples(data, "eval_data()")
            if public is not None:
                loaded[PUBLIC] = public, count_examples(public, "public_eval()")
            self._loaded = loaded
        return self._loaded
