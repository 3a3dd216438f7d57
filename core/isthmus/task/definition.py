"""A task defines what is learned, in plain PyTorch, for both regimes.

A complete task, for tables of eight numbers in three classes::

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import isthmus

    class Table(isthmus.Task):
        def model(self):
            return nn.Linear(8, 3)

        def loss(self, output, target):
            return nn.functional.cross_entropy(output, target, reduction="none")

        def metrics(self, output, target):
            return {"accuracy": (output.argmax(-1) == target).float()}

        def local_data(self, participant):
            return self.rows("train.pt")

        def eval_data(self):
            return self.rows("held_out.pt")

        def optimizer(self, parameters, participant):
            return torch.optim.SGD(parameters, lr=0.1)

        def rows(self, name):
            return TensorDataset(*torch.load(self.data / name))

A job names it as ``path/to/file.py:Table`` or ``package.module:Table``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isthmus.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from isthmus.task.device_sums.metrics import DeviceMetric

Regime = Literal["datacenter", "federated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participant:
    """The participant that trains, for a task to find that participant's data."""

    name: str
    """The enrolled name, unique on the server."""
    regime: Regime
    """`federated` on a device, `datacenter` on a rank."""
    shard: tuple[int, int] | None = None
    """`(index, count)` if one data set is split among simulated devices; else None."""
    round: int = 0
    """The round, from 1, that an optimizer is made for; 0 when data are loaded."""


class Task(abc.ABC):
    """Base class of tasks. Subclasses define the four abstract methods.

    Guarantees:
      * one instance per process and run, constructed with the job's ``[task.settings]``;
      * `model` is called with PyTorch seeded from the job, so all participants start equal;
      * `local_data` is called on the participant and its result never leaves that process.
    """

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """`settings` is the job's table; `data` is the path of *this* machine's data, if given."""
        self.settings = settings
        self.__data = data  # two underscores: a task may have its own `_data`

    @property
    def data(self) -> Path:
        """This machine's data path: ``task.data`` of the job, or ``--data`` of the client.

        Raises:
            TaskError: no path was given.
        """
        if self.__data is None:
            raise TaskError(
                "this task reads data from a path and none was given; set task.data in the job "
                "or start the client with --data PATH"
            )
        return self.__data

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The module to train, freshly initialised.

        Its trainable parameters are exchanged, as far as the job's ``[exchange]`` does not keep
        some on devices or freezes them.
        """

    @abc.abstractmethod
    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """One loss per scored unit (example, token, pixel): any shape but 0-d, not yet averaged.

        Not averaged, so that partial batches, ranks and clients are weighted exactly.
        """

    def metrics(self, output: Any, target: Any) -> dict[str, torch.Tensor]:
        """Further metrics, one value per scored unit each; averaged by Isthmus. Default: none."""
        return {}

    def score(self, output: Any, target: Any) -> torch.Tensor | None:
        """A bounded error from 0 (best) to 1 for each scored unit, used to compare models.

        Bounded, so that no single overconfident prediction dominates. Values outside of 0 to 1 are
        clamped, and NaN counts as 1. Default: None, for x / (x + m) of a loss x, where m is the
        mean loss of the first of the compared models on the same device.
        """
        return None

    @abc.abstractmethod
    def local_data(self, participant: Participant) -> Dataset[Any]:
        """The training data of one participant: a map-style dataset of `(input, target)` pairs."""

    def eval_data(self) -> Dataset[Any] | None:
        """Central held-out data, as `(input, target)` pairs; called once per process.

        May resemble the devices' data, e.g. rows of volunteers. Default: None, for a model that is
        evaluated on devices (`validation_data`) or not at all.
        """
        return None

    def validation_data(self, participant: Participant) -> Dataset[Any] | None:
        """A device's own held-out data, as `(input, target)` pairs; called once per run.

        With ``evaluation.devices`` of the job, devices evaluate the model on them, and the server
        learns only the sums over devices. Default: None, for a device that has no such data.
        """
        return None

    def device_metrics(self) -> Mapping[str, DeviceMetric]:
        """What devices measure on `validation_data()` besides the loss, by name.

        `isthmus.Mean()` sums the figure of the same name in `metrics()`; `isthmus.Confusion` and
        `isthmus.BinnedScores` count classes and scores. It must not depend on data. The results
        have the prefix ``devices_``. Default: none.
        """
        return {}

    def public_eval(self) -> Dataset[Any] | None:
        """Central held-out rows of the datacenter's public data; called once per process.

        The model is evaluated on them when it is evaluated on `eval_data()`, and the metrics have
        the prefix ``public_``. A policy can compare both. Default: None, for no such rows.
        """
        return None

    @abc.abstractmethod
    def optimizer(
        self, parameters: Iterable[torch.nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer | tuple[torch.optim.Optimizer, LRScheduler]:
        """The inner optimizer: new in each round on a device, kept in the datacenter.

        With its `LRScheduler`, whose `step()` Isthmus calls: rates follow the position of the run
        in optimizer steps, which continues over rounds, regimes and restarts.
        """

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """The model's output for a batch of inputs. Default: ``model(inputs)``."""
        return model(inputs)

    # -- overrides of how a datacenter partitions the model --------------------------------------

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Styles of `torch.distributed.tensor.parallel` by module name; `*` matches one component.

        For `tensor_parallel` above 1, e.g. ``{"blocks.*.up": ColwiseParallel()}``. Between the
        named modules, activations are replicated on every rank unless the styles change that.
        Default: None, for a generic plan that fits every module but gathers often.
        """
        return None

    def pipeline_stages(self, model: nn.Module, n: int) -> Sequence[nn.Module] | None:
        """The model as `n` modules that compute the same when called in sequence.

        For `pipeline_parallel` above 1. The stages must consist of the model's own modules and pass
        on a tensor or a tuple of tensors. Default: None, for contiguous parts of the longest list
        of blocks.
        """
        return None

    def shard_units(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The blocks whose parameters are gathered, recomputed and compiled together.

        Default: None, for the large children of the model's containers.
        """
        return None
