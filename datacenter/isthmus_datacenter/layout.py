"""Which rank holds what: the device mesh and the ZeRO stage on it.

>>> RankLayout(ranks=4, zero_stage=0).axes
{'replicate': 4, 'shard': 1}
>>> RankLayout(ranks=4, zero_stage=3).axes
{'shard': 4}
"""

from __future__ import annotations

import dataclasses

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How one model lies on the ranks.

    Every stage is the same code, `fully_shard`, on another mesh or with another option: stage 0
    shards over an axis of one rank and replicates over the rest; stages 1 and 2 keep gathered
    parameters from forward to backward, and differ only when several micro-batches make a step;
    stage 3 gathers them twice. At rest, stages 1 to 3 hold a share of everything.
    """

    ranks: int
    """Size of the group."""
    zero_stage: int
    """0 to 3, as in Rajbhandari et al. 2020."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, outermost first, with their sizes."""
        if self.zero_stage == 0:
            return {"replicate": self.ranks, "shard": 1}
        return {"shard": self.ranks}

    @property
    def reshard_after_forward(self) -> bool:
        """Whether gathered parameters are dropped between forward and backward."""
        return self.zero_stage == 3

    @property
    def wrapped(self) -> bool:
        """Whether the model is sharded at all; on one rank the wrapper only costs time."""
        return self.ranks > 1

    def mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh; every rank must call this at the same point."""
        return init_device_mesh(
            device_type, tuple(self.axes.values()), mesh_dim_names=tuple(self.axes)
        )
