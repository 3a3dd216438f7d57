"""One layer that makes queries, keys and values, cut by heads.

A rank's heads are a part of each third of what such a layer makes, and no plain shard of its matrix
makes that. The matrix is cut plainly all the same, as checkpoints and the exchange of models have
it; what each rank makes of its shard is dealt out anew, in one message of a part of the outputs,
where gathering them would send all of them to all.

>>> outputs = torch.arange(12.0)  # of four heads: queries, then keys, then values
>>> part_of(outputs, part=1, degree=2, pieces=3)
tensor([ 2.,  3.,  6.,  7., 10., 11.])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from isthmus_datacenter.parallel.linears import by_outputs, lay_out


def part_of(outputs: torch.Tensor, *, part: int, degree: int, pieces: int) -> torch.Tensor:
    """One of `degree` parts of each of the `pieces` that the last dimension is made of."""
    return torch.cat([each.chunk(degree, -1)[part] for each in outputs.chunk(pieces, -1)], -1)


class ByHeads(ParallelStyle):
    """Of an attention with a fused layer: each rank gets its heads' part of what that makes."""

    def __init__(self, layer: str, pieces: int, remembered: tuple[str, ...]) -> None:
        """`layer` is the fused one, whose outputs are `pieces` of equally many, one after another.

        `remembered` are attributes of the attention that are the width of a piece.
        """
        super().__init__()
        self._layer, self._pieces, self._remembered = layer, pieces, remembered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = module.get_submodule(self._layer)
        lay_out(layer, by_outputs(layer), device_mesh)
        for name in self._remembered:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        if self._pieces > 1:
            deal = _Deal(device_mesh.get_group(), self._pieces)
            layer.register_forward_hook(lambda layer, given, output: deal(output))
        return module


class _Deal:
    """From plain shards of the outputs to each rank's part of every piece.

    Outputs are `pieces * degree` blocks. A rank makes `pieces` of them that follow one another, and
    wants every `degree`-th.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int) -> None:
        self._group, self._pieces = group, pieces
        rank, degree = group.rank(), group.size()
        makes = [block // pieces for block in range(pieces * degree)]
        wants = [block % degree for block in range(pieces * degree)]
        made = [block for block, maker in enumerate(makes) if maker == rank]
        wanted = [block for block, owner in enumerate(wants) if owner == rank]
        self._order = sorted(range(pieces), key=lambda at: (wants[made[at]], at))
        self._sent = [sum(wants[block] == to for block in made) for to in range(degree)]
        self._received = [sum(makes[block] == of for block in wanted) for of in range(degree)]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        blocks = output.reshape(*output.shape[:-1], self._pieces, -1).movedim(-2, 0)
        blocks = torch.stack([blocks[at] for at in self._order])
        mine: Any = all_to_all_single_autograd(blocks, self._received, self._sent, self._group)
        dealt: torch.Tensor = mine.movedim(0, -2).flatten(-2)
        return dealt
