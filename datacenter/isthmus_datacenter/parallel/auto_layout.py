"""Choose a layout from the model's size and the devices, and say why.

The smallest change that makes the state fit wins, in the order of what it costs: nothing sharded,
then optimizer state and gradients over all ranks, then parameters too, then matrices; pipelines are
for people to choose.
Room is kept for activations, about which nothing is known here.

>>> layout, why = choose(ranks=4, parameters=10**9, memory=8 << 30, per_machine=4)
>>> layout
{'zero_stage': 3, 'tensor_parallel': 1, 'pipeline_parallel': 1, 'data_parallel': None}
>>> print(why)
zero_stage=3: 1.00e+09 parameters take 3.8 GiB a rank, of 4.8 GiB free for them on each of 4 ranks
"""

from __future__ import annotations

import os

import torch

from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.parallel.parallel_dims import LayoutError

_FOR_STATE = 0.6
"""Share of a device's memory that parameters, gradients and optimizer state may take."""
_BYTES = 4
"""Of one number: all of these are float32."""
_MOMENTS = 2
"""Numbers an Adam keeps for each parameter, the most that is common."""
_FEWEST_SHARES = 64
"""Parts into which the blocks cut the parameters that stage 3 gathers at a time, at a guess."""


def choose(
    *, ranks: int, parameters: int, memory: int, per_machine: int
) -> tuple[dict[str, int | None], str]:
    """The keys of a job's [datacenter] to change, and the reason in one sentence.

    Args:
        ranks: in the group.
        parameters: of the whole model.
        memory: bytes of one rank's device.
        per_machine: ranks that a fast network joins; matrices are not shared beyond them.

    Raises:
        LayoutError: nothing fits.
    """
    room = _FOR_STATE * memory
    tried = [(stage, 1) for stage in (0, 2, 3)]
    tensor = 2
    while tensor <= per_machine and ranks % tensor == 0:
        tried.append((3, tensor))
        tensor *= 2
    needed = 0.0
    for stage, tensor in tried:
        needed = state_bytes(parameters // tensor, ranks // tensor, stage)
        if needed <= room:
            degree = "" if tensor == 1 else f", tensor_parallel={tensor}"
            why = (
                f"zero_stage={stage}{degree}: {parameters:.2e} parameters take "
                f"{needed / 2**30:.1f} GiB a rank, of {room / 2**30:.1f} GiB free for them on each "
                f"of {ranks} ranks"
            )
            chosen = {"zero_stage": stage, "tensor_parallel": tensor}
            return {**chosen, "pipeline_parallel": 1, "data_parallel": None}, why
    raise LayoutError(
        f"layout='auto' finds no layout: {parameters:.2e} parameters take at least "
        f"{needed / 2**30:.1f} GiB a rank on {ranks} ranks, and {room / 2**30:.1f} GiB of "
        f"{memory / 2**30:.1f} GiB are free for them; use more ranks or set pipeline_parallel"
    )


def state_bytes(parameters: int, replicas: int, stage: int) -> float:
    """Most bytes of parameters, gradients and Adam's moments on one rank during a step."""
    at_rest = _BYTES * parameters * (2 + _MOMENTS) / (replicas if stage else 1)
    if stage == 0 or replicas == 1:
        return at_rest
    # What is gathered on top: all parameters, and in stage 3 those of a block and the next.
    return at_rest + _BYTES * parameters * (1 if stage < 3 else 2 / _FEWEST_SHARES)


def chosen(
    section: DatacenterSection, ranks: int, parameters: int
) -> tuple[DatacenterSection, str]:
    """The section with a layout for this machine's devices, and why.

    Raises:
        LayoutError: nothing fits.
    """
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_machine
    changes, why = choose(
        ranks=ranks, parameters=parameters, memory=memory, per_machine=per_machine
    )
    return section.model_copy(update=changes), why
