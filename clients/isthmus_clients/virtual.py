"""Many virtual devices in one process: those that train at once train as one batch.

A virtual device does what `training.LocalRun` does - the same examples in the same steps with the
task's own optimizer - but the models of a round's devices are stacked, and one pass of
`torch.vmap` takes a step of all of them. A device's update is the real one's up to rounding.

Shape legend: K = devices of the batch, S = steps, B = examples of a step, N = float32 elements of
the exchange set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import Dataset

from isthmus.contents import Buffer, describe
from isthmus.errors import Refused, TaskError, UpdateError
from isthmus.exchange import Layout
from isthmus.job import Job
from isthmus.scoring import batches, build_model, count_examples, losses
from isthmus.task import Participant, Task, load_task, user_code
from isthmus.uplink import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.training import CPU, local_seed, step_indices

_WHOLE_MATRIX = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam)
"""Optimizers that look beyond the single element, and would see all devices' models as one."""

Stacked = dict[str, torch.Tensor]
"""Parameters by name, each (K, *shape)."""


class VirtualFleet:
    """The devices of one process, numbered from 0; `devices[i]` is an `isthmus.uplink.Worker`.

    Guarantees:
      * an update depends on the job, the round, the device's name and data, not on who else
        trained at the same time (but for rounding);
      * memory of O(K x N) for the devices of one round, whatever the size of the fleet.
    """

    def __init__(self, count: int, data: Path | None = None, step_seconds: float = 0.0) -> None:
        """`count` devices named `client-<i>`, each with shard `i` of `count` of the data at `data`.

        `step_seconds` is what a device says that a step took it: virtual time.
        """
        self.count = count
        self.data = data
        self.step_seconds = step_seconds
        self.devices = [VirtualDevice(self, index) for index in range(count)]
        self._run: _Run | None = None
        self._waiting: dict[tuple[object, ...], list[_Part]] = {}
        self._flushes: set[asyncio.Task[None]] = set()

    def run(self, run_id: str) -> _Run:
        """The run that is open.

        Raises:
            UpdateError: it is another, or none.
        """
        if self._run is None or self._run.run_id != run_id:
            raise UpdateError(f"the run {run_id!r} is not open on these devices")
        return self._run

    def open(self, work: link_pb2.OpenRun) -> _Run:
        """Open a run for all devices, at the first one that asks."""
        if self._run is None or self._run.run_id != work.run_id:
            self._run = _Run(work, self.data, self._run)
        return self._run

    async def train(
        self, participant: Participant, work: link_pb2.TrainLocal, payload: Buffer
    ) -> link_pb2.Trained:
        """One device's part of a round; the update takes the model's place in `payload`."""
        key = (work.run_id, work.round, work.attempt, work.model.sha256)
        done: asyncio.Future[link_pb2.Trained] = asyncio.get_running_loop().create_future()
        parts = self._waiting.setdefault(key, [])
        parts.append(_Part(participant, payload, done))
        if len(parts) == 1:
            flush = asyncio.create_task(self._flush(key, work))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return await done

    async def _flush(self, key: tuple[object, ...], work: link_pb2.TrainLocal) -> None:
        """Wait until nobody else comes, then train everybody."""
        parts, seen = self._waiting[key], 0
        while seen < len(parts):
            seen = len(parts)
            await asyncio.sleep(0)
        del self._waiting[key]
        try:
            trained = self.run(work.run_id).train(work, parts, self.step_seconds)
        except Exception as error:  # noqa: BLE001 - each device says so
            for part in parts:
                if not part.done.done():
                    part.done.set_exception(error)
            return
        for part, result in zip(parts, trained, strict=True):
            if not part.done.done():
                part.done.set_result(result)


