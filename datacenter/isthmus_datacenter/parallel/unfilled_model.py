"""A model that is filled after it was sharded: each rank reads its own rows from files.

The files are those of the job's `model.start`, or one with the values of the seed.

Until then its parameters are on the device `meta`, without memory, so no rank ever has the whole
model. The few examples that show which modules a batch calls pass through it as well: the
parameters of a module are read when it is called, and forgotten when it returns.
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
from torch.utils._python_dispatch import _disable_current_modes

from isthmus.errors import JobError, StorageError, UserError
from isthmus.job import Job
from isthmus.start.plan import state_of
from isthmus.task import Task
from isthmus.task.scoring.building import build_without_memory, start_without_memory
from isthmus.tensors.division import divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.seed_values import SeedValues
from isthmus_datacenter.rank_messages import RankMessages

_AGREED: RankMessages[bool] = RankMessages("models without memory", bool)


class NeedsWholeModel(Exception):
    """A model without memory cannot be called in parts; all ranks raise it."""


def on_all_ranks(condition: bool) -> bool:
    """Whether a condition holds on all ranks, which call this together."""
    return all(_AGREED.all_gather(condition))


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """Hide what is computed in the block from those who watch what the model computes.

    Reading values is no decision of the model's code about what it calls next.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def may_be_filled_later(job: Job, dims: ParallelDims, device: torch.device) -> bool:
    """Whether ranks of this layout can read their rows of a model by themselves.

    With `fully_shard` alone every rank has rows of every parameter. Matrices and pipelines are
    compared with the whole model, for which it has to be whole.
    """
    sharded = dims.needs_fully_shard and not dims.uses_all_reduce(device.type)
    return sharded and dims.tensor == 1 and dims.pipeline == 1 and dims.data > 1


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


class UnfilledModel:
    """A model without memory, and where its values are."""

    def __init__(self, model: nn.Module, values: Values) -> None:
        """`values` are those of all parameters."""
        self.model = model
        self.values = values
        self._called = True
        """Whether the model could be called in parts."""

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
            try:
                with self._values_while_called(model):
                    return try_batch(model, examples, training)
            except Exception:
                # Of any kind: it is the task's code that met a parameter without values.
                self._called = False
                raise

        return tried

    def all_called(self) -> bool:
        """Whether the model could be called in parts on all ranks, which call this together.

        Code that uses a parameter while its module is not called needs the whole model.
        """
        return on_all_ranks(self._called)

    @contextlib.contextmanager
    def _values_while_called(self, model: nn.Module) -> Iterator[None]:
        handles: list[Any] = []
        for path, module in model.named_modules():
            own = {name: each for name, each in module._parameters.items() if each is not None}
            if own:
                give, take = self._hooks(path, own)
                handles.append(module.register_forward_pre_hook(give, prepend=True))
                handles.append(module.register_forward_hook(take, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(
        self, path: str, own: Mapping[str, nn.Parameter]
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """What gives a module its parameters, and what takes them again."""

        def give(module: nn.Module, *_: object) -> None:
            for name, parameter in own.items():
                with _unobserved():
                    values = self.values.read(f"{path}.{name}" if path else name)
                module._parameters[name] = nn.Parameter(values, parameter.requires_grad)

        def take(module: nn.Module, *_: object) -> None:
            module._parameters.update(own)

        return give, take

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

        stage._apply(placed)  # type: ignore[no-untyped-call] # of PyTorch
        try:
            for name, parameter in stage.named_parameters():
                self._fill(parameter, names[name])
            stored = {name for each in state_of(stage) for name in each.names}
            for name, buffer in stage.named_buffers():
                if name in stored and self.values.has(name):
                    buffer.copy_(self.values.read(name))
            self.values.check()
        except StorageError:
            raise
        except UserError as error:
            raise JobError(f"model.start: {error}") from None

    def _fill(self, parameter: nn.Parameter, name: str) -> None:
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
