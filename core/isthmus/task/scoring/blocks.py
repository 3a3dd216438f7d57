"""The blocks of a model: the children of its containers.

They are the blocks of a transformer, and the layers of a Sequential. A datacenter shards, compiles
and recomputes them, and a device recomputes them.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def default_units(model: nn.Module, smallest: int) -> list[list[nn.Module]]:
    """Find the blocks of each container that have at least `smallest` parameters, in order.

    A block that shares a parameter with the rest of the model stays with the root, which owns
    both uses of it. Nested containers are not searched: a Sequential is one unit, a ModuleList
    is never called and stays with the root.
    """
    # A parameter that is used in two units would be gathered by one and be a shard for the other.
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    groups = []
    for container in outermost_containers(model):
        units: list[nn.Module] = []
        for block in container.children():
            own_uses = Counter(
                id(parameter)
                for module in block.modules()
                for parameter in module.parameters(recurse=False)
            )
            size = sum(parameter.numel() for parameter in block.parameters())
            shared = any(uses[parameter] != count for parameter, count in own_uses.items())
            if (
                size >= smallest
                and not shared
                and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
            ):
                units.append(block)
        groups.append(units)
    return groups


def outermost_containers(module: nn.Module) -> list[nn.Module]:
    """The containers of a model, such as `nn.ModuleList`, that are in no other container."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return [module]
    return [each for child in module.children() for each in outermost_containers(child)]