class VirtualDevice:
    """One device of a fleet, as the link sees it."""

    def __init__(self, fleet: VirtualFleet, index: int) -> None:
        self.fleet = fleet
        self.participant = Participant(
            name=f"client-{index}", regime="federated", shard=(index, fleet.count)
        )

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        """Memory for an arriving model."""
        return bytearray(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, or train for one round."""
        kind = request.WhichOneof("work")
        if kind == "open":
            run = self.fleet.open(request.open)
            examples = count_examples(
                run.dataset(self.participant), f"local_data() of {self.participant.name}"
            )
            return link_pb2.Reply(opened=link_pb2.Opened(examples=examples)), None
        if kind == "train_local":
            assert model is not None
            if request.train_local.secure:
                raise Refused(
                    "virtual devices send their updates in plain; set "
                    "federated.secure_aggregation = false to simulate"
                )
            trained = await self.fleet.train(self.participant, request.train_local, model)
            return link_pb2.Reply(trained=trained), model
        if kind == "close":
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise Refused(f"a virtual device does not do {kind!r}")

    def settled(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """There is nothing to keep."""

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """A batch that has begun is finished."""


@dataclasses.dataclass
class _Part:
    """One device in a batch."""

    participant: Participant
    payload: Buffer
    done: asyncio.Future[link_pb2.Trained]


class _Run:
    """One run on all devices: one task and one model, and each device's data."""

    def __init__(
        self, work: link_pb2.OpenRun, data: Path | None, before: _Run | None = None
    ) -> None:
        """A run of the task, seed and place of the one `before` goes on with what that has read."""
        self.run_id = work.run_id
        self.job = Job.model_validate_json(work.job)
        self.same = (self.job.task, self.job.seed, work.base, work.layout)
        self.task: Task
        self.model: nn.Module
        self.layout: Layout
        self.gradients: Gradients
        self._datasets: dict[str, Dataset[Any]] = {}
        if before is not None and before.same == self.same:
            self.task, self.model, self.layout = before.task, before.model, before.layout
            self.gradients, self._datasets = before.gradients, before._datasets
            return
        base = Path(work.base)
        if data is None and self.job.task.data:
            data = base / self.job.task.data
        self.task = load_task(self.job.task.source, self.job.task.settings, base=base, data=data)
        self.model = build_model(self.task, self.job.seed)
        self.layout = Layout.of(self.model)
        difference = self.layout.explain_difference(Layout.from_header(work.layout))
        if difference is not None:
            raise TaskError(f"the virtual devices' model is not the server's: {difference}")
        self.gradients = Gradients(self.task, self.model)

    def dataset(self, participant: Participant) -> Dataset[Any]:
        """A device's own data, read once."""
        if participant.name not in self._datasets:
            with user_code("local_data()"):
                self._datasets[participant.name] = self.task.local_data(participant)
        return self._datasets[participant.name]

    def train(
        self, work: link_pb2.TrainLocal, parts: Sequence[_Part], step_seconds: float
    ) -> list[link_pb2.Trained]:
        """All devices of a batch, from the same model; each finds its update in its payload.

        Raises:
            TaskError: the task's code raised, or a loss or update is not finite.
        """
        start = self.layout.decode(bytearray(parts[0].payload))
        datasets = [self.dataset(part.participant) for part in parts]
        counts = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
        seeds = [local_seed(self.job.seed, work.round, part.participant.name) for part in parts]
        indices = [
            list(step_indices(seed, count, self.job.federated))
            for seed, count in zip(seeds, counts, strict=True)
        ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(seeds[0][:8], "little") >> 1)
            ends, mean_losses = self._steps(start, datasets, indices, parts[0].participant)
        updates = torch.cat(
            [
                (part - ends[name]).reshape(len(parts), -1)
                for name, part in self.layout.parts(start)
            ],
            dim=1,
        )  # (K, N)
        results = []
        for k, part in enumerate(parts):
            if not bool(torch.isfinite(updates[k]).all()) or not math.isfinite(mean_losses[k]):
                raise TaskError(
                    f"the update of {part.participant.name} is not finite; lower the learning "
                    "rate or check the data"
                )
            self.layout.decode(part.payload).copy_(updates[k])
            results.append(
                link_pb2.Trained(
                    result=describe(part.payload),
                    examples=counts[k],
                    steps=len(indices[k]),
                    seconds=step_seconds * len(indices[k]),
                    training={"loss": mean_losses[k]} if indices[k] else {},
                )
            )
        return results

    def _steps(
        self,
        start: torch.Tensor,
        datasets: Sequence[Dataset[Any]],
        indices: Sequence[Sequence[list[int]]],
        participant: Participant,
    ) -> tuple[Stacked, list[float]]:
        """Where each device's parameters end, and its mean loss."""
        k, most = len(datasets), max(len(steps) for steps in indices)
        stacked = {
            name: part.expand(k, *part.shape).clone() for name, part in self.layout.parts(start)
        }
        anchors = {name: part.clone() for name, part in stacked.items()}
        if not most:
            return stacked, [0.0] * k
        inputs, targets, present = _stacked_batches(
            datasets, indices, most, self.job.federated.batch_size
        )
        weights = present / present.sum(2, keepdim=True).clamp(min=1.0)
        optimizer = self._optimizer(stacked, participant)
        ends = {name: torch.empty_like(part) for name, part in stacked.items()}
        total = torch.zeros(k, dtype=torch.float64)
        mu = self.job.federated.proximal
        for step in range(most):
            batch = inputs[step], targets[step]
            gradients, examples = self.gradients(stacked, *batch, weights[step])
            total += (examples * present[step]).sum(1)
            for name, gradient in gradients.items():
                if mu:  # FedProx's mu/2 |w - w_round|^2 (Li et al. 2020)
                    gradient.add_(stacked[name].detach() - anchors[name], alpha=mu)
                stacked[name].grad = gradient
            with user_code("the optimizer's step"):
                optimizer.step()
            done = [i for i, steps in enumerate(indices) if len(steps) == step + 1]
            if done:
                for name, part in stacked.items():
                    ends[name][done] = part.detach()[done]
        for i, steps in enumerate(indices):
            if not steps:
                for name, part in anchors.items():
                    ends[name][i] = part[i]
        return ends, (total / present.sum((0, 2)).clamp(min=1.0)).tolist()

    def _optimizer(self, stacked: Stacked, participant: Participant) -> torch.optim.Optimizer:
        """The task's optimizer, over all devices' parameters at once."""
        parameters = [part.requires_grad_() for part in stacked.values()]
        with user_code("optimizer()"):
            optimizer = self.task.optimizer(parameters, participant)  # type: ignore[arg-type]
        name = type(optimizer).__name__
        if isinstance(optimizer, _WHOLE_MATRIX) or name == "Muon":
            raise TaskError(
                f"virtual devices cannot use {name}: it does not treat every element alone; "
                "choose another optimizer, or real devices"
            )
        return optimizer


class Gradients:
    """Gradients of all devices' losses, recorded once as plain operations for each shape."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._scored = _Scored(task, model)
        self._recorded: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(
        self, stacked: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Gradients (K, *shape) of each device's weighted loss, and the loss of each example.

        `inputs` and `target` are (K, B, ...), `weights` (K, B).
        """
        parameters = {f"model.{name}": part.detach() for name, part in stacked.items()}
        key = (inputs.shape, inputs.dtype, target.shape, target.dtype)
        if key not in self._recorded:
            with user_code("the loss of many devices at once (torch.vmap)"):
                record = make_fx(lambda *tensors: self._all(*tensors))  # it counts arguments
                self._recorded[key] = record(parameters, inputs, target, weights)
        with user_code("the loss of many devices at once (torch.vmap)"):
            gradients, examples = self._recorded[key](parameters, inputs, target, weights)
        return {name.removeprefix("model."): part for name, part in gradients.items()}, examples

    def _all(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """The sum over devices has each device's gradient in its own rows."""

        def loss(parameters: Stacked) -> tuple[torch.Tensor, torch.Tensor]:
            examples = torch.vmap(self._one, randomness="different")(parameters, inputs, target)
            return (examples * weights).sum(), examples

        gradients, examples = torch.func.grad(loss, has_aux=True)(parameters)
        # Fused optimizers take it for granted that a gradient lies as its parameter does.
        return {name: part.contiguous() for name, part in gradients.items()}, examples

    def _one(self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = torch.func.functional_call(
            self._scored, parameters, (inputs, target)
        )
        return scored


class _Scored(nn.Module):
    """Task and model as one module: examples in, the mean loss of each one's units (B) out."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model.train()

    def forward(self, inputs: Any, target: Any) -> torch.Tensor:
        _, values = losses(self.task, self.model, inputs, target)
        return values.reshape(len(inputs), -1).mean(1)


def _stacked_batches(
    datasets: Sequence[Dataset[Any]],
    indices: Sequence[Sequence[list[int]]],
    most: int,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets (S, K, B, ...), and which examples are real (S, K, B).

    A device with fewer steps or a short last batch is filled up with its first example.
    """
    inputs, targets = [], []
    present = torch.zeros(most, len(datasets), batch_size)
    for k, (dataset, steps) in enumerate(zip(datasets, indices, strict=True)):
        flat = []
        for s, step in enumerate(steps):
            flat += step + [0] * (batch_size - len(step))
            present[s, k, : len(step)] = 1.0
        flat += [0] * (batch_size * most - len(flat))
        x, y = next(batches(dataset, flat, len(flat), CPU))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            raise TaskError(
                "virtual devices need examples of two tensors (input, target), not "
                f"{type(x).__name__} and {type(y).__name__}"
            )
        inputs.append(x.reshape(most, batch_size, *x.shape[1:]))
        targets.append(y.reshape(most, batch_size, *y.shape[1:]))
    return torch.stack(inputs, 1), torch.stack(targets, 1), present
