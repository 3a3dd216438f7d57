"""Hold a model's frozen parameters in a smaller type, without ever having the others as a whole.

What is trained keeps its type. The values in float32 stay in the files, from which
`FrozenForm.in_float32` reads the ones that a module needs while it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isthmus.errors import JobError, TaskError, UserError
from isthmus.start.loading import ComparedStart
from isthmus.start.slices import StartSlices

_TYPES = {"bfloat16": torch.bfloat16}
"""The types of `federated.frozen_dtype` that are smaller than float32."""
_WIDER = (torch.float32, torch.float64)
"""The types of parameters that are held in them."""


def smaller_type(name: str) -> torch.dtype | None:
    """The type for a `federated.frozen_dtype`; None for what `model()` builds."""
    return _TYPES.get(name)


def change_types(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Give parameters that are frozen another type, and memory to those without.

    Their values are lost, as are those of parameters on the device `meta`.

    Args:
        model: divided into what is trained and what is frozen; it is changed.
        dtype: of the frozen parameters, if theirs is wider.

    Returns:
        That type, by the names of these parameters.

    Raises:
        TaskError: there are none.
    """
    changed = {
        name: dtype
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dtype in _WIDER
    }
    if not changed:
        raise TaskError(
            "federated.frozen_dtype is for parameters that are not trained, and the model has none "
            "in float32; remove it, or freeze some in model() or by exchange.exclude"
        )
    made: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name in changed or parameter.is_meta:
            kind = changed.get(name, parameter.dtype)
            empty = torch.empty_like(parameter, dtype=kind, device="cpu")
            made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is not None and id(held) in made:
                module._parameters[key] = made[id(held)]
    return changed


class FrozenForm:
    """The frozen parameters of a model that have a smaller type, and where their values are."""

    def __init__(
        self,
        path: Path,
        compared: ComparedStart,
        types: Mapping[str, torch.dtype],
        frozen: Iterable[str],
    ) -> None:
        """`compared` are the files at `path` and the model.

        `types` are those of its parameters that have been changed; `frozen` names all that are not
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
                f"federated.frozen_dtype reads frozen parameters as they are in the files of "
                f"model.start: {path}: {reason}"
            )

    def difference(self, model: nn.Module, loss: Callable[[], torch.Tensor]) -> LossDifference:
        """What the type changes in the loss of one batch.

        A module at a time has its frozen parameters in float32. Only if the model uses some outside
        of their module, as attention of PyTorch does, all have them together.

        Args:
            model: the model; it is the same afterwards.
            loss: computes the loss of the same batch with it, a scalar.

        Raises:
            TaskError: the loss cannot be computed, because of the type or else.
        """
        was_training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                try:
                    small = float(loss())
                except TaskError as error:
                    kinds = sorted(
                        {str(kind).removeprefix("torch.") for kind in self.types.values()}
                    )
                    raise TaskError(
                        f"the model cannot be computed with its frozen parameters in "
                        f"{', '.join(kinds)} and the others in float32 ({error}); remove "
                        "federated.frozen_dtype, or have the model change types between its layers"
                    ) from error
                try:
                    with self.in_float32(model):
                        full = float(loss())
                except TaskError:
                    with self.in_float32(model, together=True):
                        full = float(loss())
        finally:
            for module, training in was_training.items():
                module.training = training
        return LossDifference(small, full)

    @contextlib.contextmanager
    def in_float32(self, model: nn.Module, *, together: bool = False) -> Iterator[None]:
        """Within it the frozen parameters of a module have all of their values while it runs.

        All of them have, if they are to be there `together`.
        """
        swaps = _Swaps(
            self._read, {id(p): n for n, p in model.named_parameters() if n in self.types}
        )
        if together:
            swaps.enter(list(model.parameters()))
            try:
                yield
            finally:
                swaps.leave_all()
            return
        handles: list[Any] = []
        for module in model.modules():
            own = [each for each in module.parameters(recurse=False) if swaps.has(each)]
            if own:
                handles += swaps.watch(module, own)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            swaps.leave_all()

    def _read(self, name: str) -> torch.Tensor:
        try:
            return self._slices.read(name)
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
        if not self.share <= tolerance:  # nan is not
            raise TaskError(
                f"the loss of the first batch is {self.small:.6g} with the frozen parameters in "
                f"the smaller type and {self.full:.6g} in float32, a difference of "
                f"{self.share:.2%}, and federated.frozen_tolerance allows {tolerance:.2%}; remove "
                "federated.frozen_dtype from the job"
            )


class _Swaps:
    """Gives parameters their values in float32 for a while."""

    def __init__(self, read: Callable[[str], torch.Tensor], names: Mapping[int, str]) -> None:
        self._read = read
        self._names = names
        """The names of the parameters in the smaller type, by their identity."""
        self._kept: dict[int, tuple[nn.Parameter, torch.Tensor, int]] = {}
        """What a parameter has else, and how many modules that run need it: tied ones, or calls
        within each other."""

    def has(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._names

    def watch(self, module: nn.Module, own: list[nn.Parameter]) -> list[Any]:
        """Do it whenever a module runs; returns the handles of what does it."""

        def before(*_: object) -> None:
            self.enter(own)

        def after(*_: object) -> None:
            self.leave(own)

        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    def enter(self, parameters: list[nn.Parameter]) -> None:
        for parameter in filter(self.has, parameters):
            found = self._kept.get(id(parameter))
            if found is None:
                values = self._read(self._names[id(parameter)]).to(parameter.device)
                self._kept[id(parameter)] = (parameter, parameter.data, 1)
                parameter.data = values
            else:
                self._kept[id(parameter)] = (*found[:2], found[2] + 1)

    def leave(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._kept:  # it could not be read
                continue
            _, data, users = self._kept.pop(id(parameter))
            if users > 1:
                self._kept[id(parameter)] = (parameter, data, users - 1)
            else:
                parameter.data = data

    def leave_all(self) -> None:
        for parameter, data, _ in self._kept.values():
            parameter.data = data
        self._kept.clear()


def _in_float32(compared: ComparedStart) -> ComparedStart:
    """A start whose targets are float32, to read values as such whatever the model's type."""
    targets = tuple(
        dataclasses.replace(
            each, tensor=torch.empty(each.tensor.shape, dtype=torch.float32, device="meta")
        )
        for each in compared.plan.targets
    )
    return dataclasses.replace(compared, plan=dataclasses.replace(compared.plan, targets=targets))
