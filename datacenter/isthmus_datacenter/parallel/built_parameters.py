"""What a model's parameters were before they were distributed, which makes others of them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError


@dataclasses.dataclass
class BuiltParameters:
    """The trained parameters as the task has built them, by name in the model.

    A shard is another object. Attributes that the task has given a parameter, such as a learning
    rate of its own, are given to its shard. Code that has kept the parameter itself, elsewhere than
    in its module, would compute with its first values for ever.
    """

    _originals: dict[str, weakref.ref[nn.Parameter]]
    """Parameters that may still be used, by name."""
    _attributes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> BuiltParameters:
        """Note them, before any parameter is replaced."""
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        return cls(
            {name: weakref.ref(each) for name, each in trained.items()},
            {name: dict(vars(each)) for name, each in trained.items() if vars(each)},
        )

    def give_attributes(self, stage: nn.Module, names: Mapping[str, str]) -> None:
        """Give the parameters of a stage what those had that they were made of.

        Args:
            stage: the distributed part of the model.
            names: the map from names in it to the model's.
        """
        for name, parameter in stage.named_parameters():
            for key, value in self._attributes.get(names[name], {}).items():
                if not hasattr(parameter, key):
                    setattr(parameter, key, value)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse a model that has used a parameter of which others are trained.

        Args:
            parameters: those that are trained, after a backward pass.

        Raises:
            TaskError: there is one.
        """
        if not self._originals:
            return
        current = {id(each) for each in parameters}
        for name, reference in list(self._originals.items()):
            original = reference()
            if original is None or id(original) in current:
                del self._originals[name]
            elif original.grad is not None:
                raise TaskError(
                    f"the model uses parameter {name!r} by a reference that its code has kept "
                    "elsewhere than in the module, such as in a function or a list, and ranks "
                    "train shards that have taken its place; use it as an attribute of its module"
                )


def refuse_kept_views(model: nn.Module) -> None:
    """Refuse a model that keeps a tensor which is a part of a trained parameter.

    It would follow the parameter in one process, and keep its first values on ranks that train
    shards. A parameter that is kept itself is noticed by its gradient.

    Raises:
        TaskError: there is one.
    """
    trained = {
        storage: name
        for name, each in model.named_parameters()
        if each.requires_grad and (storage := _storage(each)) is not None
    }
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            # PyTorch's hooks of spectral_norm and the like keep the parameter under another name,
            # and make this tensor anew for each pass.
            if key in _TABLES or f"{key}_orig" in module._parameters:
                continue
            for tensor in _tensors_in(value):
                storage = _storage(tensor)
                name = None if storage is None else trained.get(storage)
                if name is not None and not isinstance(tensor, nn.Parameter):
                    raise TaskError(
                        f"the model keeps {f'{path}.{key}'.lstrip('.')!r}, a tensor that shares "
                        f"memory with parameter {name!r}, and ranks train shards that have taken "
                        "its place; take it from the parameter in each forward pass"
                    )


_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""What a module keeps of PyTorch's, which is looked at elsewhere."""


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that an attribute is, or has as its items."""
    items: Iterable[Any] = [value]
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return (each for each in items if isinstance(each, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int | None:
    """A number of the tensor's storage, also of one without memory; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a subclass that wraps other tensors
        return None
