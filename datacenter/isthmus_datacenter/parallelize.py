"""Lay a freshly built model out over the ranks, in place.

The model is cut into units that are gathered and freed together: the children of its containers
(the blocks of a transformer, the layers of a Sequential), then the root with what is left.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from isthmus.errors import TaskError
from isthmus_datacenter.layout import RankLayout

SMALLEST_UNIT = 1 << 16
"""Parameters below which a block is gathered with the rest: a message of its own costs more."""


def parallelize(
    model: nn.Module,
    layout: RankLayout,
    device: torch.device,
    *,
    smallest_unit: int = SMALLEST_UNIT,
) -> None:
    """Move the model to the device and shard its parameters as the layout says.

    Raises:
        TaskError: a parameter without a dimension to shard along.
    """
    if not layout.wrapped:
        model.to(device)
        return
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise TaskError(
                f"parameter {name!r} has no dimension, and the datacenter shards along the "
                "first one; give it the shape (1,)"
            )
    mesh = layout.mesh(device.type)
    for unit in (*units(model, smallest_unit), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=layout.reshard_after_forward)


def at_rest(model: nn.Module) -> None:
    """Free what a forward pass without a backward one left gathered.

    Until then the module's parameters are the gathered ones, and not those of the optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def units(model: nn.Module, smallest: int) -> list[nn.Module]:
    """The blocks that are gathered on their own, in order.

    A block that shares a parameter with the rest of the model stays with the root, which owns
    both ends of it. Nested containers are not searched: a Sequential is one block, a ModuleList
    is never called and stays with the root.
    """
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = []
    for container in _outermost_containers(model):
        for block in container.children():
            own = Counter(
                id(parameter)
                for module in block.modules()
                for parameter in module.parameters(recurse=False)
            )
            size = sum(parameter.numel() for parameter in block.parameters())
            shared = any(uses[parameter] != count for parameter, count in own.items())
            if (
                size >= smallest
                and not shared
                and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
            ):
                found.append(block)
    return found


def _outermost_containers(module: nn.Module) -> list[nn.Module]:
    if _is_container(module):
        return [module]
    return [found for child in module.children() for found in _outermost_containers(child)]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
