"""A datacenter of one rank inside this process, for simulations.

It trains on the same examples in the same steps as a `training.engine.Engine` on one rank, without
process groups, checkpoints or other processes. It keeps the state before its last command.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from isthmus.errors import AdmissionRefused, TaskError, UpdateError
from isthmus.job import read_job
from isthmus.task import Participant, load_task, user_code
from isthmus.task.definition import defines
from isthmus.task.held_out import HeldOut
from isthmus.task.made_optimizers import made_by
from isthmus.task.optimizers import ScheduleState, job_schedule
from isthmus.task.own_numbers import own_numbers
from isthmus.task.scoring import build_rank_model, count_examples, evaluate, training_batches
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.requests import fingerprint_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.model_shard import ModelShard, ParameterNames
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.mean_gradient import GradientAverager, accumulate
from isthmus_datacenter.training.profile import RoundProfile
from isthmus_datacenter.training.rng import derived_seed
from isthmus_datacenter.training.step_figures import StepRecorder
from isthmus_datacenter.training.step_loop import StartPoint, StepLoop
from isthmus_datacenter.training.whole_batches import check_optimizers

CPU = torch.device("cpu")
_State = tuple[int, torch.Tensor, list[dict[str, Any]], dict[str, dict[str, Any]]]
"""A step, the model (N), the options of the optimizer's groups, and its state by parameter."""


def _no_signal() -> ControlSignal:
    return ControlSignal.CONTINUE


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


