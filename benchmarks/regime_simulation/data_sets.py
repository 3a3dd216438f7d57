"""The data sets of `regimes.py`, behind one interface, and the task that learns them.

Classification is scored by accuracy (per cent), regression by the root mean square error in
standard deviations of the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.command_line import data_folder
from regime_simulation import readers
from regime_simulation.readers import Rows
from regime_simulation.splits import Parts, split_rows
from torch import nn
from torch.utils.data import TensorDataset

from isthmus import Task
from isthmus.errors import TaskError
from isthmus.task import Participant

EVALUATED = 4
"""One test row in four is for central evaluation, and not scored, with `eval_data = "target"`."""


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set and the model that learns it."""

    read: Callable[[Path], tuple[Rows, Rows]]
    """Training and test rows from a folder."""
    model: Callable[[Sequence[int]], nn.Module]
    """A new model with the given sizes of hidden layers."""
    kinds: int
    """Number of kinds of rows."""
    labels: int = 0
    """Number of classes; 0: regression."""
    files: tuple[str, ...] = ()
    """Names of its files in the folder."""
    package: str = ""
    """The package that contains it, in place of files."""

    @property
    def lower_is_better(self) -> bool:
        """Whether the score is an error."""
        return not self.labels

    def digest(self, folder: Path) -> str:
        """SHA-256 of its files, in hexadecimal, or the version of its package.

        Raises:
            TaskError: there is no such file.
        """
        if self.package:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        digest = hashlib.sha256()
        for name in self.files:
            try:
                digest.update((folder / name).read_bytes())
            except OSError as error:
                raise TaskError(f"{error.strerror}: {folder / name}") from None
        return digest.hexdigest()


def folder_of(given: argparse.Namespace, names: Iterable[str]) -> Path:
    """The folder with the files of data sets, or any where they have no files.

    Raises:
        UserError: no folder is given, or it lacks a file.
    """
    files = [file for name in names for file in DATA_SETS[name].files]
    if files:
        return data_folder(given, *files)
    return (given.data or Path()).resolve()


