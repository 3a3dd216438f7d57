"""Hold a model's frozen parameters in smaller types, without ever having the others as a whole.

What is trained keeps its type. The values in float32 stay in the files, from which
`FrozenForm.in_float32` reads the ones that an operation needs while it is computed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from isthmus.errors import JobError, TaskError, UserError
from isthmus.start.loading import ComparedStart
from isthmus.start.slices import StartSlices
from isthmus.task.scoring.int8_linear import hold_in_int8, quantised
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.given_memory import MemoryUse, can_move, give_memory

_WIDER = (torch.float32, torch.float64)
"""The types of parameters that are held in smaller ones."""
_BLOCK = 1 << 18
"""Most values of a matrix that are in float32 while it is rounded to int8, but at least a row."""


def smaller_types(
    model: nn.Module, choice: str, trained: Collection[str] = ()
) -> dict[str, torch.dtype]:
    """The types of frozen parameters for a job's `frozen_dtype`, if they are not their own.

    With `int8` those are the weights of linear layers, which no other module has; all else is in
    bfloat16 then.

    Args:
        model: divided into what is trained and what is frozen.
        choice: the key's value.
        trained: names of parameters that devices train, and that are frozen in this model.

    Returns:
        By the names of these parameters.
    """
    if choice == "float32":
        return {}
    types = {
        name: torch.bfloat16
        for name, parameter in model.named_parameters()
        if not (parameter.requires_grad or name in trained) and parameter.dtype in _WIDER
    }
    if choice == "int8":
        types |= dict.fromkeys(set(_linear_layers(model)).intersection(types), torch.int8)
    return types


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers whose weight can be in int8, by the name of that."""
    users = collections.Counter(
        id(each) for module in model.modules() for each in module._parameters.values()
    )
    found = {}
    for path, module in model.named_modules():
        # A subclass may compute something else, or is called by what reads its weight.
        if type(module) is not nn.Linear:
            continue
        weight = module._parameters.get("weight")
        if weight is not None and users[id(weight)] == 1 and can_move(weight):
            found[f"{path}.weight" if path else "weight"] = module
    return found


def check_types(types: Mapping[str, torch.dtype], choice: str, table: str = "federated") -> None:
    """Refuse a choice that would change nothing, or not what it is for.

    `table` is the job's, with the key.

    Raises:
        TaskError: so it would.
    """
    if not types:
        raise TaskError(
            f"{table}.frozen_dtype is for parameters that are not trained, and the model has none "
            "in float32; remove it, or freeze some in model() or by exchange.exclude"
        )
    if choice == "int8" and torch.int8 not in types.values():
        raise TaskError(
            "federated.frozen_dtype='int8' is for the weights of layers of torch.nn.Linear that "
            "are not trained and belong to one layer, and the model has none; use 'bfloat16'"
        )


def can_be_moved(model: nn.Module) -> bool:
    """Whether all of a model's parameters can get memory after they were without."""
    return all(map(can_move, model.parameters()))


