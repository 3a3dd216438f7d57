"""Loss and metrics of the held-out data, scored by the ranks as they hold the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from isthmus.task import Task, user_code
from isthmus.task.scoring import Averages, batches, count_examples, evaluate
from isthmus_datacenter.training.agreement import over_all_ranks
from isthmus_datacenter.training.forward_backward import ForwardBackward


class Evaluation:
    """Scores what a run holds out; the data are read once and kept."""

    def __init__(self, task: Task, batch_size: int, device: torch.device) -> None:
        """`batch_size` examples at a time, on the device."""
        self.task = task
        self.batch_size = batch_size
        self.device = device
        self._data: Dataset[object] | None = None

    def run(self, passes: ForwardBackward, replica: int) -> dict[str, float]:
        """Each example scored by one replica. All ranks call this together.

        A sharded model runs its collectives in step, so all replicas score equally many examples;
        for the few left over each scores one more, and those beyond the end are not counted.
        """
        if self._data is None:
            with user_code("eval_data()"):
                self._data = self.task.eval_data()
        data, layout = self._data, passes.layout
        count = count_examples(data, "eval_data()")
        share, rest = divmod(count, layout.data)
        parts: list[Averages] = []
        if share:
            indices = range(replica * share, (replica + 1) * share)
            parts.append(self._scored(passes, data, indices))
        if rest:
            last = min(share * layout.data + replica, count - 1)
            extra = self._scored(passes, data, [last])
            if replica < rest:
                parts.append(extra)
        passes.share.at_rest()
        return over_all_ranks(parts if passes.scores else [], layout.ranks).result()

    def _scored(
        self, passes: ForwardBackward, data: Dataset[object], indices: Sequence[int]
    ) -> Averages:
        """Figures of some examples, or nothing where another stage has the output."""
        model = passes.model
        if passes.has_output:
            return evaluate(self.task, model, data, indices, self.batch_size, self.device)
        model.eval()
        with torch.no_grad():
            for inputs, _ in batches(data, indices, self.batch_size, self.device):
                model(inputs)
        model.train()
        return Averages()
