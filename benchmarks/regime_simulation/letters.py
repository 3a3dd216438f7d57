"""The task of `regimes.py`: capital letters from 16 numbers, split as defined by a scenario.

Data: UCI letter recognition, 20,000 rows of a letter and 16 integers. The last 4,000 rows are the
test set, as in the authors' split. The other rows are divided at random into public rows and rows
of the devices, according to the scenario's `split` and a seed; see `scenario.Split`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from isthmus import Task
from isthmus.errors import TaskError
from isthmus.task import Participant

CLASSES = 26
FEATURES = 16
TEST_ROWS = 4000
MIN_ROWS = 20
"""Fewest rows of a device."""
HELD_OUT = 0.1
"""Share of the public rows that is kept for central evaluation."""

Rows = tuple[torch.Tensor, torch.Tensor]
"""Features (n, 16), standardised, and classes (n)."""


class Letters(Task):
    """A multilayer perceptron; SGD on devices, AdamW in the datacenter."""

    def model(self) -> nn.Module:
        widths = [FEATURES, *self.settings["hidden"], CLASSES]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant: Participant) -> TensorDataset:
        if participant.regime == "datacenter":
            return TensorDataset(*self._parts().public)
        assert participant.shard is not None
        return TensorDataset(*self._parts().devices[participant.shard[0]])

    def eval_data(self) -> TensorDataset:
        """Public rows, because an operator has no others."""
        return TensorDataset(*self._parts().held_out)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        if participant.regime == "federated":
            return torch.optim.SGD(parameters, lr=self.settings["client_lr"], fused=True)
        return torch.optim.AdamW(parameters, lr=self.settings["datacenter_lr"], fused=True)

    def _parts(self) -> Parts:
        return parts(self.data, json.dumps(self.settings["split"]), self.settings["split_seed"])


@dataclasses.dataclass(frozen=True)
class Parts:
    """The rows of the datacenter and of each device."""

    public: Rows
    held_out: Rows
    """Public rows for central evaluation."""
    devices: Sequence[Rows]


@functools.lru_cache(maxsize=2)
def read(path: Path) -> tuple[Rows, Rows]:
    """Training and test rows.

    Raises:
        TaskError: the file is missing or has another form.
    """
    try:
        lines = path.read_text(encoding="ascii").split()
        table = [line.split(",") for line in lines]
        target = torch.tensor([ord(row[0]) - ord("A") for row in table])
        inputs = torch.tensor([[float(cell) for cell in row[1:]] for row in table])
        if inputs.shape[1] != FEATURES or len(inputs) <= TEST_ROWS or not target.min() >= 0:
            raise ValueError(f"it has {tuple(inputs.shape)} numbers")
    except (OSError, ValueError, UnicodeDecodeError, IndexError) as error:
        raise TaskError(
            f"{path} cannot be read as UCI letter-recognition.data (lines of a capital letter and "
            f"{FEATURES} integers): {error}"
        ) from None
    train = inputs[:-TEST_ROWS]
    inputs = (inputs - train.mean(0)) / train.std(0)
    return (
        (inputs[:-TEST_ROWS], target[:-TEST_ROWS]),
        (inputs[-TEST_ROWS:], target[-TEST_ROWS:]),
    )


@functools.lru_cache(maxsize=4)
def parts(path: Path, split_json: str, seed: int) -> Parts:
    """The split of the training rows for a scenario and a seed."""
    split: dict[str, Any] = json.loads(split_json)
    draw = torch.Generator().manual_seed(seed)
    (inputs, target), _ = read(path)
    order = torch.randperm(len(target), generator=draw)
    inputs, target = inputs[order], target[order]
    classes = torch.randperm(CLASSES, generator=draw)
    public_classes = classes[: split["public_classes"]]
    of_public = torch.isin(target, public_classes)
    candidates = of_public.nonzero().flatten()
    if split["exclusive"]:
        public, private = candidates[: split["public_rows"]], (~of_public).nonzero().flatten()
    else:
        public = candidates[: split["public_rows"]]
        taken = torch.zeros(len(target), dtype=torch.bool)
        taken[public] = True
        private = (~taken).nonzero().flatten()
    x, y = _altered(inputs[public], target[public], split, public_classes, draw)
    held_out = max(1, int(HELD_OUT * len(y)))
    devices = [
        (inputs[rows], target[rows]) for rows in _partition(target, private, classes, split, draw)
    ]
    return Parts(
        public=(x[held_out:], y[held_out:]), held_out=(x[:held_out], y[:held_out]), devices=devices
    )


def edge_share(path: Path, split: dict[str, Any], seed: int) -> float:
    """Share of the test rows whose class occurs on at least one device."""
    device_classes = torch.cat(
        [target for _, target in parts(path, json.dumps(split), seed).devices]
    )
    _, (_, target) = read(path)
    return float(torch.isin(target, device_classes).float().mean())


def _altered(
    inputs: torch.Tensor,
    target: torch.Tensor,
    split: dict[str, Any],
    classes: torch.Tensor,
    draw: torch.Generator,
) -> Rows:
    """Apply the scenario's defects to the public rows: shifted features and wrong labels."""
    if split["shift"]:
        mix = torch.randn(FEATURES, FEATURES, generator=draw) / FEATURES**0.5
        offset = torch.randn(FEATURES, generator=draw)
        inputs = inputs + split["shift"] * (inputs @ mix + offset)
    target = target.clone()
    swapped = classes[: round(split["swapped_classes"] * len(classes))]
    if len(swapped) > 1:  # each class gets the label of the next one
        names = torch.arange(CLASSES)
        names[swapped] = swapped.roll(1)
        target = names[target]
    noisy = torch.rand(len(target), generator=draw) < split["label_noise"]
    wrong = classes[torch.randint(len(classes), (len(target),), generator=draw)]
    return inputs, torch.where(noisy, wrong, target)


def _partition(
    target: torch.Tensor,
    private: torch.Tensor,
    classes: torch.Tensor,
    split: dict[str, Any],
    draw: torch.Generator,
) -> list[torch.Tensor]:
    """Rows of each device, from its zone's classes, with shares from a Dirichlet distribution."""
    zones, clients = split["zones"], split["clients"]
    pieces_of: list[list[torch.Tensor]] = [[] for _ in range(clients)]
    private_classes = [int(c) for c in classes if bool((target[private] == c).any())]
    for index, class_ in enumerate(private_classes):
        members = [i for i in range(clients) if i % zones == index % zones]
        rows = private[target[private] == class_]
        shares = torch._sample_dirichlet(
            torch.full((len(members),), split["dirichlet"]), generator=draw
        )
        cuts = (shares.cumsum(0) * len(rows)).round().long()[:-1]
        for member, piece in zip(members, rows.tensor_split(cuts), strict=True):
            pieces_of[member].append(piece)
    devices = [torch.cat(pieces) if pieces else private[:0] for pieces in pieces_of]
    # Give each device at least MIN_ROWS, taken from the one with the most rows in its zone.
    for poor in range(clients):
        while len(devices[poor]) < MIN_ROWS:
            zone = [i for i in range(clients) if i % zones == poor % zones]
            rich = max(zone, key=lambda i: len(devices[i]))
            mixed = devices[rich][torch.randperm(len(devices[rich]), generator=draw)]
            missing = MIN_ROWS - len(devices[poor])
            devices[poor] = torch.cat([devices[poor], mixed[:missing]])
            devices[rich] = mixed[missing:]
    return devices
