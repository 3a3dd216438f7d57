"""Linear layers that multiply in float8, by torchao, on GPUs that can.

Inputs, weights and gradients of a layer are rounded to eight bits for its three matrix products,
each tensor scaled by its largest value (Micikevicius et al. 2022). Parameters and what the
optimizer does stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.extras import install_line

_CAPABILITY = (8, 9)
"""The least compute capability with products of float8: Ada Lovelace; Hopper has 9.0."""
_MULTIPLE = 16
"""Both widths of a layer have to be multiples of it, as the GPUs' products need them to be."""


def refuse_without_float8(device: torch.device) -> None:
    """Refuse a device or an installation that has no products of float8.

    Raises:
        TaskError: with what is needed.
    """
    found = "processors have none"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found = f"this one has {major}.{minor}"
        if (major, minor) >= _CAPABILITY:
            _torchao()
            return
    raise TaskError(
        f"datacenter.float8 needs GPUs of compute capability {'.'.join(map(str, _CAPABILITY))} or "
        f"higher, and {found}; set float8 = false"
    )


def _torchao() -> Any:
    """The package's module, which takes seconds to import.

    Raises:
        TaskError: it is not installed.
    """
    try:
        import torchao.float8
    except ImportError:
        raise TaskError(
            "datacenter.float8 needs the package torchao on all ranks, which is not installed; "
            f"{install_line('float8')}"
        ) from None
    return torchao.float8


def use_float8(stage: nn.Module, units: Sequence[nn.Module], *, emulate: bool = False) -> None:
    """Have the linear layers within sharding units multiply in float8.

    Layers outside of them, such as the one that gives the scores of words, stay as they are: they
    lose most by it. Parameters and their names stay.

    Args:
        stage: a pipeline stage.
        units: modules of it.
        emulate: round as a GPU does, and multiply in float32; for processors.

    Raises:
        TaskError: there is no such layer, or torchao is not installed.
    """
    layers = {
        id(module)
        for unit in units
        for module in unit.modules()
        if module is not unit and _is_divisible(module)
    }
    if not layers:
        raise TaskError(
            "datacenter.float8: no linear layer within the blocks of the model has widths that are "
            f"multiples of {_MULTIPLE}; set float8 = false"
        )
    float8 = _torchao()
    # The number of rows of a batch need not be a multiple.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    chosen = functools.partial(_is_one_of, layers)
    float8.convert_to_float8_training(stage, config=config, module_filter_fn=chosen)


def _is_one_of(layers: set[int], module: nn.Module, name: str) -> bool:
    return id(module) in layers


def _is_divisible(module: nn.Module) -> bool:
    # A subclass may compute something else.
    return type(module) is nn.Linear and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )
