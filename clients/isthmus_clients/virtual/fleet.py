"""Virtual devices in one process: devices that train concurrently train as one batch.

A virtual device trains as `training.local_run.DeviceRun` does, on the same examples in the same
steps with the task's own optimizer. The models of all devices of a round are stacked, and one pass
of `torch.vmap` computes a step for all of them. A device's update equals that of a real device up
to rounding.

Shape legend: K = devices of the batch, S = steps, B = examples of a step, N = float32 elements of
the exchange set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import AdmissionRefused, TaskError, UpdateError
from isthmus.job import read_job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task, load_task, user_code
from isthmus.task.device_sums.evaluation import EvaluationVector
from isthmus.task.optimizers import ScheduleState
from isthmus.task.scoring import build_same_model, count_examples
from isthmus.task.scoring.order import EpochOrder
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.requests import fingerprint_of, position_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.training.example_order import first_pass, local_seed, step_indices
from isthmus_clients.training.local_run import pieces
from isthmus_clients.training.model_scores import Candidates, score_each
from isthmus_clients.virtual.stacked import (
    Gradients,
    Stacked,
    check_run,
    check_settings,
    clip_each,
    mean_gradients,
    stacked_batches,
    stacked_optimizers,
)
from isthmus_privacy.purpose import check_gradient_scale


class VirtualFleet:
    """Virtual devices of one process, numbered from 0.

    `devices[i]` is an `isthmus.transport.worker.Worker`.

    Guarantees:
      * an update depends only on the job, the round, the device's name and its data, not on the
        devices that train at the same time (up to rounding);
      * memory is O(K x N) for the K devices of one round, for any size of the fleet.
    """

    def __init__(self, count: int, data: Path | None = None, step_seconds: float = 0.0) -> None:
        """`count` devices named `client-<i>`, each with shard `i` of `count` of the data at `data`.

        `step_seconds` is the duration of a step that devices report: virtual time.
        """
        self.count = count
        self.data = data
        self.step_seconds = step_seconds
        self.devices = [VirtualDevice(self, index) for index in range(count)]
        self._run: _VirtualRun | None = None
        self._waiting: dict[tuple[object, ...], list[_DeviceTraining]] = {}
        self._flushes: set[asyncio.Task[None]] = set()

    def run(self, run_id: str) -> _VirtualRun:
        """The run that is open.

        Raises:
            UpdateError: another run is open, or none.
        """
        if self._run is None or self._run.run_id != run_id:
            raise UpdateError(f"the run {run_id!r} is not open on these devices")
        return self._run

    def open(self, work: link_pb2.OpenRun) -> _VirtualRun:
        """Open a run for all devices; the first request of a device opens it."""
        if self._run is None or self._run.run_id != work.run_id:
            self._run = _VirtualRun(work, self.data, self._run)
        return self._run

    async def train(self, training: _DeviceTraining, work: link_pb2.TrainLocal) -> link_pb2.Trained:
        """Train one device in the batch of its round; the update replaces the model."""
        key = (work.run_id, work.round, work.attempt, work.model.sha256)
        batch = self._waiting.setdefault(key, [])
        batch.append(training)
        if len(batch) == 1:
            flush = asyncio.create_task(self._flush(key, work))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return await training.done

    async def _flush(self, key: tuple[object, ...], work: link_pb2.TrainLocal) -> None:
        """Wait until no further device joins the batch, then train all of its devices."""
        batch, count = self._waiting[key], 0
        while count < len(batch):
            count = len(batch)
            await asyncio.sleep(0)
        del self._waiting[key]
        try:
            trained = self.run(work.run_id).train(work, batch, self.step_seconds)
        except Exception as error:  # noqa: BLE001 - reported for each device
            for training in batch:
                if not training.done.done():
                    training.done.set_exception(error)
            return
        for training, result in zip(batch, trained, strict=True):
            if training.done.done():
                continue
            if isinstance(result, TaskError):
                training.done.set_exception(result)
            else:
                training.done.set_result(result)


class VirtualDevice:
    """One device of a fleet (an `isthmus.transport.worker.Worker`)."""

    def __init__(self, fleet: VirtualFleet, index: int) -> None:
        self.fleet = fleet
        self.participant = Participant(
            name=f"client-{index}", regime="federated", shard=(index, fleet.count)
        )

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Allocate memory for a model; a task is loaded from its path, so no package is fetched."""
        return None if request.HasField("open") else bytearray(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, train for one round, or score models."""
        kind = request.WhichOneof("work")
        if kind == "open":
            run = self.fleet.open(request.open)
            examples = count_examples(
                run.dataset(self.participant), f"local_data() of {self.participant.name}"
            )
            return link_pb2.Reply(opened=link_pb2.Opened(examples=examples)), None
        if kind == "train_local":
            if model is None:
                raise UpdateError("the request 'train_local' came without a model")
            _check_plain(request.train_local.secure)
            run = self.fleet.run(request.train_local.run_id)
            check_gradient_scale(request.train_local.gradient_scale, kept=request.train_local.keep)
            start, *rest = pieces(run.layout, model)
            training = _DeviceTraining(self.participant, start, rest[0] if rest else None)
            trained = await self.fleet.train(training, request.train_local)
            return link_pb2.Reply(trained=trained), training.payload
        if kind == "score":
            if model is None:
                raise UpdateError("the request 'score' came without a model")
            _check_plain(request.score.secure)
            run = self.fleet.run(request.score.run_id)
            candidates = [list(mean.of) for mean in request.score.candidates]
            scores = run.score(self.participant, model, candidates)
            return link_pb2.Reply(scored=link_pb2.Scored(scores=scores)), None
        if kind == "evaluate":
            if model is None:
                raise UpdateError("the request 'evaluate' came without a model")
            _check_plain(request.evaluate.secure)
            counts = self.fleet.run(request.evaluate.run_id).evaluate(self.participant, model)
            return link_pb2.Reply(counted=link_pb2.Counted(counts=counts)), None
        if kind == "close":
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise AdmissionRefused(f"a virtual device does not support the request {kind!r}")

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Do nothing: no state is kept after a reply."""

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Do nothing: a batch that has begun is completed."""


@dataclasses.dataclass
class _DeviceTraining:
    """Training of one device in a batch."""

    participant: Participant
    payload: Buffer
    """The encoded model, which is replaced by the update, and the gradient if it is requested."""
    gradient: Buffer | None = None
    """Encoded gradient that is added to the gradient of every step."""
    done: asyncio.Future[link_pb2.Trained] = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def _check_plain(agreement: bytes) -> None:
    """Refuse secure aggregation: devices of one process cannot hide updates from each other."""
    if agreement:
        raise AdmissionRefused(
            "virtual devices send their updates in plain; set "
            "federated.secure_aggregation = false to simulate"
        )


class _VirtualRun:
    """One run on all devices: one task, one model, and the data of each device."""

    def __init__(
        self, work: link_pb2.OpenRun, data: Path | None, previous: _VirtualRun | None = None
    ) -> None:
        """Load the task, or reuse what `previous` has loaded for the same task, seed and path."""
        self.run_id = work.run_id
        self.job = read_job(work.job)
        check_settings(self.job.federated)
        self.source = (self.job.task, self.job.seed, self.job.exchange, work.base, work.layout)
        self.task: Task
        self.model: nn.Module
        self.layout: TensorLayout
        self.gradients: Gradients
        self._datasets: dict[str, Dataset[Any]] = {}
        self._schedules: dict[str, ScheduleState] = {}
        if previous is not None and previous.source == self.source:
            self.task, self.model, self.layout = previous.task, previous.model, previous.layout
            self.gradients, self._datasets = previous.gradients, previous._datasets
            return
        base = Path(work.base)
        if data is None:
            data = self.job.task.data_in(base)
        self.task = load_task(self.job.task.source, self.job.task.settings, base=base, data=data)
        self.model, division = build_same_model(
            self.task, self.job, work.layout, fingerprint_of(work.frozen), "a virtual device"
        )
        check_run(self.task, division)
        self.layout = division.exchanged
        self.gradients = Gradients(self.task, self.model)

    def dataset(self, participant: Participant) -> Dataset[Any]:
        """The data of a device, which is loaded once."""
        if participant.name not in self._datasets:
            with user_code("local_data()"):
                self._datasets[participant.name] = self.task.local_data(participant)
        return self._datasets[participant.name]

    def score(
        self, participant: Participant, payload: Buffer, candidates: Candidates
    ) -> list[float]:
        """Score candidates on a device's data; see `training.model_scores.score_each`."""
        dataset, batch_size = self.dataset(participant), self.job.evaluation.batch_size
        models = pieces(self.layout, payload)
        return score_each(
            self.task, self.model, self.layout, dataset, batch_size, models, candidates
        )

    def evaluate(self, participant: Participant, payload: Buffer) -> list[int]:
        """Count how a model does on a device's validation data; see `EvaluationVector`."""
        with user_code("validation_data()"):
            dataset = self.task.validation_data(participant)
        if dataset is None:
            raise TaskError(f"validation_data() of {participant.name} returned None")
        self.layout.scatter(self.layout.decode(payload), self.model)
        vector = EvaluationVector(self.task)
        return vector.measure(self.model, dataset, self.job.evaluation.batch_size).tolist()

    def train(
        self, work: link_pb2.TrainLocal, batch: Sequence[_DeviceTraining], step_seconds: float
    ) -> list[link_pb2.Trained | TaskError]:
        """Train all devices of a batch from the same model; updates replace their payloads.

        A device whose loss or update is not finite has an error as its result.

        Raises:
            TaskError: the task's code raised.
        """
        start = self.layout.decode(bytearray(batch[0].payload))
        gradient = batch[0].gradient
        added = {} if gradient is None else dict(self.layout.parts(self.layout.decode(gradient)))
        datasets = [self.dataset(training.participant) for training in batch]
        counts = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]  # torch's Dataset promises no len()
        seeds = [
            local_seed(self.job.seed, work.round, training.participant.name) for training in batch
        ]
        size = self.job.federated.batch_size
        orders = [
            EpochOrder(self.task, dataset, count, size)
            for dataset, count in zip(datasets, counts, strict=True)
        ]
        indices = [
            list(step_indices(seed, order, self.job.federated))
            for seed, order in zip(seeds, orders, strict=True)
        ]
        passes = None
        if work.gradient_scale:
            settings = self.job.federated
            passes = [
                len(first_pass(seed, order, settings))
                for seed, order in zip(seeds, orders, strict=True)
            ]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(seeds[0][:8], "little") >> 1)
            ends, mean_losses, means = self._steps(
                start,
                added,
                datasets,
                indices,
                dataclasses.replace(batch[0].participant, round=work.round),
                passes,
                position_of(work.position),
            )
        own = [
            means[name].mul_(work.gradient_scale) for name, _ in self.layout.parts(start) if means
        ]
        parts = [*own, *(part - ends[name] for name, part in self.layout.parts(start))]
        updates = torch.cat([part.reshape(len(batch), -1) for part in parts], dim=1)  # (K, N or 2N)
        layout = self.layout.gradient_and_update if passes else self.layout
        results: list[link_pb2.Trained | TaskError] = []
        for k, training in enumerate(batch):
            if not bool(torch.isfinite(updates[k]).all()) or not math.isfinite(mean_losses[k]):
                results.append(
                    TaskError(
                        f"the update of {training.participant.name} is not finite; lower the "
                        "learning rate or check the data"
                    )
                )
                continue
            if passes:
                training.payload = bytearray(layout.nbytes)
                training.payload[: len(layout.header)] = layout.header
            layout.decode(training.payload).copy_(updates[k])
            results.append(
                link_pb2.Trained(
                    result=describe(training.payload),
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
        added: Stacked,
        datasets: Sequence[Dataset[Any]],
        indices: Sequence[Sequence[list[int]]],
        participant: Participant,
        passes: Sequence[int] | None,
        position: RoundPosition,
    ) -> tuple[Stacked, list[float], Stacked]:
        """Final parameters and mean loss of each device, and with `passes` its mean gradient."""
        k, steps_max = len(datasets), max(len(steps) for steps in indices)
        stacked = {
            name: part.expand(k, *part.shape).clone() for name, part in self.layout.parts(start)
        }
        anchors = {name: part.clone() for name, part in stacked.items()}
        if not steps_max:
            means = {name: torch.zeros_like(part) for name, part in stacked.items()}
            return stacked, [0.0] * k, means if passes else {}
        inputs, targets, present = stacked_batches(
            self.task, datasets, indices, steps_max, self.job.federated.batch_size
        )
        means = {}
        if passes:
            means = mean_gradients(self.gradients, stacked, inputs, targets, present, passes)
        weights = present / present.sum(2, keepdim=True).clamp(min=1.0)
        optimizers = stacked_optimizers(
            (self.task, self.job), stacked, indices, participant, position, self._schedules
        )
        self._schedules = optimizers.schedules
        ends = {name: torch.empty_like(part) for name, part in stacked.items()}
        total = torch.zeros(k, dtype=torch.float64)
        mu = self.job.federated.proximal
        for step in range(steps_max):
            optimizers.go_to(position.of_step(step, steps_max))
            batch = inputs[step], targets[step]
            gradients, examples = self.gradients(stacked, *batch, weights[step])
            total += (examples * present[step]).sum(1)
            for name, gradient in gradients.items():
                if mu:  # FedProx's mu/2 |w - w_round|^2 (Li et al. 2020)
                    gradient.add_(stacked[name].detach() - anchors[name], alpha=mu)
                if name in added:
                    gradient.add_(added[name])
                stacked[name].grad = gradient
            clip_each(stacked, self.job.federated.clip_norm)
            optimizers.step()
            done = [i for i, steps in enumerate(indices) if len(steps) == step + 1]
            if done:
                for name, part in stacked.items():
                    ends[name][done] = part.detach()[done]
        for i, steps in enumerate(indices):
            if not steps:
                for name, part in anchors.items():
                    ends[name][i] = part[i]
        return ends, (total / present.sum((0, 2)).clamp(min=1.0)).tolist(), means
