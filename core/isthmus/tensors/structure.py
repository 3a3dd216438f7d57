"""The tensors that a model consists of, which must stay the same while it runs.

Optimizers, the exchange set and files are made for the parameters that a model has when it is
built. A layer that the first `forward()` makes would be trained on one participant, differently on
each, and be in no file; one that takes the place of a parameter would never be trained.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 3))
>>> structure = Structure.of(model)
>>> structure.explain_change(model) is None
True
>>> model.append(nn.Linear(3, 1)) is model
True
>>> structure.explain_change(model)[:49]
"running the model added the parameter '1.weight',"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.tensors.running_statistics import find_statistics


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A parameter as it was built."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    trained: bool

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Parameter:
        return cls(parameter, parameter.shape, parameter.dtype, parameter.requires_grad)


@dataclasses.dataclass(frozen=True)
class Structure:
    """Parameters, running statistics and names of buffers of a model that was just built."""

    _parameters: Mapping[str, _Parameter]
    """By each of their names, of which tied ones have several."""
    _statistics: Mapping[str, torch.Size]
    """Shapes of the running statistics of normalisation layers."""
    _buffers: frozenset[str]
    """Names of the buffers that belong to a model's state, those that are None included."""

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """Take down what a model consists of.

        Raises:
            TaskError: see `find_statistics`.
        """
        named = model.named_parameters(remove_duplicate=False)
        statistics = find_statistics(model)
        return cls(
            {name: _Parameter.of(parameter) for name, parameter in named},
            {name: buffer.shape for name, buffer in statistics.items()},
            frozenset(_state_buffers(model)),
        )

    def check(self, model: nn.Module) -> None:
        """Refuse what has changed since.

        Raises:
            TaskError: see `explain_change`.
        """
        if change := self.explain_change(model):
            raise TaskError(change)

    def explain_change(self, model: nn.Module) -> str | None:
        """Name the first tensor that running the model has added, removed or replaced, or None.

        Buffers that do not belong to the state may be added, as caches are, and the values of all
        tensors may change, and whether a parameter is frozen: see `fingerprint.explain_change`.
        """
        now = dict(model.named_parameters(remove_duplicate=False))
        for name in now:
            if name not in self._parameters:
                return added(name)
        for name, before in self._parameters.items():
            if name not in now:
                return (
                    f"running the model removed the parameter {name!r}, which others have; build "
                    "the model without it, or leave it unused"
                )
            difference = _difference(before, now[name])
            if difference is not None:
                return f"running the model {difference.format(name=repr(name))}"
        statistics = find_statistics(model)
        for name, shape in self._statistics.items():
            if name not in statistics or statistics[name].shape != shape:
                return (
                    f"running the model removed or reshaped the running statistics {name!r}, which "
                    "are those of a layer that model() has built; change their values only"
                )
        for name in _state_buffers(model):
            if name not in self._buffers:
                return (
                    f"running the model added the buffer {name!r}, which would be missing from the "
                    "model that is delivered; register it when the model is built, or with "
                    "persistent=False if it only saves time"
                )
        return None


def added(name: str) -> str:
    """The sentence for a parameter that a model did not have when it was built."""
    return (
        f"running the model added the parameter {name!r}, which would be trained on one "
        "participant only and be missing from the model; create its layer when the model is "
        "built, in model() or the module's __init__()"
    )


def _difference(before: _Parameter, now: nn.Parameter) -> str | None:
    """What has happened to a parameter `{name}`, as the rest of a sentence; None if nothing."""
    if now is not before.parameter:
        return (
            "put another parameter in the place of {name}, which its optimizer would not train; "
            "change its values in place, as by `with torch.no_grad(): parameter.copy_(values)`"
        )
    if now.shape != before.shape:
        return (
            f"changed the shape of the parameter {{name}} from {tuple(before.shape)} to "
            f"{tuple(now.shape)}, which others have as it was built; build it in its last shape"
        )
    if now.dtype != before.dtype:
        return (
            f"changed the dtype of the parameter {{name}} from {before.dtype} to {now.dtype}, "
            "which others have as it was built; convert it in model()"
        )
    if now.requires_grad and not before.trained:
        return (
            "unfroze the parameter {name}, which is not exchanged; leave requires_grad as model() "
            "has set it"
        )
    return None


def _state_buffers(model: nn.Module) -> Iterator[str]:
    """Names of the buffers of a model's state, those that are None included."""
    for path, module in model.named_modules():
        caches = getattr(module, "_non_persistent_buffers_set", ())
        for name, _ in module._buffers.items():  # noqa: PERF102 - a scripted module has no more
            if name not in caches:
                yield f"{path}.{name}" if path else name
