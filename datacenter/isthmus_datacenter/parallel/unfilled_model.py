"""A model that is filled after it was sharded: each rank reads its own rows from files.

The files are those of the job's `model.start`, or one with the values of the seed.

Until then its parameters are on the device `meta`, without memory, so no rank ever has the whole
model. The few examples that show which modules a batch calls, and what a partitioned model has to
compute, pass through it as well: the parameters of a module are read when it is called, and
forgotten when it returns (`given_values`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isthmus.errors import JobError, StorageError, UserError
from isthmus.job import Job
from isthmus.start.plan import state_of
from isthmus.task import Task
from isthmus.task.scoring.building import build_without_memory, start_without_memory
from isthmus.tensors.division import divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.parallel.equivalence_check import run_in_eval_mode
from isthmus_datacenter.parallel.given_values import values_while_called
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.seed_values import SeedValues
from isthmus_datacenter.rank_messages import RankMessages

_AGREED: RankMessages[bool] = RankMessages("models without memory", bool)


class NeedsWholeModel(Exception):
    """A model without memory cannot be called in parts; all ranks raise it."""


def on_all_ranks(condition: bool) -> bool:
    """Whether a condition holds on all ranks, which call this together."""
    return all(_AGREED.all_gather(condition))


def may_be_filled_later(job: Job, dims: ParallelDims, device: torch.device) -> bool:
    """Whether ranks of this layout have parts of the model, which they can read by themselves."""
    sharded = dims.applies_fully_shard(device.type) and dims.data > 1
    return sharded or dims.tensor > 1 or dims.pipeline > 1


class Values(Protocol):
    """Where the values of a model are."""

    def has(self, name: str) -> bool:
        """Whether there are values of a tensor of the model."""
        ...

    def read(self, name: str, start: int = 0, rows: int | None = None) -> torch.Tensor:
        """Rows of a tensor of the model, in its type; all of them if `rows` is None.

        Raises:
            UserError: they cannot be read.
        """
        ...

    def check(self) -> None:
        """Check what was read.

        Raises:
            UserError: it is not what it was expected to be.
        """
        ...


def _shared(stage: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each parameter that several modules have, these and its name in them."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((module, name))
    return [each for each in users.values() if len(each) > 1]


@contextlib.contextmanager
def _of_the_start() -> Iterator[None]:
    """Name the key of the job in an error about its files.

    Raises:
        JobError: files of the start cannot be used.
    """
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        raise JobError(f"model.start: {error}") from None


class UnfilledModel:
    """A model without memory, and where its values are."""

    def __init__(self, model: nn.Module, values: Values) -> None:
        """`values` are those of all parameters."""
        self.model = model
        self.values = values
        self._names = {each: name for name, each in model.named_parameters()}
        self._called = True
        """Whether the model could be called in parts."""
        self._others: Mapping[nn.Parameter, torch.Tensor] = {}
        """Values in place of those of some parameters."""

    @classmethod
    def of(
        cls, task: Task, job: Job, base: Path, expected: TensorLayout, seeded: Path
    ) -> UnfilledModel | None:
        """Build the task's model without memory; None if that is not possible.

        It is not if `model()` draws other tensors or computes them from parameters, and with a
        `model.start` if parameters are not in its files. Without one the values are `SeedValues`,
        whose file has to be written then.

        Args:
            task: of the job.
            job: the job.
            base: directory of the job's relative paths.
            expected: of the server's model.
            seeded: path of the file with the values of the seed.

        Raises:
            JobError: the files of the start cannot be used.
            TaskError: see `Division.check_datacenter`.
        """
        if job.model.start is None:
            model = build_without_memory(task, job.seed)
            if model is None:
                return None
            division = divide(model, job.exchange, unfilled=True)
            if division.exchanged != expected or not SeedValues.are_enough(expected, model):
                return None
            division.check_datacenter()
            return cls(model, SeedValues(seeded, expected, model))
        started = start_without_memory(task, job, base)
        if started is None:
            return None
        model, values = started
        division = divide(model, job.exchange, unfilled=True)
        if division.exchanged != expected:
            return None  # the whole model says how it differs
        division.check_datacenter()
        return cls(model, values)

    def trying(
        self, try_batch: Callable[[nn.Module, int, bool], object]
    ) -> Callable[[nn.Module, int, bool], object]:
        """`try_batch`, with the parameters of each module while it is called."""

        def tried(model: nn.Module, examples: int, training: bool) -> object:
            with self.called_in_parts(model):
                return try_batch(model, examples, training)

        return tried

    def run_in_eval_mode(self, module: nn.Module, *inputs: Any) -> Any:
        """The output of the model, or of a part of it, see `equivalence_check.run_in_eval_mode`."""
        with self.called_in_parts(module):
            return run_in_eval_mode(module, *inputs)

    def read(self, _: str, parameter: nn.Parameter) -> torch.Tensor:
        """The values of a parameter of the model.

        Raises:
            UserError: they cannot be read.
        """
        if parameter in self._others:
            return self._others[parameter].clone()
        return self.values.read(self._names[parameter])

    @contextlib.contextmanager
    def with_values(self, others: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
        """Within it some parameters have other values."""
        self._others = others
        try:
            yield
        finally:
            self._others = {}

    def read_shard(
        self, names: Mapping[str, str], device: torch.device, path: str, parameter: nn.Parameter
    ) -> torch.Tensor:
        """The values of a parameter that may be sharded, on a device.

        Args:
            names: the map from paths in a stage to those in the model.
            device: where to place them.
            path: of the parameter in the stage.
            parameter: it, without memory.

        Raises:
            UserError: they cannot be read.
        """
        values = torch.empty_like(parameter.detach(), device=device)
        self._fill(values, names[path])
        return values

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Within it, an error may be that of code that met a parameter without values."""
        try:
            yield
        except Exception:  # the code of the task may raise anything; it is raised again
            self._called = False
            raise

    @contextlib.contextmanager
    def called_in_parts(self, module: nn.Module) -> Iterator[None]:
        """Within it, the modules of the model or a part of it have values while they are called."""
        with self.noting_failures(), values_while_called(module, self.read):
            yield

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Within it the model is called in parts; all ranks leave it together.

        Raises:
            NeedsWholeModel: that was not possible on some rank.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - what the code of the task raised, or others of it
            if self._called:
                failure = error
        if not on_all_ranks(self._called):
            raise NeedsWholeModel
        if failure is not None:
            raise failure

    @torch.no_grad()
    def fill(
        self,
        stage: nn.Module,
        names: Mapping[str, str],
        device: torch.device,
        *,
        offload: bool = False,
    ) -> None:
        """Give this rank's shards of the parameters memory and their values.

        Args:
            stage: the sharded model.
            names: the map from names in it to the model's.
            device: where the shards are placed.
            offload: whether those of parameters stay in the host's memory.

        Raises:
            JobError: the files changed, or do not have the expected digest.
            StorageError: the file with the values of the seed cannot be read.
        """

        def placed(each: torch.Tensor) -> torch.Tensor:
            on_host = offload and isinstance(each, nn.Parameter)
            place = torch.device("cpu") if on_host else device
            return torch.empty_like(each, device=place) if each.is_meta else each.to(place)

        shared = _shared(stage)
        stage._apply(placed)  # type: ignore[no-untyped-call] # of PyTorch
        # A parameter that is no shard was replaced in each of its modules.
        for (first, key), *others in shared:
            for module, name in others:
                module._parameters[name] = first._parameters[key]
        with _of_the_start():
            for name, parameter in stage.named_parameters():
                self._fill(parameter, names[name])
            self.values.check()

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Give the buffers, which have memory, their values.

        Raises:
            JobError: the files cannot be read.
            StorageError: the file with the values of the seed cannot be read.
        """
        stored = {name for each in state_of(self.model) for name in each.names}
        with _of_the_start():
            for name, buffer in self.model.named_buffers():
                if name in stored and self.values.has(name):
                    buffer.copy_(self.values.read(name))

    def _fill(self, parameter: torch.Tensor, name: str) -> None:
        if not isinstance(parameter, DTensor):
            parameter.copy_(self.values.read(name))
            return
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        if 0 in sizes:
            return
        rows = self.values.read(name, offsets[0], sizes[0])
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], sizes[dim])
        parameter.to_local().copy_(rows)
