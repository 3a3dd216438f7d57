"""What the ranks of these tests do."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import isthmus_datacenter.engine
import isthmus_datacenter.optim
from isthmus_datacenter.checkpoint import Checkpoints
from isthmus_datacenter.control import Command
from isthmus_datacenter.engine import AgreedError, Engine, Place
from isthmus_datacenter.exchange import load_shards, store_shards
from isthmus_datacenter.parallelize import parallelize


def engine(rank: int, command: dict[str, Any], state: str) -> Engine:
    place = Place(
        rank=rank,
        ranks=dist.get_world_size(),
        device=torch.device("cpu"),
        participant="test",
        state=Path(state),
    )
    return Engine(Command(**command), place)


def shard_everything() -> None:
    """Have each block be a unit of its own, however small; no fp16 step overflows at first."""
    isthmus_datacenter.optim.FIRST_SCALE = 256.0

    isthmus_datacenter.engine.parallelize = functools.partial(
        parallelize, smallest_unit=1, backend="aot_eager"
    )


def train(
    rank: int, works: list[tuple[dict[str, Any], dict[str, Any], str]]
) -> list[dict[str, object]]:
    """Train several runs, one after the other: `(how to open it, what to do, state)`."""
    shard_everything()
    return [
        engine(rank, opened, state).train(
            Command(**command), lambda steps, loss: None, lambda: False
        )
        for opened, command, state in works
    ]


def round_trip(rank: int, opened: dict[str, Any], source: str, target: str) -> list[int]:
    """Load a model and write it again; the size of each local shard."""
    shard_everything()
    made = engine(rank, opened, target + ".state")
    load_shards(Path(source), made.layout, made.share)
    store_shards(Path(target), made.layout, made.share)
    dist.barrier()
    return [
        getattr(parameter, "_local_tensor", parameter).numel()
        for parameter in made.share.parameters().values()
    ]


def state_at(
    rank: int, openeds: list[dict[str, Any]], state: str, step: int
) -> list[dict[str, dict[str, Any]]]:
    """Parameters and optimizer state of a step, whole, by name; once for each way to open it."""
    shard_everything()
    return [_state_at(engine(rank, opened, state), step) for opened in openeds]


def _state_at(made: Engine, step: int) -> dict[str, dict[str, Any]]:
    made._go_to(step)
    return {
        name: {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy().copy()
            for key, value in {
                "value": parameter.detach(),
                **made.updater.optimizer.state[parameter],
            }.items()
        }
        for name, parameter in made.share.parameters().items()
    }


def states(
    rank: int, openeds: list[dict[str, Any]], directories: list[str], step: int
) -> list[list[dict[str, dict[str, Any]]]]:
    """What each way to open a run makes of the checkpoints in each directory: as `state_at`."""
    shard_everything()
    found = []
    for opened in openeds:
        made = engine(rank, opened, directories[0])
        rows = []
        for directory in directories:
            made.checkpoints, made.at = Checkpoints(Path(directory)), None
            rows.append(_state_at(made, step))
        found.append(rows)
    return found


def refusals(rank: int, openeds: list[dict[str, Any]], state: str) -> list[str]:
    """Why each way to open a run cannot be; empty where it can."""
    said = []
    for opened in openeds:
        try:
            engine(rank, opened, state)
            said.append("")
        except AgreedError as error:
            said.append(str(error))
    return said