class OneRankOptimizer(ShardedOptimizer):
    """The optimizer of a model that is whole."""

    def global_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The 2-norm of the whole gradient, rounded as `torch.nn.utils.clip_grad_norm_` does.

        A sum of squares that ranks can add rounds otherwise.
        """
        return torch.nn.utils.get_total_norm(gradients.values())


class VirtualRun:
    """The open run: model, optimizer and data, at an absolute step.

    Its steps are those of a rank (`training.step_loop`), of a group of one rank, in which nothing
    is reduced.
    """

    def __init__(self, open_: link_pb2.OpenRun, name: str, data: Path | None) -> None:
        self.run_id = open_.run_id
        self.job = read_job(open_.job)
        section = self.job.datacenter.for_replicas(1)
        self.job = self.job.model_copy(update={"datacenter": section})
        base = Path(open_.base)
        if data is None:
            data = self.job.task.data_in(base)
        self.task = load_task(self.job.task.source, self.job.task.settings, base=base, data=data)
        self.model, division = build_rank_model(
            self.task,
            self.job,
            open_.layout,
            fingerprint_of(open_.frozen),
            "the virtual datacenter",
            base=base,
        )
        division.check_datacenter()
        self.layout = division.exchanged
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
        if self.job.datacenter.float8:
            raise TaskError(
                "a simulated datacenter trains on a processor, and the job has datacenter.float8; "
                "use a real one, or remove it"
            )
        precision = self.job.datacenter.precision
        if precision != "fp32":
            raise TaskError(
                "a simulated datacenter trains in float32, and the job has datacenter.precision = "
                f"{precision!r}; use a real one, or simulate with --set datacenter.precision=fp32"
            )
        self.model.train()
        self.participant = Participant(name=name, regime="datacenter")
        with own_numbers(self.job.seed, name), user_code("local_data()"):
            self.dataset = self.task.local_data(self.participant)
        self.examples = count_examples(self.dataset, "local_data()")
        self.held_out = HeldOut(self.task)
        self.order = ExampleOrder.of(self.task, self.dataset, self.examples, 1, self.job)
        names = ParameterNames.of(self.model).in_stage(self.model)
        # A loss or a layer that depends on the batch needs the parts of it that a rank trains in
        # sequence. Others have the same gradients but for rounding, and are faster whole.
        whole = not (defines(self.task, "training_step") or self.layout.statistics)
        accumulate = 1 if whole else section.accumulate
        dims = ParallelDims(ranks=1, zero_stage=0, accumulate=accumulate)
        self.shard = ModelShard(dims, {0: self.model}, {0: names})
        self.forward_backward = ForwardBackward(
            self.task, self.shard, 0, CPU, self.order.batch_size, waits_for_masks=True
        )
        self._schedules: Mapping[str, ScheduleState] = {}
        self.round = 0
        self.optimizer = self._make_optimizer()
        self.step = 0
        self._before = self._snapshot()

    def train(
        self, command: link_pb2.TrainSteps, model: Buffer | None, step_seconds: float
    ) -> tuple[link_pb2.Trained, Buffer | None]:
        """Train from one absolute step to another.

        Raises:
            UpdateError: the state of the step to start from is not kept.
            ConsensusError: the loss or the model is not finite.
            TaskError: the task's code raised, or training changed what is frozen.
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
                self.optimizer = self._make_optimizer()
        self.optimizer.go_to(command.position)
        self._schedules = self.optimizer.schedules
        rate = self.optimizer.scheduled_rate
        first = command.from_step
        until = command.until_step
        count = until - first
        interval = self.job.datacenter.log_steps
        recorder = StepRecorder(interval, CPU, 1) if interval else None
        loop = StepLoop(
            self.forward_backward,
            self.optimizer,
            self.layout.statistics,
            RoundProfile(CPU),
            StartPoint(first),
            recorder,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(self.job.seed, first, 0))
            for _ in loop.take(self._batches(first, until), command.position, _no_signal):
                pass
        self.step = until
        loss = loop.finish(first, until)
        training = {} if loss is None else {**loop.parts.result(), "loss": loss}
        if training and rate is not None:
            training["learning_rate"] = rate
        trained = link_pb2.Trained(
            examples=count * self.order.batch_size,
            steps=count,
            seconds=step_seconds * count,
            training=training,
            evaluation=self._evaluate() if command.evaluate else {},
            step_figures=[
                link_pb2.StepFigures(**dataclasses.asdict(each))
                for each in (recorder.finish() if recorder else ())
            ],
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
            ConsensusError: the loss is not finite.
            TaskError: the task's code raised.
        """
        parameters_before = self.layout.gather(self.model)
        self.layout.scatter(self.layout.decode(model), self.model)
        count = command.until_step - command.from_step
        averager = GradientAverager(self.shard, fp16=False)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derived_seed(self.job.seed, command.from_step, 0))
                batches = self._batches(command.from_step, command.until_step)
                loss = accumulate(
                    averager,
                    self.forward_backward,
                    batches,
                    _no_signal,
                    self.optimizer,  # says whose parameters each loss is for, and does not step
                )
            averager.store_in_parameters()
            vector = self.layout.gather(self.model)
            vector[self.layout.trained_size :].zero_()  # in the place of running statistics
        finally:
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
        kept_step, parameters, options, state = self._before
        if step != kept_step:
            raise UpdateError(f"this virtual datacenter has no state of step {step}")
        self.layout.scatter(parameters, self.model)
        self.optimizer = self._make_optimizer()
        self.optimizer.load_state(options, state, None)
        self.step = step

    def encoded(self) -> bytearray:
        """The current model, encoded."""
        return self.layout.encode(self.layout.gather(self.model))

    def _batches(self, first: int, until: int) -> Iterator[Any]:
        """The batches of steps `first` (included) to `until`."""
        size = self.order.batch_size
        indices = self.order.examples_between(first * size, until * size)
        return training_batches(self.task, self.dataset, indices, size, CPU)

    def _evaluate(self) -> dict[str, float]:
        size = self.job.evaluation.batch_size
        return self.held_out.measure(
            lambda data, count: evaluate(
                self.task, self.model, data, range(count), size, CPU
            ).result()
        )

    def _make_optimizer(self) -> OneRankOptimizer:
        participant = dataclasses.replace(self.participant, round=self.round)
        section = self.job.datacenter
        optimizer = OneRankOptimizer(
            self.shard,
            lambda parameters: made_by(self.task, parameters, participant),
            section.clip_norm,
            fp16=False,
            job_schedule=job_schedule(self.job, section.batch_size),
            earlier=self._schedules,
            rounded_moments=section.optimizer_states == "bf16",
        )
        check_optimizers(self.task, self.shard, optimizer.names)
        return optimizer

    def _snapshot(self) -> _State:
        optimizer = self.optimizer
        state = {name: optimizer.state_of(each) for name, each in optimizer.named_parameters()}
        kept = {name: copy.deepcopy(dict(each)) for name, each in state.items() if each}
        return self.step, self.layout.gather(self.model), optimizer.group_options(), kept
