"""Choose the parallel layout from the number of parameters and the memory (`layout = "auto"`).

The first of these whose state fits is chosen, in order of communication cost: nothing sharded,
then optimizer state and gradients over all ranks (ZeRO 2), then parameters too (ZeRO 3), then
matrices (tensor parallelism). Pipelines are never chosen automatically. A part of the memory is
kept for activations, whose size is not known here.

>>> keys, why = choose_layout(ranks=4, parameters=10**9, memory=8 << 30, per_machine=4)
>>> keys
{'zero_stage': 3, 'tensor_parallel': 1, 'pipeline_parallel': 1, 'data_parallel': None}
>>> print(why)
zero_stage=3: 1.00e+09 parameters take 3.8 GiB a rank, of 4.8 GiB free for them on each of 4 ranks
"""

from __future__ import annotations

import os

import torch

from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.parallel.device_memory import memory_bytes
from isthmus_datacenter.parallel.parallel_dims import LayoutError

_STATE_FRACTION = 0.6
"""Fraction of a device's memory that parameters, gradients and optimizer state may take."""
_BYTES = 4
"""Size of one float32 number."""
_MOMENTS = 2
"""Numbers that Adam keeps for each parameter, the most of the common optimizers."""
_MIN_UNITS = 64
"""Estimated number of sharding units, of which stage 3 gathers two at a time."""


def choose_layout(
    *, ranks: int, parameters: int, memory: int, per_machine: int
) -> tuple[dict[str, int | None], str]:
    """Return the keys of a job's [datacenter] to change, and the reason in one sentence.

    Args:
        ranks: number of ranks in the group.
        parameters: number of parameters of the whole model.
        memory: bytes of one rank's device.
        per_machine: ranks of one machine; tensor parallelism stays within a machine.

    Raises:
        LayoutError: no layout fits.
    """
    available = _STATE_FRACTION * memory
    candidates = [(stage, 1) for stage in (0, 2, 3)]
    tensor = 2
    while tensor <= per_machine and ranks % tensor == 0:
        candidates.append((3, tensor))
        tensor *= 2
    needed = 0.0
    for stage, tensor in candidates:
        needed = state_bytes(parameters // tensor, ranks // tensor, stage)
        if needed <= available:
            degree = "" if tensor == 1 else f", tensor_parallel={tensor}"
            why = (
                f"zero_stage={stage}{degree}: {parameters:.2e} parameters take "
                f"{needed / 2**30:.1f} GiB a rank, of {available / 2**30:.1f} GiB free for them on "
                f"each of {ranks} ranks"
            )
            keys = {"zero_stage": stage, "tensor_parallel": tensor}
            return {**keys, "pipeline_parallel": 1, "data_parallel": None}, why
    raise LayoutError(
        f"layout='auto' finds no layout: {parameters:.2e} parameters take at least "
        f"{needed / 2**30:.1f} GiB a rank on {ranks} ranks, and {available / 2**30:.1f} GiB of "
        f"{memory / 2**30:.1f} GiB are free for them; use more ranks, or layout='given' with "
        "pipeline_parallel"
    )


def state_bytes(parameters: int, replicas: int, stage: int) -> float:
    """Peak bytes of parameters, gradients and Adam's moments on one rank during a step."""
    sharded = _BYTES * parameters * (2 + _MOMENTS) / (replicas if stage else 1)
    if stage == 0 or replicas == 1:
        return sharded
    # Gathered on top: all parameters; in stage 3, those of one sharding unit and the next.
    return sharded + _BYTES * parameters * (1 if stage < 3 else 2 / _MIN_UNITS)


def choose_for_devices(
    section: DatacenterSection, ranks: int, parameters: int
) -> tuple[DatacenterSection, str]:
    """Complete the section with a layout for this machine's devices; also return the reason.

    Raises:
        LayoutError: no layout fits.
    """
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if torch.cuda.is_available():
        memory = memory_bytes(torch.device("cuda", torch.cuda.current_device()))
    else:
        memory = memory_bytes(torch.device("cpu")) // per_machine
    changes, why = choose_layout(
        ranks=ranks, parameters=parameters, memory=memory, per_machine=per_machine
    )
    return section.model_copy(update=changes), why
