"""What the ranks of these tests do."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import isthmus_datacenter.training.engine
import isthmus_datacenter.training.optimizer
from isthmus.job import Job
from isthmus.task import Participant, Task, load_task
from isthmus.task.scoring import build_model, losses
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.checkpoints import Checkpoints
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.parallel.model_shard import GradientAllReduce, ModelShard
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.parallel.tensor_styles import FusedOutputExchange, heads_of_part
from isthmus_datacenter.service.messages import Command, ControlSignal
from isthmus_datacenter.training.consensus import ConsensusError
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.mean_gradient import mean_gradient
from isthmus_datacenter.training.round import train_round


def engine(rank: int, command: dict[str, Any], state: str) -> Engine:
    placement = RankPlacement(
        rank=rank,
        ranks=dist.get_world_size(),
        device=torch.device("cpu"),
        participant="test",
        state=Path(state),
    )
    return Engine(Command(**command), placement)


def shard_everything() -> None:
    """Have each block be a unit of its own, however small; no fp16 step overflows at first."""
    isthmus_datacenter.training.optimizer.INITIAL_LOSS_SCALE = 256.0

    isthmus_datacenter.training.engine.parallelize = functools.partial(
        parallelize, smallest_unit=1, backend="aot_eager"
    )


def train(
    rank: int, works: list[tuple[dict[str, Any], dict[str, Any], str]]
) -> list[dict[str, object]]:
    """Train several runs, one after the other: `(how to open it, what to do, state)`."""
    shard_everything()
    return [
        train_round(
            engine(rank, opened, state),
            Command(**command),
            lambda report: None,
            lambda: ControlSignal.CONTINUE,
        )
        for opened, command, state in works
    ]


def gradients(
    rank: int, works: list[tuple[dict[str, Any], dict[str, Any], str]]
) -> list[dict[str, object]]:
    """Mean gradients: `(how to open the run, what to do, state)`."""
    shard_everything()
    return [
        mean_gradient(
            engine(rank, opened, state), Command(**command), lambda: ControlSignal.CONTINUE
        )
        for opened, command, state in works
    ]


def round_trip(rank: int, opened: dict[str, Any], source: str, target: str) -> list[int]:
    """Load a model and write it again; the size of each local shard."""
    shard_everything()
    made = engine(rank, opened, target + ".state")
    load_shards(Path(source), made.layout, made.shard)
    store_shards(Path(target), made.layout, made.shard)
    dist.barrier()
    return [
        getattr(parameter, "_local_tensor", parameter).numel()
        for parameter in made.shard.parameters().values()
    ]


def dealt(rank: int, pieces: int) -> bool:
    """Whether a rank gets its part of each piece of what all make, and their gradients go back."""
    ranks = dist.get_world_size()
    whole = torch.arange(2.0 * 3 * pieces * ranks * 2).reshape(2, 3, -1)
    shard = whole.chunk(ranks, -1)[rank].clone().requires_grad_()
    mine = FusedOutputExchange(dist.group.WORLD, pieces)(shard)
    (mine * mine.detach()).sum().backward()  # type: ignore[no-untyped-call]
    expected = heads_of_part(whole, part=rank, degree=ranks, pieces=pieces)
    return torch.equal(mine, expected) and torch.equal(shard.grad, shard.detach())  # type: ignore[arg-type]


def added_up(rank: int) -> tuple[list[list[float]], dict[str, list[float] | None]]:
    """Sums of tensors of several sizes, types and strides; gradients that not all replicas have."""
    mine = rank + 1
    tensors = [
        torch.full((2, 3), 1.0 * mine),
        torch.full((4, 2), 2.0 * mine)[:, 0],
        torch.full((4,), 3.0 * mine, dtype=torch.float64),
        torch.full((20,), 4.0 * mine),
        torch.full((2,), 5.0 * mine),
    ]
    GradientAllReduce(dist.group.WORLD, bucket_bytes=64).sum(tensors)
    stage = nn.ParameterDict({name: torch.zeros(1) for name in ("both", "one", "none")})
    names = {name: name for name in stage}
    shard = ModelShard(
        ParallelDims(ranks=2, zero_stage=0),
        {0: stage},
        {0: names},
        all_reduce=GradientAllReduce(dist.group.WORLD),
    )
    (stage["both"] * mine + (stage["one"] * mine if rank else 0.0)).sum().backward()
    gradients = shard.gradients()
    shard.sum_over_replicas(gradients)
    left = {name: None if each.grad is None else each.grad.tolist() for name, each in stage.items()}
    assert {name: each.tolist() for name, each in gradients.items()} == {
        name: each for name, each in left.items() if each is not None
    }
    return [each.flatten().tolist() for each in tensors], left


def store_state(rank: int, opened: dict[str, Any], states: list[str], step: int, to: str) -> None:
    """Write parameters and optimizer state of a step of each directory into `to`, by name."""
    made = engine(rank, opened, states[0])
    for state in states:
        _load(made, state, step)
        torch.save(
            {name: _fields(made, parameter) for name, parameter in made.shard.parameters().items()},
            f"{to}/{Path(state).name}",
        )


def compare_state(
    rank: int, readers: list[tuple[dict[str, Any], list[str]]], step: int, wholes: str
) -> list[list[tuple[int, list[str]]]]:
    """What each way to open a run makes of each of its directories.

    Beside what `store_state` wrote of the directory, into one of the same name in `wholes`. Returns
    for each the number of elements that are the same here, and the names of what differs.
    """
    shard_everything()
    return [
        [_compared(made, state, step, f"{wholes}/{Path(state).name}") for state in states]
        for made, states in (
            (engine(rank, opened, states[0]), states) for opened, states in readers
        )
    ]


def _load(made: Engine, state: str, step: int) -> None:
    made.checkpoints = Checkpoints(Path(state))
    made.invalidate_state()
    made.restore_step(step)


def _fields(made: Engine, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {"value": parameter.detach(), **made.optimizer.inner.state[parameter]}


def _compared(made: Engine, state: str, step: int, whole: str) -> tuple[int, list[str]]:
    _load(made, state, step)
    expected = torch.load(whole)
    same, differing = 0, []
    for name, parameter in made.shard.parameters().items():
        fields = _fields(made, parameter)
        if fields.keys() != expected[name].keys():
            differing.append(f"{name}: {sorted(fields)}")
        for key, value in fields.items():
            wanted = expected[name][key]
            if isinstance(value, DTensor):
                sizes, offsets = compute_local_shape_and_global_offset(
                    value.shape, value.device_mesh, value.placements
                )
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    wanted = wanted.narrow(dim, min(offset, wanted.shape[dim] - size), size)
                value = value.to_local()
            same += value.numel()
            if not torch.equal(value, wanted):
                differing.append(f"{name}: {key}")
    return same, differing


def beside_one_process(
    rank: int, openeds: list[dict[str, Any]], steps: int, batch: int, directory: str
) -> list[tuple[float, str]]:
    """Train each on these ranks, and alone by hand on the same `batch` examples in each step.

    Returns the largest difference between their parameters, and what was said of the layout. The
    commands come without the models' layouts: only here what the models need is imported.
    """
    shard_everything()
    found = []
    for number, opened in enumerate(openeds):
        job = Job.model_validate_json(opened["job"])
        base, data = Path(opened["base"]), Path(opened["data"])
        task = load_task(job.task.source, job.task.settings, base=base, data=data)
        model = build_model(task, job.seed)
        layout = TensorLayout.of(model)
        result = Path(directory) / f"{number}"
        if rank == 0:
            result.write_bytes(layout.header + bytes(4 * layout.size))
        made = engine(rank, {**opened, "layout": layout.header.decode("latin-1")}, f"{result}.d")
        command = Command(op="train", run_id="run", until_step=steps, result=str(result))
        train_round(made, command, lambda report: None, lambda: ControlSignal.CONTINUE)
        _train_alone(
            task, model, dataclasses.replace(made.order, replicas=1, batch_size=batch), steps
        )
        together = layout.decode(bytearray(result.read_bytes()))
        found.append((float((together - layout.gather(model)).abs().max()), made.note))
    return found


def _train_alone(task: Task, model: nn.Module, order: ExampleOrder, steps: int) -> None:
    participant = Participant(name="test", regime="datacenter")
    optimizer = task.optimizer(model.parameters(), participant)
    data: Any = task.local_data(participant)
    for step in range(steps):
        rows = [data[index] for index in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        losses(task, model, inputs, target)[1].mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def refusals(rank: int, openeds: list[dict[str, Any]], state: str) -> list[str]:
    """Why each way to open a run cannot be; empty where it can."""
    said = []
    for opened in openeds:
        try:
            engine(rank, opened, state)
            said.append("")
        except ConsensusError as error:
            said.append(str(error))
    return said


def save_for_ever(rank: int, opened: dict[str, Any], state: str, told: str) -> None:
    """Save step after step, every number of it that of the step; `told` is the last safe one."""
    made = engine(rank, opened, state)
    step = 0
    while True:
        step += 1
        _fill(made, float(step))
        made.checkpoints.begin_save(step, made.shard, made.optimizer)
        made.checkpoints.finish_save()
        if rank == 0:
            Path(told).write_text(str(step))
            made.checkpoints.keep_only({step - 1, step})


def _fill(made: Engine, value: float) -> None:
    for parameter in made.shard.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    made.optimizer.inner.step()  # so that there is state
    with torch.no_grad():
        for parameter in made.shard.parameters().values():
            for each in _fields(made, parameter).values():
                each.fill_(value)


def read_back(rank: int, opened: dict[str, Any], states: list[str]) -> list[dict[int, set[float]]]:
    """Of each directory: the steps that are there, and the numbers in each."""
    made = engine(rank, opened, states[0])
    found = []
    for state in states:
        numbers: dict[int, set[float]] = {}
        for link in Path(state).glob("step-*"):
            step = int(link.name.removeprefix("step-"))
            _load(made, state, step)
            numbers[step] = {
                float(number)
                for parameter in made.shard.parameters().values()
                for each in _fields(made, parameter).values()
                for number in (each.min(), each.max())
            }
        found.append(numbers)
    return found
