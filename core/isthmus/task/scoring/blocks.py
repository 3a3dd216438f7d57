"""The blocks of a model: the children of its containers.

They are the blocks of a transformer, and the layers of a Sequential. A datacenter shards, compiles
and recomputes them, and a device recomputes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from torch import nn


def default_units(
    model: nn.Module, smallest: int, *, shared: bool = False
) -> list[list[nn.Module]]:
    """Find the blocks of each container that have at least `smallest` parameters, in order.

    A block that shares a parameter, or a module that has some, with the rest of the model stays
    with the root, which owns both uses of it. Nested containers are not searched: a Sequential is
    one unit, a ModuleList is never called and stays with the root.

    With `shared` blocks that share something are units, too: those that are not sharded may.
    """
    containers = outermost_containers(model)
    users = _users(model, [block for container in containers for block in container.children()])
    groups = []
    for container in containers:
        units: list[nn.Module] = []
        for block in container.children():
            size = sum(parameter.numel() for parameter in block.parameters())
            # It would be gathered by one unit and be a shard for the other.
            alone = all(len(users[id(parameter)]) == 1 for parameter in block.parameters())
            if (
                size >= smallest
                and (alone or shared)
                and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
            ):
                units.append(block)
        groups.append(units)
    return groups


def _users(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, set[int]]:
    """The users of each parameter, all by `id`: some of the blocks, and the rest of the model.

    Blocks may have a parameter in common, and also a whole module, such as an activation function
    or a norm that has parameters.
    """
    users: dict[int, set[int]] = defaultdict(set)
    for block in blocks:
        for parameter in block.parameters():
            users[id(parameter)].add(id(block))
    for module in _outside(model, {id(block) for block in blocks}):
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].add(id(model))
    return users


def _outside(module: nn.Module, blocks: Set[int]) -> Iterator[nn.Module]:
    """The modules that are reached without passing through a block."""
    if id(module) in blocks:
        return
    yield module
    for child in module.children():
        yield from _outside(child, blocks)


def outermost_containers(module: nn.Module) -> list[nn.Module]:
    """The containers of a model, such as `nn.ModuleList`, that are in no other container."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return [module]
    return [each for child in module.children() for each in outermost_containers(child)]
