"""Evaluate the sharded model on the held-out data: mean loss and metrics of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.data import Dataset

from isthmus.task import Task
from isthmus.task.definition import defines
from isthmus.task.held_out import HeldOut
from isthmus.task.scoring import Averages, batches, evaluate
from isthmus_datacenter.training.consensus import gather_averages
from isthmus_datacenter.training.forward_backward import ForwardBackward


class Evaluator:
    """Scores a run's held-out data, which is loaded once and kept."""

    def __init__(self, task: Task, batch_size: int, device: torch.device) -> None:
        """`batch_size` is the number of examples in one forward pass."""
        self.task = task
        self.batch_size = batch_size
        self.device = device
        self.held_out = HeldOut(task)
        self.on_batch: Callable[[], None] = lambda: None
        """Called at the beginning, and before each batch goes through the model."""

    def run(self, forward_backward: ForwardBackward, replica: int) -> dict[str, float]:
        """Score each example on one replica. All ranks call this together.

        The collectives of a sharded model run in step, so all replicas score equally many examples.
        Of a remainder, each replica scores one example, and those beyond the end are not counted.
        """
        self.on_batch()
        return self.held_out.measure(
            lambda data, count: self._measure(forward_backward, replica, data, count)
        )

    def _measure(
        self, forward_backward: ForwardBackward, replica: int, data: Dataset[object], count: int
    ) -> dict[str, float]:
        """Metrics of one data set with `count` examples."""
        dims = forward_backward.dims
        if defines(self.task, "evaluation_step"):
            # Its figures depend on which examples are in a batch, so each replica uses all batches.
            averages = self._averages(forward_backward, data, range(count))
            forward_backward.shard.reshard()
            counts = forward_backward.counts_losses and replica == 0
            return gather_averages([averages] if counts else []).result()
        per_replica, remainder = divmod(count, dims.data)
        parts: list[Averages] = []
        if per_replica:
            indices = range(replica * per_replica, (replica + 1) * per_replica)
            parts.append(self._averages(forward_backward, data, indices))
        if remainder:
            last = min(per_replica * dims.data + replica, count - 1)
            averages = self._averages(forward_backward, data, [last])
            if replica < remainder:
                parts.append(averages)
        forward_backward.shard.reshard()
        own_parts = parts if forward_backward.counts_losses else []
        return gather_averages(own_parts).result()

    def _averages(
        self, forward_backward: ForwardBackward, data: Dataset[object], indices: Sequence[int]
    ) -> Averages:
        """Loss and metrics of some examples; empty where another rank has the output."""
        model = forward_backward.model
        # The pass itself is elsewhere, which is the same code for every kind of participant.
        counted = model.register_forward_pre_hook(lambda *_: self.on_batch())
        try:
            if forward_backward.has_output:
                return evaluate(self.task, model, data, indices, self.batch_size, self.device)
            model.eval()
            with torch.no_grad():
                for inputs, _ in batches(self.task, data, indices, self.batch_size, self.device):
                    model(inputs)
            model.train()
            return Averages()
        finally:
            counted.remove()
