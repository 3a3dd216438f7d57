"""Train the devices of a round as one batch of stacked models.

A device trains as `training.local_run.DeviceRun` does, on the same examples in the same steps with
the task's own optimizer. One pass of `torch.vmap` computes a step for all models of a stack, so
that a device's update equals that of a real device up to rounding.

Shape legend: K = devices of a stack, S = steps, B = examples of a step, N = float32 elements of the
exchange set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant
from isthmus.task.optimizers import ScheduleState
from isthmus.tensors.finite import is_finite
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import position_of
from isthmus.wire import link_pb2
from isthmus_clients.training.example_order import first_pass, number, step_indices
from isthmus_clients.training.local_run import DeviceRun, pieces
from isthmus_clients.training.steps.gradient_terms import GradientTerms
from isthmus_clients.training.steps.step_loop import take_steps
from isthmus_clients.training.update import normalize, scale_gradient
from isthmus_simulation.devices.stacks.gradients import (
    Gradients,
    Stacked,
    mean_gradients,
    stacked_batches,
)
from isthmus_simulation.devices.stacks.model import StackedModel
from isthmus_simulation.devices.stacks.optimizers import stacked_optimizers
from isthmus_simulation.devices.stacks.requirements import check_run, check_settings
from isthmus_simulation.devices.stacks.sizes import most_devices, places

TrainedOrFailed = link_pb2.Trained | TaskError


@dataclasses.dataclass
class DeviceTraining:
    """Training of one device in a batch."""

    run: DeviceRun
    memory: Buffer
    """Received vectors, as `TaskHost.buffer` lays them out."""
    room: int
    """Bytes in front of them."""
    result: Buffer = dataclasses.field(default_factory=bytearray)
    """The encoded update, or gradient and update."""

    @classmethod
    def of(cls, run: DeviceRun, payload: Buffer) -> DeviceTraining:
        """From a payload in memory of `TaskHost.buffer`."""
        memory = memoryview(memoryview(payload).obj).cast("B")
        return cls(run, memory, len(memory) - len(payload))

    @property
    def vectors(self) -> list[memoryview]:
        """The encoded model, and a gradient that is added to that of every step if there is one."""
        return pieces(self.run.layout, memoryview(self.memory)[self.room :])

    def place(self, size: int) -> memoryview:
        """Where a result of `size` bytes is written, over what was received."""
        return memoryview(self.memory)[:size]

    def copy(self) -> DeviceTraining:
        """A copy of the training in other memory, because training overwrites it."""
        return dataclasses.replace(self, memory=bytearray(self.memory))


class StackedTraining:
    """Trains devices of one run that share a task and a model."""

    def __init__(self, run: DeviceRun) -> None:
        """Use the task and the model of any of the devices.

        Raises:
            JobError: the job has settings that stacked models cannot have.
            TaskError: the task or the model cannot be stacked.
        """
        check_settings(run.job.federated)
        check_run(run)
        self.job = run.job
        self.task = run.task
        self.layout = run.layout
        self.device = next(run.model.parameters()).device
        self.model = run.model
        self._first = run.participant
        self.gradients = Gradients(run.task, run.model)
        self._schedules: dict[str, ScheduleState] = {}

    def forget_schedules(self) -> None:
        """Begin a new run: schedules of the learning rate start anew."""
        self._schedules = {}

    def train(
        self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining]
    ) -> list[TrainedOrFailed]:
        """Train all devices of a batch from the same model; updates replace their payloads.

        Devices with about as many steps are stacked together, so that few steps are padding. A
        device whose loss or update is not finite has an error as its result.

        Raises:
            TaskError: the task's code raised.
        """
        order = sorted(range(len(batch)), key=lambda k: batch[k].run.data.order.length)
        results: list[TrainedOrFailed | None] = [None] * len(batch)
        while order:
            chosen = order[: self._most_devices]
            del order[: len(chosen)]
            trained = self._train_stack(work, [batch[k] for k in chosen])
            for k, result in zip(chosen, trained, strict=True):
                results[k] = result
        return [result for result in results if result is not None]

    @property
    def _most_devices(self) -> int:
        """Most devices of a stack."""
        return most_devices(self.device.type, self.gradients.bytes_per_device)

    def _train_stack(
        self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining]
    ) -> list[TrainedOrFailed]:
        encoded, *gradients = batch[0].vectors
        start = self.layout.decode(bytearray(encoded))
        model = {name: part.to(self.device) for name, part in self.layout.parts(start)}
        added = {}
        if gradients:
            decoded = self.layout.decode(bytearray(gradients[0])).to(self.device)
            added = dict(self.layout.parts(decoded))
        runs = [training.run for training in batch]
        datasets = [run.dataset for run in runs]
        seeds = [run.seed_of(work.round) for run in runs]
        orders = [run.data.order for run in runs]
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
            torch.default_generator.manual_seed(number(seeds[0]))
            if self.device.type == "cuda":
                torch.cuda.manual_seed(number(seeds[0]))
            ends, mean_losses, means = self._steps(
                model,
                added,
                datasets,
                indices,
                [dataclasses.replace(run.participant, round=work.round) for run in runs],
                passes,
                position_of(work.position),
            )
        layout = self.layout.gradient_and_update if passes else self.layout
        size = self.layout.size
        model = dict(self.layout.parts(start))
        ends, means = (
            {name: part.cpu() for name, part in parts.items()} for parts in (ends, means)
        )
        results: list[TrainedOrFailed] = []
        for k, training in enumerate(batch):
            result = training.place(layout.nbytes)
            result[: len(layout.header)] = layout.header
            vector = layout.decode(result)
            for name, part in self.layout.parts(vector[-size:]):
                torch.sub(model[name], ends[name][k], out=part)
            normalize(vector[-size:], self.layout, self.job.federated, len(indices[k]))
            for name, part in self.layout.parts(vector[:size]) if passes else ():
                part.copy_(means[name][k])
            usable = is_finite(vector) and math.isfinite(mean_losses[k])
            if passes:
                scale_gradient(vector[:size], work.gradient_scale)
            if not usable:
                results.append(
                    TaskError(
                        f"the update of {runs[k].participant.name} is not finite; lower the "
                        "learning rate or check the data"
                    )
                )
                continue
            training.result = result
            results.append(
                link_pb2.Trained(
                    examples=runs[k].examples,
                    steps=len(indices[k]),
                    training={"loss": mean_losses[k]} if indices[k] else {},
                )
            )
        return results

    def _load(self, model: Stacked) -> None:
        """Let the task's `optimizer()` and the check of gradients see the round's model."""
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, part in model.items():
                named[name].copy_(part)

    def _steps(
        self,
        model: Stacked,
        added: Stacked,
        datasets: Sequence[Dataset[Any]],
        indices: Sequence[Sequence[list[int]]],
        participants: Sequence[Participant],
        passes: Sequence[int] | None,
        position: RoundPosition,
    ) -> tuple[Stacked, list[float], Stacked]:
        """Final parameters and mean loss of each device, and with `passes` its mean gradient."""
        k = len(datasets)
        steps_max = max(len(steps) for steps in indices)
        if not steps_max:
            ends = {name: part.expand(k, *part.shape) for name, part in model.items()}
            means = {name: torch.zeros_like(part) for name, part in ends.items()}
            return ends, [0.0] * k, means if passes else {}
        count = places(k, self._most_devices)
        empty = count - k
        batches = stacked_batches(
            self.task,
            [*datasets, *[datasets[0]] * empty],
            [*indices, *[[]] * empty],
            steps_max,
            self.job.federated.batch_size,
        )
        inputs, targets, present = (each.to(self.device) for each in batches)
        stacked = {name: part.expand(count, *part.shape).clone() for name, part in model.items()}
        self._load(model)
        optimizers, check_schedules = stacked_optimizers(
            (self.task, self.job, self.model),
            stacked,
            indices,
            participants,
            position,
            self._schedules,
            dataclasses.replace(self._first, round=participants[0].round),
        )
        self._schedules = optimizers.schedules
        weights = present / present.sum(2, keepdim=True).clamp(min=1.0)
        self.gradients.check(participants[0].round, stacked, inputs, targets, weights)
        means = {}
        if passes:
            passes = [*passes, *[0] * empty]
            sums = mean_gradients(self.gradients, stacked, inputs, targets, present, passes)
            means = {name: part[:k] for name, part in sums.items()}
        terms = GradientTerms(proximal=self.job.federated.proximal, anchors=model, added=added)
        clip_norm = self.job.federated.clip_norm
        stack = StackedModel(
            self.gradients,
            model,
            stacked,
            optimizers,
            [len(steps) for steps in indices],
            clip_norm,
            may_descend=not (terms or clip_norm),
        )
        steps = zip(inputs, targets, weights, strict=True)
        take_steps(stack, optimizers, steps, terms, position, steps_max)
        losses = torch.stack(stack.losses)
        total = torch.where(present > 0, losses, 0.0).sum(2).double().sum(0)
        check_schedules()
        mean_losses = total / present.sum((0, 2)).clamp(min=1.0)
        return stack.ends, mean_losses[:k].tolist(), means