def _perceptron(inputs: int, outputs: int, hidden: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([inputs, *hidden, outputs]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _convolutions(hidden: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise([1, *hidden]):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    side = 14
    for _ in hidden:
        side = (side + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(hidden[-1] * side**2, 10))


def _next_character(hidden: Sequence[int]) -> nn.Module:
    layers = _perceptron(readers.CONTEXT * 8, 65, hidden)
    return nn.Sequential(nn.Embedding(65, 8), nn.Flatten(), *layers)


DATA_SETS: Mapping[str, DataSet] = {
    "letters": DataSet(
        read=readers.letters,
        model=functools.partial(_perceptron, 16, 26),
        kinds=26,
        labels=26,
        files=("letter-recognition.data",),
    ),
    "mnist": DataSet(
        read=readers.mnist,
        model=_convolutions,
        kinds=10,
        labels=10,
        files=readers.MNIST_FILES,
    ),
    "shakespeare": DataSet(
        read=readers.shakespeare,
        model=_next_character,
        kinds=readers.SPEAKERS,
        labels=65,
        files=("tinyshakespeare.txt",),
    ),
    "heart": DataSet(
        read=readers.heart,
        model=functools.partial(_perceptron, 26, 2),
        kinds=4,
        labels=2,
        files=tuple(
            f"heart-disease/{name}.csv" for name in ("cleveland", "hungarian", "switzerland", "va")
        ),
    ),
    "diabetes": DataSet(
        read=readers.diabetes,
        model=functools.partial(_perceptron, 10, 1),
        kinds=readers.RANGES,
        package="scikit-learn",
    ),
    "languages": DataSet(
        read=readers.languages,
        model=functools.partial(_perceptron, readers.NGRAMS, len(readers.LANGUAGES)),
        kinds=len(readers.LANGUAGES),
        labels=len(readers.LANGUAGES),
        package="babel",
    ),
}


@functools.lru_cache(maxsize=2)
def read(name: str, folder: Path) -> tuple[Rows, Rows]:
    """Training and test rows of a data set.

    Raises:
        TaskError: its files or its package are missing, or have another form.
    """
    try:
        return DATA_SETS[name].read(folder)
    except (OSError, ValueError, IndexError, RuntimeError, ImportError, EOFError) as error:
        raise TaskError(f"the data set {name!r} cannot be read from {folder}: {error}") from None


@functools.lru_cache(maxsize=4)
def parts(name: str, folder: Path, split_json: str, seed: int) -> Parts:
    """The training rows of the datacenter and of each device for a scenario and a seed."""
    train, _ = read(name, folder)
    return split_rows(train, DATA_SETS[name].kinds, DATA_SETS[name].labels, split_json, seed)


def test_rows(name: str, folder: Path, evaluated: bool) -> tuple[Rows, Rows]:
    """The rows that are scored, and those for central evaluation (none unless `evaluated`)."""
    _, test = read(name, folder)
    if not evaluated:
        return test, test.at(slice(0, 0))
    chosen = torch.arange(len(test.target)) % EVALUATED == 0
    return test.at(~chosen), test.at(chosen)


def edge_share(name: str, folder: Path, split: Mapping[str, Any], seed: int) -> float:
    """Share of the test rows whose kind occurs on at least one device."""
    devices = parts(name, folder, json.dumps(split), seed).devices
    kinds = torch.cat([rows.kind for rows in devices])
    _, test = read(name, folder)
    return float(torch.isin(test.kind, kinds).float().mean())


def score(name: str, module: nn.Module, rows: Rows) -> float:
    """Accuracy in per cent, or the root mean square error."""
    output = module(rows.inputs)
    if DATA_SETS[name].labels:
        return 100.0 * float((output.argmax(-1) == rows.target).float().mean())
    return float((output.squeeze(-1) - rows.target).square().mean().sqrt())


class Simulated(Task):
    """The task of every scenario; SGD on devices, AdamW in the datacenter."""

    def model(self) -> nn.Module:
        model = self._data_set.model(self.settings["hidden"])
        if self.settings["split"]["renamed"]:
            names = _other_names(self._data_set.labels)
            last = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
            with torch.no_grad():
                for parameter in (last.weight, last.bias):
                    parameter[names] = parameter.clone()
        return model

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scale = self.settings["loss_scale"]
        if self._data_set.labels:
            return scale * nn.functional.cross_entropy(output, target, reduction="none")
        return scale * (output.squeeze(-1) - target).square()

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._data_set.labels:
            return {"accuracy": (output.argmax(-1) == target).float()}
        return {}

    def local_data(self, participant: Participant) -> TensorDataset:
        if participant.regime == "datacenter":
            return self._pairs(self._parts().public)
        assert participant.shard is not None
        return self._pairs(self._parts().devices[participant.shard[0]])

    def eval_data(self) -> TensorDataset:
        """Public rows, because most operators have no others, or rows that resemble the target."""
        if self.settings["eval_data"] == "public":
            return self._pairs(self._parts().held_out)
        return self._pairs(test_rows(self.settings["data"], self.data, evaluated=True)[1])

    def public_eval(self) -> TensorDataset:
        return self._pairs(self._parts().held_out)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        if participant.regime == "federated":
            return torch.optim.SGD(parameters, lr=self.settings["client_lr"], fused=True)
        return torch.optim.AdamW(parameters, lr=self.settings["datacenter_lr"], fused=True)

    def named(self, rows: Rows) -> Rows:
        """The rows with the task's numbers of the classes."""
        if not self.settings["split"]["renamed"]:
            return rows
        return rows._replace(target=_other_names(self._data_set.labels)[rows.target])

    def _pairs(self, rows: Rows) -> TensorDataset:
        rows = self.named(rows)
        return TensorDataset(rows.inputs, rows.target)

    @property
    def _data_set(self) -> DataSet:
        return DATA_SETS[self.settings["data"]]

    def _parts(self) -> Parts:
        split_json = json.dumps(self.settings["split"])
        return parts(self.settings["data"], self.data, split_json, self.settings["split_seed"])


def _other_names(labels: int) -> torch.Tensor:
    """Another number for each class."""
    return torch.randperm(labels, generator=torch.Generator().manual_seed(labels))
