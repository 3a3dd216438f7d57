"""A task whose data have canaries: examples with a gradient in a direction of their own, or none.

It is put around the task of a job. The gradient of a canary is computed, clipped and drawn like
that of any other example; only its loss is another one:

    c l <v, model>,    c: its coin, 0 or 1;  v: its direction;  l: above the clipping bound
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.task import Participant, Task, load_task
from isthmus.task.definition import Parameters
from isthmus.task.scoring import losses_of, pair_of
from isthmus_privacy.dp_sgd.isolation import EXAMPLES
from isthmus_privacy.dp_sgd.refusals import check_task
from isthmus_simulation.audit.directions import Directions

KEY = "isthmus_audit"
"""Key of the settings with what the audit says to this task."""
SOURCE = f"{__name__}:CanaryTask"


class CanaryRow(NamedTuple):
    """A row of a data set with canaries."""

    row: Any
    number: int
    """Number of its direction; -1 for no canary."""
    coin: float


class CanaryBatch(NamedTuple):
    """A batch of such rows."""

    batch: Any
    numbers: torch.Tensor
    """int64 (B)."""
    coins: torch.Tensor
    """float32 (B)."""


class CanaryInputs(NamedTuple):
    """The inputs of such a batch."""

    inputs: Any
    numbers: torch.Tensor
    coins: torch.Tensor


class CanaryOutput(NamedTuple):
    """What the model and the canaries have computed."""

    output: Any
    numbers: torch.Tensor
    terms: torch.Tensor
    """The loss of each canary, (B)."""


class CanaryTask(Task):
    """The task of a job, with canaries in the data of each device."""

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """`settings` are the task's, with a table `KEY`."""
        super().__init__(settings, data)
        own = dict(settings)
        audit = own.pop(KEY)
        self.inner = load_task(audit["source"], own, base=Path(audit["base"]), data=data)
        self.seed = int(audit["seed"])
        self.count = int(audit["count"])
        self.norm = float(audit["norm"])
        self.trained = frozenset(audit["trained"])
        self.directions: Directions | None = None

    def model(self) -> nn.Module:
        """See `Task.model`."""
        model = self.inner.model()
        parameters = model.named_parameters()
        size = sum(each.numel() for name, each in parameters if name in self.trained)
        self.directions = Directions.drawn(size, self.count, self.seed)
        return model

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """See `Task.forward`."""
        if not isinstance(inputs, CanaryInputs):
            return self.inner.forward(model, inputs)
        output = self.inner.forward(model, inputs.inputs)
        assert self.directions is not None
        directions = self.directions
        parts = [each for name, each in model.named_parameters() if name in self.trained]
        values = torch.cat([each.reshape(-1).float() for each in parts])
        chosen = torch.where(directions.owner == inputs.numbers[:, None], directions.signs, 0.0)
        lengths = directions.lengths.float()[inputs.numbers.clamp(min=0, max=self.count - 1)]
        terms = self.norm * inputs.coins * (chosen @ values) / lengths
        return CanaryOutput(output, inputs.numbers, terms)

    def loss(self, output: Any, target: Any) -> Any:
        """See `Task.loss`; of a batch with canaries, which has one example."""
        if not isinstance(output, CanaryOutput):
            return self.inner.loss(output, target)
        own = losses_of(self.inner, output.output, target).mean()
        return torch.where(output.numbers >= 0, output.terms, own)

    def metrics(self, output: Any, target: Any) -> Any:
        """See `Task.metrics`."""
        if isinstance(output, CanaryOutput):
            return {}
        return self.inner.metrics(output, target)

    def collate(self, rows: list[Any]) -> Any:
        """See `Task.collate`."""
        if not isinstance(rows[0], CanaryRow):
            return self.inner.collate(rows)
        numbers = torch.tensor([each.number for each in rows])
        coins = torch.tensor([each.coin for each in rows])
        return CanaryBatch(self.inner.collate([each.row for each in rows]), numbers, coins)

    def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
        """See `Task.inputs_and_target`."""
        if not isinstance(batch, CanaryBatch):
            return self.inner.inputs_and_target(batch)
        inputs, target = pair_of(self.inner, batch.batch)
        return CanaryInputs(inputs, batch.numbers, batch.coins), target

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """See `Task.local_data`; the last rows are replaced by canaries."""
        dataset = self.inner.local_data(participant)
        check_task(self.inner, dataset, "federated.privacy")
        return CanaryData(dataset, self.coins(participant.name, len(dataset)))  # type: ignore[arg-type]  # map-style

    def coins(self, name: str, examples: int) -> Sequence[int]:
        """The coin of each canary of a device with so many examples."""
        return coins_of(self.seed, name, canaries_among(examples, self.count))

    def optimizer(self, parameters: Parameters, participant: Participant) -> Any:
        """See `Task.optimizer`."""
        return self.inner.optimizer(parameters, participant)

    def eval_data(self) -> Dataset[Any] | None:
        """See `Task.eval_data`."""
        return self.inner.eval_data()

    def start_names(self, names: Sequence[str]) -> Mapping[str, str] | None:
        """See `Task.start_names`."""
        return self.inner.start_names(names)


class CanaryData(Dataset[Any]):
    """Rows of a data set, of which the last ones are canaries."""

    def __init__(self, dataset: Dataset[Any], coins: Sequence[int]) -> None:
        """`coins` of the canaries."""
        self.dataset = dataset
        self.coins = coins
        self.first = len(dataset) - len(coins)  # type: ignore[arg-type]  # it was checked

    def __len__(self) -> int:
        return self.first + len(self.coins)

    def __getitem__(self, index: int) -> CanaryRow:
        number = index - self.first
        coin = float(self.coins[number]) if number >= 0 else 0.0
        return CanaryRow(self.dataset[index], max(number, -1), coin)


def canaries_among(examples: int, most: int) -> int:
    """How many of so many examples are canaries.

    All but a tenth, and the first ones, which are compared with each other: what others contribute
    makes guesses worse.
    """
    return max(0, min(most, examples - max(EXAMPLES, -(-examples // 10))))


def coins_of(seed: int, name: str, count: int) -> Sequence[int]:
    """The coins of a device's canaries, 0 or 1."""
    draw = random.Random(f"isthmus/audit/{seed}/{name}")  # noqa: S311 - the auditor's own coins
    return [draw.randrange(2) for _ in range(count)]