def change_types(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Give frozen parameters other types, and memory to those without.

    Their values are lost, as are those of parameters on the device `meta`. What will be in int8 is
    without memory until it is read, see `FrozenForm.fill_int8`.

    Args:
        model: it is changed.
        types: see `smaller_types`.

    Raises:
        TaskError: the model has the memory of such a parameter elsewhere, too, which would keep
            other values; or it is scripted.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module._parameters:
            raise TaskError(
                f"frozen_dtype does not work with code of TorchScript, as {path!r} is; "
                "have model() build it in Python"
            )
    memory: dict[str, MemoryUse] = {}
    for name, parameter in model.named_parameters():
        dtype = types.get(name)
        if dtype is None and not parameter.is_meta:
            continue
        if not parameter.is_meta:
            memory[name] = MemoryUse(parameter)
        if dtype == torch.int8:
            give_memory(parameter, torch.empty_like(parameter, device="meta"))
        else:
            kind = parameter.dtype if dtype is None else dtype
            give_memory(parameter, torch.empty_like(parameter, dtype=kind, device="cpu"))
    if not all(each.has_ended() for each in memory.values()):
        gc.collect()  # what is in a cycle of references is no use of it
    for name, each in memory.items():
        if not each.has_ended():
            raise TaskError(
                f"the code of the model keeps the memory of {name!r} elsewhere, too, such as in a "
                "view of it, which would not get the values of that parameter with frozen_dtype; "
                "remove frozen_dtype, or compute it in forward()"
            )


@dataclasses.dataclass(frozen=True)
class ParameterMemory:
    """Bytes of a model's parameters on a device."""

    frozen: Mapping[str, int]
    """Bytes of what is not trained, by each `federated.frozen_dtype` that the model can have."""
    trained: int
    """Bytes of what is trained, without gradients."""

    @classmethod
    def of(cls, model: nn.Module, *trained: TensorLayout) -> ParameterMemory:
        """The memory of a model, of which the layouts are trained on devices."""
        names = {name for layout in trained for name in layout.names}
        parameters = dict(model.named_parameters())
        frozen = {"float32": _bytes_of_frozen(parameters, {}, names)}
        for choice in ("bfloat16", "int8"):
            types = smaller_types(model, choice, names)
            if types and (choice != "int8" or torch.int8 in types.values()):
                frozen[choice] = _bytes_of_frozen(parameters, types, names)
        own = sum(each.nbytes for name, each in parameters.items() if name in names)
        return cls(frozen, own)


def _bytes_of_frozen(
    parameters: Mapping[str, nn.Parameter],
    types: Mapping[str, torch.dtype],
    trained: Collection[str],
) -> int:
    total = 0
    for name, parameter in parameters.items():
        if name in trained:
            continue
        dtype = types.get(name, parameter.dtype)
        total += parameter.numel() * dtype.itemsize
        if dtype == torch.int8:
            total += len(parameter) * torch.float32.itemsize  # its scales
    return total


class FrozenForm:
    """The frozen parameters of a model that have smaller types, and where their values are."""

    def __init__(
        self,
        path: Path,
        compared: ComparedStart,
        types: Mapping[str, torch.dtype],
        frozen: Iterable[str],
    ) -> None:
        """`compared` are the files at `path` and the model.

        `types` are those of its parameters that are changed; `frozen` names all that are not
        trained.

        Raises:
            JobError: one of these does not have its values from the files.
        """
        self.types = types
        self._slices = StartSlices(path, _in_float32(compared))
        reason = compared.plan.explain()
        sourced = {name for each in compared.plan.targets if each.sources for name in each.names}
        absent = [name for name in frozen if name not in sourced]
        if compared.merged:
            reason = (
                "the adapter would be added to rounded values; have model() build the adapters by "
                "peft.get_peft_model, or merge them into the model and start from that"
            )
        elif reason is None and absent:
            reason = f"{absent[0]!r} is frozen and not in the files; remove it from model.fresh"
        if reason is not None:
            raise JobError(
                f"frozen_dtype reads frozen parameters as they are in the files of "
                f"model.start: {path}: {reason}"
            )

    def of_type(self, dtype: torch.dtype) -> Collection[str]:
        """The names of parameters that have a type in place of theirs."""
        return [name for name, each in self.types.items() if each == dtype]

    @torch.no_grad()
    def fill_int8(self, model: nn.Module) -> None:
        """Read what is in int8, a block of rows at a time.

        Raises:
            JobError: the files cannot be read, have changed, or have values that are not finite.
        """
        layers = _linear_layers(model)
        for name in self.of_type(torch.int8):
            layer = layers[name]
            outputs, inputs = layer.weight.shape
            whole = torch.empty(outputs, inputs, dtype=torch.int8)
            scale = torch.empty(outputs)
            count = max(1, _BLOCK // max(inputs, 1))
            for start in range(0, outputs, count):
                end = min(start + count, outputs)
                values = self.read(name, start, end - start)
                try:
                    whole[start:end], scale[start:end] = quantised(values)
                except ValueError as error:
                    raise JobError(
                        f"model.start: {name!r} cannot be in int8, as {error} in the files; "
                        "correct them, or use federated.frozen_dtype = 'bfloat16'"
                    ) from None
            hold_in_int8(layer, whole, scale)
        self.check_unchanged()

    def difference(self, model: nn.Module, loss: Callable[[], torch.Tensor]) -> LossDifference:
        """What the types change in the loss of one batch.

        Args:
            model: the model; it is the same afterwards.
            loss: computes the loss of the same batch with it, a scalar, with the same random
                numbers each time.

        Raises:
            TaskError: the loss cannot be computed, because of the types or else.
            JobError: the files cannot be read, or have changed.
        """
        was_training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                small = _loss(loss, " and ".join(sorted(map(_plain, set(self.types.values())))))
                with self.in_float32(model):
                    full = _loss(loss, "float32, to compare it,")
            self.check_unchanged()
        finally:
            for module, training in was_training.items():
                module.training = training
        return LossDifference(small, full)

    @contextlib.contextmanager
    def in_float32(self, model: nn.Module) -> Iterator[None]:
        """Within it operations have the values of frozen parameters in float32, and none is kept.

        That is so wherever the model uses them, in their module or elsewhere.

        Raises:
            JobError: the files cannot be read, whatever the code makes of that.
        """
        names = {id(each): name for name, each in model.named_parameters() if name in self.types}
        mode = _InFloat32(self.read, names)
        try:
            with mode:
                yield
        except TaskError:
            if mode.unreadable is not None:
                raise mode.unreadable from None
            raise

    def read(self, name: str, start: int = 0, rows: int | None = None) -> torch.Tensor:
        """Rows of a parameter in float32, see `StartSlices.read`.

        Raises:
            JobError: the files cannot be read.
        """
        try:
            return self._slices.read(name, start, rows)
        except UserError as error:
            raise JobError(f"model.start: {error}") from None

    def check_unchanged(self) -> None:
        """Refuse files that have changed since the model was compared with them.

        Raises:
            JobError: so they have.
        """
        try:
            self._slices.check_unchanged()
        except UserError as error:
            raise JobError(f"model.start: {error}") from None


@dataclasses.dataclass(frozen=True)
class LossDifference:
    """The loss of one batch, by two models that differ in the type of frozen parameters."""

    small: float
    """In the smaller type."""
    full: float
    """In float32."""

    @property
    def share(self) -> float:
        """The difference, as a share of the loss in float32.

        >>> LossDifference(2.02, 2.0).share
        0.01
        """
        return round(abs(self.small - self.full) / max(abs(self.full), 1e-12), 12)

    def check(self, tolerance: float) -> None:
        """Refuse a model that is too different; one that is not finite always is.

        Raises:
            TaskError: it is.
        """
        if not math.isfinite(self.full):
            raise TaskError(
                f"the loss of the first batch is {self.full:.6g} with the frozen parameters as "
                "they are in the files of model.start; check these, the data and the task's loss"
            )
        if not self.share <= tolerance:  # nan is not
            raise TaskError(
                f"the loss of the first batch is {self.small:.6g} with the frozen parameters in "
                f"the smaller type and {self.full:.6g} in float32, a difference of "
                f"{self.share:.2%}, and federated.frozen_tolerance allows {tolerance:.2%}; remove "
                "federated.frozen_dtype from the job"
            )


_ABOUT_TYPE = {
    torch.Tensor.is_floating_point,
    torch.Tensor.element_size,
    torch.is_floating_point,
}
"""Functions whose answer follows from the type."""
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
"""Attributes of a tensor that have its values."""
_OF_THE_OBJECT = {
    torch.Tensor.__hash__,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.__len__,
}
"""Functions that need no values."""


class _InFloat32(TorchFunctionMode):
    """Gives each operation of PyTorch some parameters in float32, which are read for it."""

    def __init__(self, read: Callable[[str], torch.Tensor], names: Mapping[int, str]) -> None:
        super().__init__()
        self._read = read
        self._names = names
        """Names of the parameters, by their identity."""
        self.unreadable: JobError | None = None
        """Why a parameter could not be read."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        if func in _OF_THE_OBJECT or not any(
            id(each) in self._names for each in tree_leaves(given)
        ):
            return func(*given[0], **given[1])
        if func in _ABOUT_TYPE:
            return func(torch.empty(0))
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            attribute = func.__self__.__name__
            if attribute == "dtype":
                return torch.float32
            if attribute not in _VALUES or func.__name__ == "__set__":
                return func(*given[0], **given[1])
        read: dict[int, torch.Tensor] = {}  # once, if an operation has it twice
        args, kwargs = tree_map(lambda each: self._with_values(each, read), given)
        return func(*args, **kwargs)

    def _with_values(self, each: Any, read: dict[int, torch.Tensor]) -> Any:
        name = self._names.get(id(each))
        if name is None:
            return each
        if id(each) not in read:
            try:
                read[id(each)] = self._read(name).to(each.device)
            except JobError as error:
                self.unreadable = error
                raise
        return read[id(each)]


def _loss(loss: Callable[[], torch.Tensor], kinds: str) -> float:
    try:
        return float(loss())
    except TaskError as error:
        raise TaskError(
            f"the model cannot be computed with its frozen parameters in {kinds} and the others in "
            f"float32 ({error}); remove federated.frozen_dtype, or have the model change types "
            "between its layers"
        ) from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_float32(compared: ComparedStart) -> ComparedStart:
    """A start whose targets are float32, to read values as such whatever the model's type."""
    targets = tuple(
        dataclasses.replace(
            each, tensor=torch.empty(each.tensor.shape, dtype=torch.float32, device="meta")
        )
        for each in compared.plan.targets
    )
    return dataclasses.replace(compared, plan=dataclasses.replace(compared.plan, targets=targets))
