"""Train small models with the product and by a plain loop in one process, and compare both.

A *cell* is one model with one layout and one setting of its training. It is equal (with the error),
or the product refused it (with the sentence); anything else is a fault.

    with Ranks(2) as ranks:
        for result in compare(ranks, [Cell("qwen3", {"tensor_parallel": 2})], directory):
            print(result.cell.model, result)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tests.parity import plain_training
from tests.parity.plain_training import Setting, State, Trained
from tests.parity.tasks import DEVICES
from tests.warm_ranks import Ranks
from torch import nn

import isthmus
from isthmus.job import Job

HERE = Path(__file__).parent
LIMIT = 1e-4
"""Largest error of a movement that counts as equal."""
STEPS = 4
"""In a datacenter. Devices make half of them in each of two rounds."""
BATCH = 8
"""Examples of all replicas in a step. A device has half of them."""
SEED = 5
_FLOOR = 1e-3
"""Movements below this fraction of the largest, per element, are compared with that instead, since
some parameters, such as the bias of attention keys, only move by rounding; so are those below this
fraction of a tensor's own values, of which float32 does not have a ten-thousandth."""

_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
# With a usual `eps` its first steps are the signs of gradients, also of those of rounding.
_ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
SETTINGS = {
    "SGD": Setting("SGD", _SGD),
    "AdamW": Setting("AdamW", _ADAMW),
    "AdamW, cosine, clipped": Setting("AdamW", _ADAMW, clip_norm=0.5, cosine=(1, 8)),
    "SGD, accumulated": Setting("SGD", _SGD, accumulate=2),
}
"""By name."""
_ROWS = (1, 12, 300, 8_000, 200_000, 5_000_000)
SCALED = [
    (10.0**exponent, [_ROWS[(number + device) % len(_ROWS)] for device in range(len(DEVICES))])
    for number, exponent in enumerate((-6, -5, -4, -3, -2, 0, 1, 2, 4, 6))
]
"""Jobs whose updates have other ranges: their scale, and the rows of the devices."""
Side = Literal["ranks", "devices", "device processes"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is trained."""

    model: str
    layout: Mapping[str, Any]
    """Keys of [datacenter] without `ranks` and `batch_size`, or of [federated]."""
    setting: str = "SGD"
    """One of SETTINGS."""
    side: Side = "ranks"
    """What trains: ranks of a datacenter; four devices that connect to a server in one process; or
    those of `isthmus.run`."""

    def replicas(self, ranks: int) -> int:
        """The number of replicas on so many ranks."""
        axes = ("tensor", "context", "pipeline")
        degrees = (self.layout.get(f"{axis}_parallel", 1) for axis in axes)
        for degree in degrees:
            ranks //= degree
        return ranks

    def job(self, ranks: int) -> Job:
        """The job that trains it."""
        setting = SETTINGS[self.setting]
        given: dict[str, Any] = {"clip_norm": setting.clip_norm, "accumulate": setting.accumulate}
        tables: dict[str, Any] = {
            "name": "parity",
            "seed": SEED,
            "task": {
                "source": "tasks.py:Small",
                "settings": {
                    "model": self.model,
                    "optimizer": setting.optimizer,
                    "options": dict(setting.options),
                },
            },
        }
        if setting.cosine is not None:
            warmup, total = setting.cosine
            tables["learning_rate"] = {
                "schedule": "cosine",
                "warmup_steps": warmup,
                "total_steps": total,
                "federated_round_steps": STEPS // 2,
            }
        if self.side == "ranks":
            size = BATCH // self.replicas(ranks)
            layout = {"zero_stage": 0, **self.layout}
            tables["datacenter"] = {**given, "ranks": ranks, "batch_size": size, **layout}
            return Job.model_validate(tables)
        devices = len(DEVICES)
        tables["rounds"] = 2
        tables["strategy"] = {"policy": "federated"}
        tables["federated"] = {
            **given,
            "clients": devices,
            "cohort": devices,
            "quorum": devices,
            "local_steps": STEPS // 2,
            "batch_size": BATCH // 2,
            **self.layout,
        }
        return Job.model_validate(tables)


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
    """Train the cells one after the other.

    Args:
        ranks: what trains those of ranks; the first of them runs the devices of the others.
        cells: what to train.
        directory: for models and state.
        device: of the ranks.
    """
    directory.mkdir(exist_ok=True)
    for number, cell in enumerate(cells):
        train = _train_ranks if cell.side == "ranks" else _train_devices
        try:
            yield train(ranks, cell, directory / f"{ranks.count}-{number}", device)
        except RuntimeError as error:  # with the traceback of a rank
            yield Result(cell, fault=str(error).strip().splitlines()[-1])


def secure_error(ranks: Ranks, scale: float, rows: Sequence[int], directory: Path) -> float:
    """The error of a secure round of `Scaled`, relative to the length of the mean update.

    Raises:
        RuntimeError: the round was not made.
    """
    tables = Cell("", {"secure_aggregation": True}, side="devices").job(1).model_dump()
    settings = {"scale": scale, "rows": list(rows)}
    tables["task"] = {"source": "tasks.py:Scaled", "settings": settings}
    job = Job.model_validate({**tables, "rounds": 1})
    source = HERE / "trained_devices.py"
    refusal, *_ = ranks.run(source, "train", job.model_dump_json(), str(directory))
    if refusal:
        raise RuntimeError(refusal)
    plain = plain_training.average(job, SETTINGS["SGD"])
    return _error_of_all(plain, _tensors(isthmus.load_model(directory)))


def _train_ranks(ranks: Ranks, cell: Cell, file: Path, device: str) -> Result:
    job = cell.job(ranks.count)
    plain = _plain(job.model_dump_json(), cell.setting, cell.replicas(ranks.count))
    header = plain.layout.header
    file.write_bytes(header + bytes(4 * plain.layout.size))
    command = {
        "op": "open",
        "run_id": "run",
        "job": job.model_dump_json(),
        "base": str(HERE),
        "layout": header.decode("latin-1"),
    }
    refusals = ranks.run(HERE / "trained_ranks.py", "train", command, STEPS, str(file), device)
    refusal = next((each for each in refusals if each), "")
    if refusal:
        return Result(cell, refusal=refusal)
    moved = plain.layout.decode(bytearray(file.read_bytes()))
    return Result(cell, *_largest_error(plain, dict(plain.layout.parts(moved))))


def _train_devices(ranks: Ranks, cell: Cell, directory: Path, device: str) -> Result:
    job = cell.job(ranks.count)
    function = "train" if cell.side == "devices" else "run"
    source = HERE / "trained_devices.py"
    refusal, *_ = ranks.run(source, function, job.model_dump_json(), str(directory))
    if refusal:
        return Result(cell, refusal=refusal)
    plain = plain_training.average(job, SETTINGS[cell.setting])
    model = isthmus.load_model(directory)
    tensors = _tensors(model)
    if not job.federated.secure_aggregation:
        return Result(cell, *_largest_error(plain, tensors))
    # The elements of a secure sum are rounded to the same absolute precision.
    return Result(cell, _error_of_all(plain, tensors), "all")


def _tensors(model: nn.Module) -> State:
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {name: each.detach() for name, each in named.items()}


def _error_of_all(plain: Trained, trained: State) -> float:
    """The length of the error of all tensors together, relative to that of their movement."""
    moved = [plain.end[name] - plain.start[name] for name in plain.end]
    wrong = [plain.end[name] - trained[name] for name in plain.end]
    return _norm(wrong) / _norm(moved)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in tensors]).double().norm())


@functools.lru_cache(maxsize=4)
def _plain(job: str, setting: str, replicas: int) -> Trained:
    return plain_training.train(Job.model_validate_json(job), SETTINGS[setting], replicas, STEPS)


def _largest_error(plain: Trained, trained: State) -> tuple[float, str]:
    """The largest error of the movement of a tensor, and the tensor."""
    moved = {name: plain.end[name] - plain.start[name] for name in plain.start}
    parameters = [each for name, each in moved.items() if name not in plain.layout.statistics]
    typical = max(_root_mean_square(each) for each in parameters)
    worst = (0.0, "")
    for name, movement in moved.items():
        error = _root_mean_square(trained[name] - plain.end[name])
        if not math.isfinite(error):
            return float("inf"), name
        own = _root_mean_square(plain.end[name])
        scale = max(_root_mean_square(movement), _FLOOR * typical, _FLOOR * own)
        worst = max(worst, (error / scale, name))
    return worst


def _root_mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())
