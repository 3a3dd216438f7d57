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
from typing import TYPE_CHECKING, Any, Literal, Self

from isthmus.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from isthmus.task.measurements.columns import Category, Column
    from isthmus.task.measurements.metrics import DeviceMetric

    Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    Made = torch.optim.Optimizer | tuple[torch.optim.Optimizer, LRScheduler]

Regime = Literal["datacenter", "federated"]

MAX_FIGURE_NAME = 80
"""Characters in the name of a task's figure, such as a metric; prefixes make it longer."""

PUBLIC = "public_"
"""Prefix of the metrics of `Task.public_eval()`."""


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


class Parameters(list["torch.nn.Parameter"]):
    """The parameters of a model, which `Task.optimizer` may choose by name."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """`named` are parameters with their names in the model."""
        self.named = dict(named)
        """By name."""
        super().__init__(self.named.values())

    def of(self, prefix: str) -> list[torch.nn.Parameter]:
        """The parameters of a submodule, such as ``"encoder"``."""
        return [each for name, each in self.named.items() if f"{name}.".startswith(f"{prefix}.")]


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The loss of a batch as a whole, as `Task.training_step` returns it."""

    loss: torch.Tensor
    """One number (0-d): the mean over what the batch scores."""
    weight: float | None = None
    """How much it counts against other batches; None for the number of examples, which are the rows
    of the batch's tensors."""
    parts: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Numbers (0-d) to be logged by name, such as components of the loss."""


class Task(abc.ABC):
    """Base class of tasks. Subclasses define the three abstract methods, and what is learned.

    That is `loss` for a mean over examples, or `training_step` for a loss of a batch as a whole.

    Guarantees:
      * one instance per process and run, constructed with the job's ``[task.settings]``;
      * `model` is called with PyTorch seeded from the job, so all participants start equal;
      * `local_data` is called on the participant and its result never leaves that process.
    """

    __base = Path()
    """Directory of the job's relative paths on this machine."""

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """`settings` is the job's table; `data` is the path of *this* machine's data, if given."""
        self.settings = settings
        self.__data = data  # two underscores: a task may have its own `_data`

    @classmethod
    def at(cls, base: Path, settings: Mapping[str, Any], data: Path | None = None) -> Self:
        """A task of a job whose relative paths begin at `base`, by default the current folder.

        Its `__init__` may use `tokenizer_folder` already.
        """
        task = cls.__new__(cls)
        task.__base = base
        cls.__init__(task, settings, data)
        return task

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

    @property
    def not_carried_over(self) -> Sequence[str]:
        """What a task made by `isthmus.integrations` leaves out of another library's objects.

        Nothing of what is trained depends on it; `isthmus job check` says what it is. Default:
        nothing.
        """
        return ()

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The module to train, freshly initialised.

        Its trainable parameters are exchanged, as far as the job's ``[exchange]`` does not keep
        some on devices or freezes them.
        """

    @property
    def start_config(self) -> Mapping[str, Any]:
        """The contents of `config.json` in the folder that the job's `model.start` names.

        For models of `transformers`: ``LlamaConfig.from_dict(self.start_config)``.

        Raises:
            TaskError: the job has no such folder.
        """
        if "start_config" not in self.settings:
            raise TaskError(
                "this task reads the configuration of the model that it starts from, and the job "
                "has none; set model.start to a folder with a config.json"
            )
        config: Mapping[str, Any] = self.settings["start_config"]
        return config

    @property
    def tokenizer_folder(self) -> Path:
        """The folder on this machine with the tokenizer of what the job's `model.start` names.

        ``AutoTokenizer.from_pretrained(self.tokenizer_folder, local_files_only=True)``. With files
        by other names than a tokenizer has, or other contents than where the job was loaded, the
        same text would be other tokens here, so they are compared by their digest.

        Raises:
            TaskError: the start has no tokenizer, or this machine does not have the same one.
        """
        from isthmus.start.tokenizer_files import tokenizer_digest

        if "start_tokenizer" not in self.settings:
            raise TaskError(
                "this task reads the tokenizer of the model that it starts from, and there is none "
                "where the job was loaded; set model.start to a folder with a config.json and a "
                "tokenizer.json"
            )
        tokenizer = self.settings["start_tokenizer"]
        folder = self.__base / str(tokenizer["folder"])
        found = tokenizer_digest(folder)
        if found is None:
            raise TaskError(
                f"{folder} has no tokenizer; copy the tokenizer's files of the folder that "
                "model.start names to this place"
            )
        if found != tokenizer["sha256"]:
            raise TaskError(
                f"the tokenizer in {folder} is not that of the job, so that texts would be other "
                "tokens here; copy the tokenizer's files again"
            )
        return folder

    def start_names(self, names: Sequence[str]) -> Mapping[str, str] | None:
        """The name of each of the model's tensors in the files of the job's `model.start`.

        `names` are those of the model's parameters and persistent buffers, tied ones with all of
        theirs. What is not in the result is missing there. Default: None, for names that are equal
        except for a prefix on either side, and for what PEFT inserts into them.
        """
        return None

    def loss(self, output: Any, target: Any) -> Values:
        """One loss per scored unit (example, token, pixel): any shape but 0-d, not yet averaged.

        Not averaged, so that partial batches, ranks and clients are weighted exactly. With padding,
        return a pair of the values and a mask of the same shape, bool, of the units that count; or
        weights that are not negative. Required unless the task defines `training_step`.
        """
        raise NotImplementedError

    def metrics(self, output: Any, target: Any) -> Mapping[str, Values]:
        """Further metrics, one value per scored unit each; averaged by Isthmus. Default: none.

        Each may be a pair with a mask or weights, as in `loss`, such as numbers of tokens.
        """
        return {}

    def training_step(self, model: nn.Module, batch: Any) -> torch.Tensor | StepLoss:
        """The loss of a batch as a whole (0-d), for losses that are no mean over examples.

        With it `loss` is not used in training. Gradients of several ranks, and of the parts of an
        accumulated batch, are averaged by weight, which is the number of examples unless a
        `StepLoss` says otherwise. `batch` is what the loader gives, on the model's device.

        If `optimizer()` returns several optimizers, it is called for each in turn with
        ``optimizer=name``, and only that optimizer's parameters are trained.
        """
        raise NotImplementedError

    def evaluation_step(self, model: nn.Module, batch: Any) -> torch.Tensor | StepLoss:
        """The loss of a held-out batch as a whole (0-d), in place of `loss` and `metrics`.

        It is averaged over batches by weight, and so are the parts of a `StepLoss`. Default: the
        model is evaluated by `loss` and `metrics`.
        """
        raise NotImplementedError

    def score(self, output: Any, target: Any) -> Values | None:
        """A bounded error from 0 (best) to 1 for each scored unit, used to compare models.

        Bounded, so that no single overconfident prediction dominates. Values outside of 0 to 1 are
        clamped, and NaN counts as 1. Default: None, for x / (x + m) of a loss x, where m is the
        mean loss of the first of the compared models on the same device.
        """
        return None

    @abc.abstractmethod
    def local_data(self, participant: Participant) -> Dataset[Any]:
        """The training data of one participant: a map-style dataset, usually of pairs.

        Or an `IterableDataset`, of which a device reads ``federated.local_steps`` batches a round,
        where the round before ended. Its method ``start_at(example)``, an iterator over the rest,
        avoids that what comes before is read and dropped.

        If it has a `digest`, a text that changes with its rows, a datacenter refuses to continue a
        run on other rows, and ranks that differ. `isthmus.PackedText` has one.
        """

    def collate(self, rows: list[Any]) -> Any:
        """A batch of rows of a dataset: any nested structure of tensors.

        Used wherever data is read. Default: PyTorch's `default_collate`. A data collator of Hugging
        Face fits as it is: ``self.collate = DataCollatorWithPadding(tokenizer)``.
        """
        from torch.utils.data import default_collate

        return default_collate(rows)

    def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
        """The inputs for `forward` and the target for `loss` of a batch.

        Default: the batch is such a pair. Define it for data sets whose rows are dictionaries.
        """
        pair: tuple[Any, Any] = batch
        return pair

    def order(
        self, dataset: Dataset[Any], batch_size: int, generator: torch.Generator
    ) -> Sequence[int] | None:
        """The indices of one epoch, in which every `batch_size` consecutive ones are a batch.

        For batches of similar lengths, or to draw some examples more often. It must draw all its
        randomness from `generator`, and always return equally many. A datacenter leaves out an
        incomplete last batch. Default: None, for all examples in a random order.
        """
        return None

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

        `isthmus.Mean()` sums the figure of the same name in `metrics()`, and
        ``isthmus.Mean(weighted=True)`` with the weights there; `isthmus.Confusion` and
        `isthmus.BinnedScores` count classes and scores. It must not depend on data. The results
        have the prefix ``devices_``. Default: none.
        """
        return {}

    def statistics_columns(self) -> Mapping[str, Column | Category]:
        """The columns of `isthmus statistics` by name, with their bounds or values.

        It must not depend on data. Default: none.
        """
        return {}

    def statistics_data(self, participant: Participant) -> Mapping[str, Any] | None:
        """A device's values of each column (rows); the server learns only the sums over devices.

        Of an `isthmus.Column` numbers, where nan is a missing value; of an `isthmus.Category`
        anything that can be compared. Default: None, for the inputs of `local_data`, vectors with
        the columns in the order of their declaration.
        """
        return None

    @property
    def statistics(self) -> Mapping[str, Any]:
        """What `isthmus statistics` wrote: the contents of the job's `task.statistics`.

        Raises:
            TaskError: the job names no such file.
        """
        if "statistics" not in self.settings:
            raise TaskError(
                "this task reads statistics and the job names none; set task.statistics to a file "
                "that `isthmus statistics JOB --output FILE` wrote"
            )
        statistics: Mapping[str, Any] = self.settings["statistics"]
        return statistics

    def public_eval(self) -> Dataset[Any] | None:
        """Central held-out rows of the datacenter's public data; called once per process.

        The model is evaluated on them when it is evaluated on `eval_data()`, and the metrics have
        the prefix ``public_``. A policy can compare both. Default: None, for no such rows.
        """
        return None

    @abc.abstractmethod
    def optimizer(
        self, parameters: Parameters, participant: Participant
    ) -> Made | Mapping[str, Made]:
        """The inner optimizer: new in each round on a device, kept in the datacenter.

        Or several by name, of different parameters, for `training_step`; choose these by
        ``parameters.of("generator")``.

        With its `LRScheduler`, whose `step()` Isthmus calls: rates follow the position of the run
        in optimizer steps, which continues over rounds, regimes and restarts.
        """

    def adapter_rank(self, participant: Participant) -> int | None:
        """The rank of a device's products, with ``[exchange.low_rank]`` of the job.

        For example 4 on a device with little memory and 32 in a hospital; called once per run.
        Default: None, for the rank that the job names.
        """
        return None

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


def defines(task: Task, name: str) -> bool:
    """Whether a task has a method of its own in place of that of `Task`."""
    return getattr(type(task), name) is not getattr(Task, name) or name in vars(task)
