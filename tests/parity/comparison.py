"""Train small models on ranks and by a plain loop in one process, and compare how they moved.

A *cell* is one model with one layout and one optimizer. It is equal (with the error), or the
product refused it (with the sentence); anything else is a fault. The plain loop has nothing of the
product but the order of the examples: PyTorch, one process, the mean loss over the scored units of
the batches of all replicas together.

    with Ranks(2) as ranks:
        for result in compare(ranks, [Cell("qwen3", {"tensor_parallel": 2})], directory):
            print(result.cell.model, result)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.warm_ranks import Ranks

from isthmus.job import Job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model, losses
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.training.data import ExampleOrder

HERE = Path(__file__).parent
LIMIT = 1e-4
"""Largest error of a movement that counts as equal."""
STEPS = 4
BATCH = 8
"""Examples of all replicas in a step."""
SEED = 5
_FLOOR = 1e-3
"""Movements below this fraction of the largest, per element, are compared with that instead: some
parameters, such as the bias of attention keys, only move by rounding."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained."""

    model: str
    layout: Mapping[str, Any]
    """Keys of [datacenter] without `ranks` and `batch_size`."""
    optimizer: str = "SGD"
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"lr": 0.1, "momentum": 0.9}
    )

    def replicas(self, ranks: int) -> int:
        """The number of replicas on so many ranks."""
        degrees = (self.layout.get(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline"))
        for degree in degrees:
            ranks //= degree
        return ranks

    def settings(self) -> dict[str, Any]:
        """Of the task."""
        return {"model": self.model, "optimizer": self.optimizer, "options": dict(self.options)}


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a cell."""

    cell: Cell
    error: float = 0.0
    """Of the parameter that differs most, relative to its movement."""
    parameter: str = ""
    refusal: str = ""
    """The sentence by which the product refused it before training; empty if it trained."""
    fault: str = ""
    """The last line of a traceback; empty if it was refused or trained."""

    @property
    def equal(self) -> bool:
        """Whether it trained as the plain loop did."""
        return not self.refusal and not self.fault and self.error <= LIMIT

    def __str__(self) -> str:
        """`equal (2e-06)`, `refused (...)`, `WRONG (0.5 in 'norm.weight')` or `FAILED (...)`."""
        if self.refusal:
            return f"refused ({self.refusal})"
        if self.fault:
            return f"FAILED ({self.fault})"
        if self.equal:
            return f"equal ({self.error:.0e})"
        return f"WRONG ({self.error:.1e} in {self.parameter!r})"


def compare(
    ranks: Ranks, cells: Sequence[Cell], directory: Path, device: str = "cpu"
) -> Iterator[Result]:
    """Train the cells one after the other; `directory` is for models and state."""
    for number, cell in enumerate(cells):
        job = Job.model_validate(
            {
                "name": "parity",
                "seed": SEED,
                "task": {"source": "tasks.py:Small", "settings": cell.settings()},
                "datacenter": {
                    "ranks": ranks.count,
                    "batch_size": BATCH // cell.replicas(ranks.count),
                    "zero_stage": 0,
                    **cell.layout,
                },
            }
        )
        plain = _plain(json.dumps(cell.settings(), sort_keys=True), cell.replicas(ranks.count))
        header = plain.layout.header
        file = directory / f"{ranks.count}-{number}"
        file.write_bytes(header + bytes(4 * plain.layout.size))
        open_command = {
            "op": "open",
            "run_id": "run",
            "job": job.model_dump_json(),
            "base": str(HERE),
            "layout": header.decode("latin-1"),
        }
        try:
            refusals = ranks.run(
                HERE / "trained_ranks.py", "train", open_command, STEPS, str(file), device
            )
        except RuntimeError as error:  # with the traceback of a rank
            yield Result(cell, fault=str(error).strip().splitlines()[-1])
            continue
        refusal = next((each for each in refusals if each), "")
        if refusal:
            yield Result(cell, refusal=refusal)
            continue
        moved = plain.layout.decode(bytearray(file.read_bytes()))
        yield Result(cell, *_largest_error(plain, moved))


@dataclasses.dataclass(frozen=True)
class _Plain:
    """A model that one process trained."""

    layout: TensorLayout
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


@functools.lru_cache(maxsize=4)
def _plain(settings: str, replicas: int) -> _Plain:
    task = load_task("tasks.py:Small", json.loads(settings), base=HERE)
    model = build_model(task, SEED)
    model.train()
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    participant = Participant(name="test", regime="datacenter")
    optimizer = task.optimizer(model.parameters(), participant)
    data: Any = task.local_data(participant)
    order = ExampleOrder(
        examples=len(data), replicas=replicas, batch_size=BATCH // replicas, seed=SEED
    )
    for step in range(STEPS):
        of_replicas = (order.indices(step, step + 1, each) for each in range(replicas))
        rows = [data[index] for indices in of_replicas for index in indices]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        losses(task, model, inputs, target)[1].mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    end = {name: each.detach() for name, each in model.named_parameters()}
    return _Plain(TensorLayout.of(model), start, end)


def _largest_error(plain: _Plain, vector: torch.Tensor) -> tuple[float, str]:
    """The largest error of the movement of a parameter, and the parameter."""
    moved = {name: plain.end[name] - plain.start[name] for name in plain.start}
    typical = max(_root_mean_square(each) for each in moved.values())
    worst = (0.0, "")
    for name, part in plain.layout.parts(vector):
        if name not in moved:
            continue
        error = _root_mean_square(part - plain.end[name])
        scale = max(_root_mean_square(moved[name]), _FLOOR * typical)
        worst = max(worst, (error / scale if error == error else float("inf"), name))
    return worst


def _root_mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())
