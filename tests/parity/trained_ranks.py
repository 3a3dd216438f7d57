"""What each rank of a comparison runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import isthmus_datacenter.training.engine
from isthmus.errors import UserError
from isthmus_datacenter.messages import Command, ControlSignal
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.round import train_round


def train(rank: int, open_command: dict[str, Any], steps: int, result: str, device: str) -> str:
    """Train a job and write its model to a file; return the sentence if it is refused."""
    # Each block is a sharding unit, however small.
    isthmus_datacenter.training.engine.parallelize = functools.partial(
        parallelize, smallest_unit=1, backend="aot_eager"
    )
    placement = RankPlacement(
        rank=rank,
        ranks=dist.get_world_size(),
        device=torch.device(device),
        participant="test",
        state=Path(f"{result}.state"),
    )
    try:
        engine = Engine(Command(**open_command), placement)
    except UserError as error:
        return str(error)
    command = {"op": "train_steps", "run_id": "run", "until_step": steps, "result": result}
    train_round(engine, Command(**command), lambda report: None, lambda: ControlSignal.CONTINUE)
    return ""
