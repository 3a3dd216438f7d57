"""The running statistics of normalisation layers: which are exchanged, and how they are frozen."""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isthmus.errors import TaskError

_NAMES = ("running_mean", "running_var")


def find_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of a model's normalisation layers, by name.

    Raises:
        TaskError: a batch normalisation has none, so that in evaluation too an output depends on
            the other examples of its batch.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise TaskError(
                f"module {path!r} ({type(module).__name__}) normalises by the batch in evaluation "
                "too, so that metrics depend on evaluation.batch_size; use track_running_stats="
                "True, GroupNorm or LayerNorm"
            )
        for name in _NAMES if getattr(module, "track_running_stats", False) else ():
            buffer = getattr(module, name, None)
            if buffer is not None:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def normalisation_layers(model: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters and running statistics of each layer that has statistics."""
    layers = {}
    for path, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            names = [name for name, _ in module.named_parameters(recurse=False)]
            names += [name for name in _NAMES if getattr(module, name, None) is not None]
            layers[path] = [f"{path}.{name}" if path else name for name in names]
    return layers


def freeze_statistics(model: nn.Module, names: Collection[str] | None = None) -> None:
    """Keep layers with running statistics in evaluation mode, whatever mode the model gets.

    Args:
        model: is changed.
        names: of the statistics whose layers are meant; None for all layers.
    """

    def stay(self: nn.Module, mode: bool = True) -> nn.Module:
        return self

    for path, module in model.named_modules():
        name = f"{path}.{_NAMES[0]}" if path else _NAMES[0]
        if getattr(module, "track_running_stats", False) and (names is None or name in names):
            module.eval()
            module.train = MethodType(stay, module)  # of this object only
