"""Where a loss of a batch as a whole, and several optimizers, cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from isthmus.errors import TaskError
from isthmus.task import Task
from isthmus.task.definition import defines
from isthmus.task.made_optimizers import SEVERAL
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.parallel_dims import ParallelDims


def check_layout(task: Task, dims: ParallelDims) -> None:
    """Refuse a pipeline, and parts of sequences, where the task calls the model itself.

    Raises:
        TaskError: it does.
    """
    for method in ("training_step", "evaluation_step"):
        if not defines(task, method):
            continue
        if dims.pipeline > 1:
            raise TaskError(
                f"{method}() calls the whole model, and each rank of a pipeline has a part of it; "
                "set datacenter.pipeline_parallel = 1"
            )
        # Only what forward() returns is compared with the whole model before training.
        if dims.shares_positions:
            key = "sequence_parallel" if dims.sequence else "context_parallel"
            raise TaskError(
                f"{method}() calls the model itself, and may read hidden states between its "
                f"blocks, of which each rank has other positions with datacenter.{key}; remove it"
            )


def check_optimizers(task: Task, shard: ModelShard, names: Sequence[str]) -> None:
    """Refuse several optimizers where a rank does not have whole parameters.

    Raises:
        TaskError: there are several, and the parameters are sharded or nothing says which loss is
            whose.
    """
    if list(names) == [""]:
        return
    if not defines(task, "training_step"):
        raise TaskError(SEVERAL)
    sharded = any(isinstance(module, FSDPModule) for module in shard.modules())
    if sharded or shard.dims.tensor > 1:
        raise TaskError(
            "optimizer() returned several optimizers, which train parts of the model in turn, and "
            "here each rank has shards of all parameters; set datacenter.zero_stage = 0 and "
            "datacenter.tensor_parallel = 1, and on GPUs use one rank"
        )
