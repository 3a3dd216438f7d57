"""A datacenter of one rank inside this process, for simulations.

It trains on the same examples in the same steps as a `training.engine.Engine` on one rank, without
process groups, checkpoints or other processes. It keeps the state before its last command.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from isthmus.errors import AdmissionRefused, TaskError, UpdateError
from isthmus.job import read_job
from isthmus.task import Participant, load_task, user_code
from isthmus.task.definition import Parameters, defines
from isthmus.task.held_out import HeldOut
from isthmus.task.made_optimizers import SEVERAL, made_by
from isthmus.task.optimizers import ScheduleState, TaskOptimizers, job_schedule
from isthmus.task.scoring import (
    batches,
    build_same_model,
    count_examples,
    evaluate,
    losses,
)
from isthmus.task.scoring.units import UNUSABLE_WEIGHTS
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.requests import fingerprint_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.rng import derived_seed

CPU = torch.device("cpu")


class VirtualDatacenter:
    """The `isthmus.transport.worker.Worker` of a simulated datacenter."""

    def __init__(
        self, name: str = "datacenter-0", data: Path | None = None, step_seconds: float = 0.0
    ) -> None:
        """`data` replaces the job's; `step_seconds` is the virtual time of a step, in seconds."""
        self.name = name
        self.data = data
        self.step_seconds = step_seconds
        self._run: VirtualRun | None = None

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer | None:
        """Memory for the model of a request; None for a task package, which is not needed here."""
        return None if request.HasField("open") else bytearray(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Open or close a run, train, compute a mean gradient, or export the model."""
        kind = request.WhichOneof("work")
        if kind == "open":
            self._run = VirtualRun(request.open, self.name, self.data)
            return link_pb2.Reply(opened=link_pb2.Opened(examples=self._run.examples)), None
        if kind == "train_steps":
            run = self._open_run(request.train_steps.run_id)
            trained, payload = run.train(request.train_steps, model, self.step_seconds)
            return link_pb2.Reply(trained=trained), payload
        if kind == "mean_gradient":
            assert model is not None
            run = self._open_run(request.mean_gradient.run_id)
            if request.mean_gradient.statistics:
                raise AdmissionRefused(
                    "a virtual datacenter does not recompute running statistics; use "
                    "exchange.buffers = 'average'"
                )
            trained, payload = run.mean_gradient(request.mean_gradient, model, self.step_seconds)
            return link_pb2.Reply(trained=trained), payload
        if kind == "export":
            run = self._open_run(request.export.run_id)
            run.go_to(request.export.step)
            payload = run.encoded()
            exported = link_pb2.Exported(model=describe(payload))
            return link_pb2.Reply(exported=exported), payload
        if kind == "close":
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        raise AdmissionRefused(f"a virtual datacenter does not support {kind!r}")

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        """Do nothing: no files are kept for a request."""

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        """Do nothing: a running request is completed."""

    def _open_run(self, run_id: str) -> VirtualRun:
        if self._run is None or self._run.run_id != run_id:
            raise UpdateError(f"the run {run_id!r} is not open in this datacenter")
        return self._run


class VirtualRun:
    """The open run: model, optimizer and data, at an absolute step."""

    def __init__(self, open_: link_pb2.OpenRun, name: str, data: Path | None) -> None:
        self.run_id = open_.run_id
        self.job = read_job(open_.job)
        section = self.job.datacenter.for_replicas(1)
        self.job = self.job.model_copy(update={"datacenter": section})
        base = Path(open_.base)
        if data is None:
            data = self.job.task.data_in(base)
        self.task = load_task(self.job.task.source, self.job.task.settings, base=base, data=data)
        self.model, division = build_same_model(
            self.task,
            self.job,
            open_.layout,
            fingerprint_of(open_.frozen),
            "the virtual datacenter",
        )
        division.check_datacenter()
        self.layout = division.exchanged
        if defines(self.task, "training_step"):
            raise TaskError(
                "a simulated datacenter trains with loss(), and this task has training_step(); use "
                "a real one"
            )
        if self.job.datacenter.privacy is not None:
            raise TaskError(
                "a simulated datacenter adds no noise, and the job has datacenter.privacy; use a "
                "real one, or remove it"
            )
        if self.job.datacenter.compression is not None:
            raise TaskError(
                "a simulated datacenter sends whole models, and the job has "
                "datacenter.compression; use real ones, or remove it"
            )
        self.model.train()
        self.participant = Participant(name=name, regime="datacenter")
        with user_code("local_data()"):
            self.dataset = self.task.local_data(self.participant)
        self.examples = count_examples(self.dataset, "local_data()")
        self.held_out = HeldOut(self.task)
        self.order = ExampleOrder.of(self.task, self.dataset, self.examples, 1, self.job)
        self._schedules: Mapping[str, ScheduleState] = {}
        self.round = 0
        self.optimizers = self._make_optimizers()
        self.step = 0
        self._before = self._snapshot()

    def train(
        self, command: link_pb2.TrainSteps, model: Buffer | None, step_seconds: float
    ) -> tuple[link_pb2.Trained, Buffer | None]:
        """Train from one absolute step to another.

        Raises:
            UpdateError: the state of the step to start from is not kept.
            TaskError: the task's code raised, or the loss is not finite.
        """
        self.round = command.round
        reset = self.job.datacenter.optimizer_on_load == "reset"
        if model is None:
            self.go_to(command.from_step)
        elif not reset and command.from_step == self._before[0]:
            self.go_to(command.from_step)  # after an absence the current optimizer state is kept
        self._before = self._snapshot()
        if model is not None:
            self.layout.scatter(self.layout.decode(model), self.model)
            if reset:
                self.optimizers = self._make_optimizers()
        self.optimizers.go_to(command.position)
        self._schedules = self.optimizers.schedules
        rate = self.optimizers.scheduled_rate
        count = command.until_step - command.from_step
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(self.job.seed, command.from_step, 0))
            positions = iter(range(command.position, command.position + count))
            loss = self._steps(
                command.from_step, command.until_step, lambda: self._update(next(positions))
            )
        self.step = command.until_step
        if not math.isfinite(loss):
            raise TaskError(
                f"the loss is {loss} between steps {command.from_step} and {command.until_step}; "
                "lower the learning rate or check the data"
            )
        training = {"loss": loss} if rate is None else {"loss": loss, "learning_rate": rate}
        trained = link_pb2.Trained(
            examples=count * self.order.batch_size,
            steps=count,
            seconds=step_seconds * count,
            training=training if count else {},
            evaluation=self._evaluate() if command.evaluate else {},
        )
        if not command.hand_back:
            return trained, None
        payload = self.encoded()
        trained.result.CopyFrom(describe(payload))
        return trained, payload

    def mean_gradient(
        self, command: link_pb2.MeanGradient, model: Buffer, step_seconds: float
    ) -> tuple[link_pb2.Trained, Buffer]:
        """Compute the mean gradient at `model` over the batches of some steps, without training.

        Raises:
            TaskError: the task's code raised.
        """
        parameters_before = self.layout.gather(self.model)
        self.layout.scatter(self.layout.decode(model), self.model)
        count = command.until_step - command.from_step
        self.model.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(self.job.seed, command.from_step, 0))
            loss = self._steps(command.from_step, command.until_step, lambda: None)
        vector = torch.zeros(self.layout.size)
        gradients = {name: each.grad for name, each in self.model.named_parameters()}
        for name, part in self.layout.parts(vector):
            gradient = gradients.get(name)
            if gradient is not None:
                part.copy_(gradient).div_(max(count, 1))
        self.model.zero_grad(set_to_none=True)
        self.layout.scatter(parameters_before, self.model)
        payload = self.layout.encode(vector)
        return link_pb2.Trained(
            result=describe(payload),
            examples=count * self.order.batch_size,
            steps=count,
            seconds=step_seconds * count,
            training={"loss": loss} if count else {},
        ), payload

    def go_to(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            UpdateError: it is neither the current step nor the one before the last command.
        """
        if step == self.step:
            return
        kept_step, parameters, optimizer = self._before
        if step != kept_step:
            raise UpdateError(f"this virtual datacenter has no state of step {step}")
        self.layout.scatter(parameters, self.model)
        self.optimizers = self._make_optimizers()
        for name, state in optimizer.items():
            self.optimizers.named[name].load_state_dict(state)
        self.optimizers.restored()
        self.step = step

    def encoded(self) -> bytearray:
        """The current model, encoded."""
        return self.layout.encode(self.layout.gather(self.model))

    def _steps(self, first: int, until: int, update: Callable[[], None]) -> float:
        """Add the gradient of each step's batch and call `update`; returns the mean loss."""
        size = self.order.batch_size
        indices = self.order.examples_between(first * size, until * size)
        total = torch.zeros((), dtype=torch.float64)
        units = 0.0
        for inputs, target in batches(self.task, self.dataset, indices, size, CPU):
            _, values = losses(self.task, self.model, inputs, target)
            with user_code("the backward pass"):
                torch.autograd.backward(values.mean())
            update()
            total += values.total64()
            units += float(values.count())
        if not math.isfinite(units):
            raise TaskError(f"loss() returned {UNUSABLE_WEIGHTS}")
        return float(total) / (units or 1)

    def _update(self, position: int) -> None:
        self.optimizers.go_to(position)
        if self.job.datacenter.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.datacenter.clip_norm)
        self.optimizers.step()
        self.optimizers.zero_grad()

    def _evaluate(self) -> dict[str, float]:
        size = self.job.evaluation.batch_size
        return self.held_out.measure(
            lambda data, count: evaluate(
                self.task, self.model, data, range(count), size, CPU
            ).result()
        )

    def _make_optimizers(self) -> TaskOptimizers:
        participant = dataclasses.replace(self.participant, round=self.round)
        made = made_by(self.task, Parameters(self.model.named_parameters()), participant)
        if isinstance(made, Mapping):
            raise TaskError(SEVERAL)
        schedule = job_schedule(self.job, self.job.datacenter.batch_size)
        parameters = self.model.parameters()
        return TaskOptimizers(made, parameters, schedule, self._schedules)

    def _snapshot(self) -> tuple[int, torch.Tensor, dict[str, Any]]:
        tables = {}
        for name, optimizer in self.optimizers.named.items():
            tables[name] = optimizer.state_dict()
            tables[name]["state"] = copy.deepcopy(tables[name]["state"])
        return self.step, self.layout.gather(self.model), tables
