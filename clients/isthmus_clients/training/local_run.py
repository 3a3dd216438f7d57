"""Training on a device: from the model of a round to a pseudo-gradient.

Shape legend: N = float32 elements of the exchange set.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import JobError, TaskError, TaskInterrupted, UserError
from isthmus.job import Job, read_job
from isthmus.job.federated import FederatedSection
from isthmus.job.learning_rate import RoundPosition
from isthmus.job.model import TOKENIZER
from isthmus.start.manifest import StartPlace
from isthmus.task import Participant, Task, load_task, user_code
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus.task.optimizers import ScheduleState, TaskOptimizers
from isthmus.task.own_numbers import own_numbers
from isthmus.task.scoring import Averages, build_same_model, build_small_model
from isthmus.task.scoring.frozen_form import FrozenForm, LossDifference
from isthmus.task.scoring.recomputation import recompute_blocks
from isthmus.tensors.division import Division
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.fingerprint import explain_change, fingerprint
from isthmus.tensors.finite import is_finite
from isthmus.tensors.structure import Structure
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import fingerprint_of, position_of
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.training.accelerator import Arithmetic
from isthmus_clients.training.control_variates import ControlVariate, check_sent
from isthmus_clients.training.example_order import local_seed, number
from isthmus_clients.training.initial_buffers import InitialBuffers
from isthmus_clients.training.local_data import LocalData, locate
from isthmus_clients.training.low_rank import Factors, LowRank
from isthmus_clients.training.model_scores import Candidates, score_each
from isthmus_clients.training.personal_state import check_agreed, is_initial
from isthmus_clients.training.steps.device_model import DeviceModel
from isthmus_clients.training.steps.gradient_terms import GradientTerms
from isthmus_clients.training.steps.made_optimizer import make_optimizer, round_optimizers
from isthmus_clients.training.steps.private_steps import PrivateSteps, check_measured
from isthmus_clients.training.steps.step_gradient import StepGradient
from isthmus_clients.training.steps.step_loop import take_steps
from isthmus_clients.training.update import normalize, scale_gradient
from isthmus_clients.training.withholding import may_be_of_server, without_text_of_task

CPU = torch.device("cpu")
log = logging.getLogger(__name__)


def pieces(layout: TensorLayout, payload: Buffer) -> list[memoryview]:
    """Split a blob into its encoded vectors."""
    view = memoryview(payload)
    return [view[start : start + layout.nbytes] for start in range(0, len(view), layout.nbytes)]


def _build(
    task: Task, job: Job, work: link_pb2.OpenRun, base: Path, place: StartPlace | None
) -> tuple[nn.Module, Division, FrozenForm | None]:
    """The model of a run on this device, and the form of its frozen parameters, if it has one."""
    expected = (task, job, work.layout, fingerprint_of(work.frozen), "this device")
    if job.federated.frozen_dtype != "float32":
        return build_small_model(*expected, base=base, place=place)
    return (*build_same_model(*expected, base=base, on_device=True, place=place), None)


def _check_wanted(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise TaskInterrupted(TaskInterrupted.GIVEN_UP)


class DeviceRun:
    """One run on one device: task, model and data, which are kept between rounds.

    Guarantees:
      * every training and every scoring begins with the received model and with the buffers of
        the model as it was built, whatever was requested before.
    """

    def __init__(
        self,
        work: link_pb2.OpenRun,
        participant: Participant,
        data: Path | None,
        tasks: Path | None = None,
        device: str = "cpu",
        *,
        start: StartPlace | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Load the task, build the model and open the data.

        If a directory `tasks` is given, only tasks in it are loaded, and the job's data path is
        ignored. `device` is the owner's choice, see `accelerator.Accelerators.choose`. The files
        that the model starts from are at `start`, or where the job says. `secret` is for the random
        numbers of the data, see `isthmus.task.own_numbers`.

        Raises:
            UserError: there is no such device.
            TaskError: the task cannot be used here, its model is not the server's, or there is
                no data.
        """
        self.job = read_job(work.job)
        self.participant = participant
        self._secret = secret
        source = self.job.task.source
        base, data = locate(source, self.job, Path(work.base), data, tasks)
        if tasks is not None and (start is None or TOKENIZER in self.job.task.settings):
            self.job.model.check_inside()
        self.task = load_task(source, self.job.task.settings, base=base, data=data)
        self.model, division, form = _build(self.task, self.job, work, base, start)
        self._form = form
        """Form of frozen parameters in a smaller type, until their effect has been measured."""
        self.difference: LossDifference | None = None
        """What that type changes in the loss of this device's first batch, once it is known."""
        self.layout = division.exchanged
        self.personal = division.personal
        check_agreed(self.personal, work.personal)
        # Now, while nothing has been trained: later the memory of the model has the last round's
        # values.
        self._initial = self.personal.gather(self.model)
        """What is personal, before any training."""
        recomputed = self.job.federated.checkpoint_activations
        if recomputed:
            recompute_blocks(self.task, self.model, keep_products=recomputed == "operators")
        self._arithmetic = Arithmetic(device, self.job.federated)
        self._trained = self._arithmetic.placed(self.model)
        """The model, or what was compiled of it."""
        self._buffers = InitialBuffers(self.model)
        # After the comparison with the server's model: from here on a change is the training's.
        self._frozen = fingerprint(self.model)
        self._structure = Structure.of(self.model)
        self._low_rank = LowRank(self.task, self.job.exchange.low_rank, division, participant)
        self._validation: Dataset[Any] | None = None
        """Loaded when the model is evaluated for the first time."""
        self._schedules: dict[str, ScheduleState] = {}
        """State of the last round's schedules, from which the next one's continue."""
        parts = self.job.federated.accumulate > 1
        self._gradient = StepGradient(self.task, self._trained, self._arithmetic, accumulates=parts)
        self._withheld = self.job.federated.secure_aggregation and tasks is not None
        """Whether the server is on another machine, and is not to know what fails on this one."""
        self._half = self.layout.explain_half_precision(self.model) if self._withheld else None
        """Why the updates of this model are in no sum of an owner's device."""
        # Also where updates are sent by themselves: no text of an example is to leave an owner's
        # device. One that the server has started is told.
        protects = self.job.federated.privacy is not None and tasks is not None
        with without_text_of_task(protects):
            self._open_data(checked=False)
        if not self.job.statistics.collect:
            # The first optimizer would import the compiler, in a round that others wait for.
            importlib.import_module("torch._dynamo")

    def _open_data(self, *, checked: bool) -> None:
        device = self._arithmetic.device
        with self._own_numbers():
            self.data = LocalData(
                self.task, self.participant, self.job, device, withheld=self._withheld
            )
        self.dataset = self.data.dataset
        self.examples = self.data.examples
        self._says_lone_row = True
        """Whether the log does not have yet that a row is left out, see `_settle_lone_row`."""
        self._private: PrivateSteps | None = None
        """In place of the data's batches and their gradients, with `[federated.privacy]`."""
        self._unfit: JobError | None = None
        """Why nothing can be trained here: the job cannot protect so many examples."""
        if self.job.federated.privacy is not None:
            try:
                self._private = PrivateSteps(
                    self.task,
                    self.model,
                    self.data,
                    self.job,
                    device,
                    checked=checked,
                    withheld=self._withheld,
                )
            except JobError as error:
                if not self._withheld:
                    raise
                self._unfit = error

    def for_device(self, participant: Participant) -> DeviceRun:
        """A copy of the run for another device that is simulated in this process.

        All share the memory of one model, so that only one of them can train at a time.

        Raises:
            TaskError: the device has no data.
        """
        # Shallow: a thousand simulated devices have one model, and each its data, schedules and
        # rank.
        other = copy.copy(self)
        other.participant = participant
        other._schedules = {}
        other._validation = None
        other._open_data(checked=True)  # the same task and model
        other._low_rank = self._low_rank.for_device(participant)
        return other

    @property
    def private_steps(self) -> PrivateSteps | None:
        """The steps of a job that protects examples, if this device has enough of them."""
        return self._private

    @property
    def kept(self) -> TensorLayout:
        """Layout of what stays on the device between rounds; empty for nothing."""
        controlled = self.job.federated.control_variates is not None
        return self.layout if controlled else self.personal

    def _own_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Within it the task's code draws the same random numbers each time on this device.

        So it splits its data in the same way when the run is opened again, and a model that draws
        in evaluation measures the same.
        """
        return own_numbers(self.job.seed, self.participant.name, self._secret)

    def seed_of(self, round_: int) -> bytes:
        """Seed of this device in a round; equal in all attempts, so that they are repeatable."""
        return local_seed(self.job.seed, round_, self.participant.name)

    def train(
        self,
        work: link_pb2.TrainLocal,
        payload: Buffer,
        progress: ReportProgress,
        stopped: Callable[[], bool],
        gradient: Buffer | None = None,
        result: Buffer | None = None,
        personal: Buffer | None = None,
    ) -> link_pb2.Trained:
        """Train from the encoded model in `payload` and replace it by the update.

        An encoded `gradient` is added to the gradient of every step (one-way transfer of Mixed FL,
        Augenstein et al. 2022).

        If `work` has a factor for it, the mean gradient at the received model is computed first,
        over the examples of the first pass, and written with the update to `result`, as
        `TensorLayout.gradient_and_update`. The model may be in the last bytes of `result`.

        An encoded state `personal` of this device is loaded too, and replaced by the one that
        training ends with; zeros stand for the initial values.

        With control variates `gradient` is the server's, `personal` is the device's, and its change
        is written in place of the mean gradient.

        The update is the pseudo-gradient, start minus end (Reddi et al. 2021). It depends only
        on the job's seed, the round, the device's name and its data. The figures lack `result`,
        the digest of an update that is sent in plaintext.

        With secure aggregation all steps are made even if a loss is not finite, so that the time
        until the reply does not tell.

        Raises:
            TaskError: the task's code raised, its loss, update or gradient is not finite, or
                `stopped` returned True.
            JobError: the job's privacy does not fit the number of examples.
        """
        if self._half is not None:
            raise TaskError(self._half)
        if self._unfit is not None:
            raise self._unfit
        started = time.monotonic()
        self.data.warn_of_growth()
        start = self.layout.decode(payload)
        self._load(start, personal)
        too_different = self._measure_form(work.round, start, personal)
        self._settle_lone_row(work.round, start, personal, self.job.federated)
        term = None if gradient is None else self.layout.decode(gradient)
        control = None
        if self.job.federated.control_variates is not None:
            check_sent(work)
            assert term is not None
            assert personal is not None
            control = ControlVariate(self.layout, term, personal)
            term = control.correction
        added = {} if term is None else dict(self._on_device(term))
        gradient_is_finite = True
        measured = None
        if work.gradient_scale:
            assert result is not None
            measured, update = self._halves(result)
            # The model may already be where the update goes, so that no second vector is needed.
            if update.data_ptr() != start.data_ptr():
                start = update.copy_(start)
        if measured is not None and control is None:
            # Before the training: it is the gradient at the received model. The model is loaded
            # again after it, since the pass changes buffers such as running statistics.
            self._write_gradient(work.round, measured, stopped)
            self._load(start, personal)
            # Noted here, and raised only after the training: the time until the reply must not
            # tell.
            gradient_is_finite = is_finite(measured)
            scale_gradient(measured, work.gradient_scale)
        position = position_of(work.position)
        steps, averages = self._steps(
            work.round, position, start, added, progress, stopped, self.job.federated, control
        )
        # Before the vector is read from it: a missing tensor could not be, and another one in its
        # place was not trained.
        self._structure.check(self.model)
        self._subtract_end(start)
        normalize(start, self.layout, self.job.federated, steps)
        if control is not None:
            assert measured is not None
            control.advance(start, steps, measured)
            personal_is_finite = is_finite(measured)
        else:
            personal_is_finite = self._keep(personal)
        if too_different is not None:
            raise too_different
        if not gradient_is_finite:
            raise TaskError(
                f"the gradient of {self.participant.name} at the round's model is not finite; "
                "lower the learning rates or check the data"
            )
        # After the end was subtracted: the frozen parameters are not in the update, and a change of
        # them would go unnoticed.
        if change := explain_change(self.model, self._frozen):
            raise TaskError(change)
        if steps and not (personal_is_finite and is_finite(start)):
            raise TaskError(
                f"the update of {self.participant.name} is not finite after {steps} steps; "
                "lower the learning rate or check the data"
            )
        return link_pb2.Trained(
            examples=self.job.federated.weight(self.examples),
            steps=steps,
            seconds=time.monotonic() - started,
            training=averages.result(),
        )

    def _measure_form(
        self, round_: int, start: torch.Tensor, personal: Buffer | None
    ) -> UserError | None:
        """Compare the loss of the first batch of training with that in float32, once for a run.

        It is of the loaded model, which is loaded again afterwards: a pass may change buffers.

        Returns:
            Why the result may not be used, if that is only said when there is one: the time until
            the reply to a secure sum must not tell. None where the server is on another machine:
            whether a device gave zeros would follow from the model that it was asked about first,
            and from a tolerance that the server chooses.

        Raises:
            TaskError: nothing may be computed, or the model cannot be in this form.
        """
        form = self._form
        if form is None:
            return None
        found = None
        try:
            found = self._difference_of(form, round_)
            if found is None:  # no steps
                return None
            self.difference = found
            found.check(self.job.federated.frozen_tolerance)
        except (TaskError, JobError) as error:
            if self._withheld:
                log.warning("%s; this device takes part nevertheless", error)
            elif found is not None and self.job.federated.secure_aggregation:
                return error
            else:
                raise
        finally:
            self._load(start, personal)
        self._form = None
        return None

    def _difference_of(self, form: FrozenForm, round_: int) -> LossDifference | None:
        """What the type of frozen parameters changes in the loss of a round's first batch.

        None without one.

        Raises:
            TaskError: the loss cannot be computed.
            JobError: the files of the model cannot be read, or have changed.
        """
        seed = self.seed_of(round_)
        parts = next(iter(self.data.first_pass(seed, round_)), None)
        if parts is None:
            return None
        part = next(iter(parts))

        def loss() -> torch.Tensor:
            self._arithmetic.seed(number(seed))  # for a model that draws in evaluation, too
            return self._gradient.loss_of(self.model, part)

        with torch.random.fork_rng(devices=[]):
            found = form.difference(self.model, loss)
        log.info(
            "the frozen parameters are in %s: the loss of the first batch is %.6g, and %.6g in "
            "float32, a difference of %.3f %%",
            self.job.federated.frozen_dtype,
            found.small,
            found.full,
            100 * found.share,
        )
        return found

    def _settle_lone_row(
        self,
        round_: int,
        start: torch.Tensor,
        personal: Buffer | None,
        settings: FederatedSection,
    ) -> None:
        """Leave out the last row of each epoch if it is a batch that the model cannot train.

        BatchNorm cannot, and `drop_last` of PyTorch's loaders does the same. Only with secure
        aggregation: a failure would be zeros in the sum there, and the size of batches, which the
        job chooses, would decide which devices give them. In other runs the server is told why the
        training fails.

        Tried in each round with its model, so that a repeated round gives the same update after a
        restart; the loaded model is loaded again afterwards.
        """
        if not self.job.federated.secure_aggregation or self._private is not None:
            return
        self.data.order.leave_out_last(False)
        if not self.data.has_lone_row(settings):
            return
        try:
            problem = self._problem_of_lone_row(round_)
        finally:
            self._load(start, personal)
        if not problem:
            return
        self.data.order.leave_out_last(True)
        if self._says_lone_row:
            self._says_lone_row = False
            log.warning(
                "the last row of each epoch is left out: it is a batch by itself, and the model "
                "cannot be trained on one row: %s",
                problem,
            )

    def _problem_of_lone_row(self, round_: int) -> str:
        """Why the loaded model cannot be trained on a batch of one row; empty if it can be.

        Each optimizer of the task has its gradient computed, as in a step: without gradients a loss
        that differentiates by its inputs fails, and one that is finite may have a gradient that is
        not, as by the square root of a variance of 0.

        Raises:
            TaskError: it failed for what the server may have caused.
        """
        seed = self.seed_of(round_)
        self.model.train()
        try:
            with torch.random.fork_rng(devices=[]):
                factors = Factors(self.model, self.model.state_dict().items(), self._low_rank, seed)
                made = make_optimizer(self.task, self.participant, round_, factors.trained)
                optimizers = TaskOptimizers(made, factors.trained.values())
                self._arithmetic.seed(number(seed))
                for name in optimizers.named:
                    self.model.zero_grad(set_to_none=True)
                    with optimizers.alone(name), factors.alone():
                        loss = self._gradient.add_alone(self.data.single_row(), name)
                    if not math.isfinite(loss):
                        return "its loss is not finite"
                    if not self._has_usable_gradients():
                        return "its gradient is not finite"
        except TaskError as error:
            if may_be_of_server(error):
                raise
            return str(error) or "it failed"
        finally:
            self.model.zero_grad(set_to_none=True)
        return ""

    def _has_usable_gradients(self) -> bool:
        """Whether a step would apply the gradients that the parameters have."""
        if self.job.federated.precision == "fp16":  # a step whose gradients overflow is left out
            return True
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        return all(bool(each.isfinite().all()) for each in gradients)

    def _load(self, vector: torch.Tensor, personal: Buffer | None) -> None:
        """Load the exchange set (N) and a personal state, and the buffers as they were built."""
        self._buffers.restore()
        self.layout.scatter(vector, self.model)
        # A control variate is no part of the model.
        if personal is None or self.kept is not self.personal or is_initial(personal):
            self.personal.scatter(self._initial, self.model)
        else:
            self.personal.scatter(self.personal.decode(personal), self.model)

    def _keep(self, personal: Buffer | None) -> bool:
        """Replace a personal state by the model's; returns whether that is finite."""
        if personal is None:
            return True
        view = memoryview(personal)
        view[: len(self.personal.header)] = self.personal.header
        kept = self.personal.gather(self.model, self.personal.decode(view))
        return is_finite(kept)

    def _halves(self, result: Buffer) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient (N) and the update (N) in the memory of a result."""
        layout = self.layout.gradient_and_update
        memoryview(result)[: len(layout.header)] = layout.header
        vector = layout.decode(result)
        return vector[: self.layout.size], vector[self.layout.size :]

    def _write_gradient(self, round_: int, out: torch.Tensor, stopped: Callable[[], bool]) -> None:
        """Write the mean gradient at the model, over the round's first pass, to `out` (N).

        The random state of the training that follows does not depend on it.
        """
        check_measured(self.job, "a mean gradient")
        seed = self.seed_of(round_)
        total = self.data.first_pass_examples
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[]):
            # They are not trained; optimizer() expects the names that it gets in training.
            factors = Factors(self.model, self.model.state_dict().items(), self._low_rank, seed)
            made = make_optimizer(self.task, self.participant, round_, factors.trained)
            optimizers = TaskOptimizers(made, factors.trained.values())
            self._arithmetic.seed(number(seed))
            for step in self.data.first_pass(seed, round_):
                for piece in step:
                    _check_wanted(stopped)
                    for name in optimizers.named:
                        with optimizers.alone(name), factors.alone():
                            self._gradient.add_share(piece, piece.examples / total, name)
        self._structure.check(self.model)
        gradients = {name: each.grad for name, each in self.model.named_parameters()}
        for name, part in self.layout.parts(out):
            gradient = gradients.get(name)
            part.zero_() if gradient is None else part.copy_(gradient)
        self.model.zero_grad(set_to_none=True)

    def _steps(
        self,
        round_: int,
        position: RoundPosition,
        start: torch.Tensor,
        added: dict[str, torch.Tensor],
        progress: ReportProgress,
        stopped: Callable[[], bool],
        settings: FederatedSection,
        control: ControlVariate | None = None,
    ) -> tuple[int, Averages]:
        """Take the steps of some settings, from the loaded model."""
        diverged: TaskError | None = None
        seed = self.seed_of(round_)

        def check() -> None:
            _check_wanted(stopped)

        def watch(step: int, loss: float) -> None:
            nonlocal diverged
            if math.isfinite(loss):
                return
            diverged = diverged or TaskError(
                f"the loss of {self.participant.name} is {loss} at step {step}; {self.data.advice}"
            )
            if not settings.secure_aggregation:
                raise diverged

        def report(steps: int, loss: float) -> None:
            if self._private is None:
                progress(link_pb2.Progress(steps=steps, loss=loss))

        with torch.random.fork_rng(devices=[]):
            self._arithmetic.seed(number(seed))
            factors = Factors(self.model, self.layout.parts(start), self._low_rank, seed)
            made = make_optimizer(self.task, self.participant, round_, factors.trained)
            optimizers = round_optimizers(
                self.job, made, factors.trained, position, self._schedules, check
            )
            self._schedules = optimizers.schedules
            if self._private is not None:
                self._private.check_trained(optimizers.named.values())
            if control is not None:
                control.use(optimizers, factors.trained)
            self.model.train()
            self._arithmetic.begin()
            terms = GradientTerms(
                proximal=settings.proximal,
                # The start itself is not changed before `_subtract_end`, so these need no copies.
                anchors=dict(self._on_device(start)) if settings.proximal else {},
                added=added,
                personal_steps=settings.personal_steps,
                personal=self.personal.names,
            )
            stepped = DeviceModel(
                self.model,
                self._private or self._gradient,
                self._arithmetic,
                optimizers,
                factors,
                watch,
                report,
            )
            source = self._private or self.data
            batches = source.steps(seed, round_, settings)
            count = self.data.step_count(settings)
            steps = take_steps(stepped, optimizers, batches, terms, position, count, check)
        if diverged is not None:
            raise diverged
        return steps, stepped.averages

    def score(
        self, payload: Buffer, candidates: Candidates, personal: Buffer | None = None
    ) -> list[float]:
        """Score candidates, means of the encoded models in `payload`, on this device's data."""
        check_measured(self.job, "scores of models")
        size = self.job.evaluation.batch_size
        models = pieces(self.layout, payload)
        first = self.layout.decode(models[0])
        self._load(first, personal)
        too_different = self._measure_form(0, first, personal)
        with self._own_numbers():
            scores = score_each(
                self.task, self.model, self.layout, self.dataset, size, models, candidates
            )
        self._structure.check(self.model)
        if too_different is not None:
            raise too_different
        return scores

    def evaluate(
        self, round_: int, payload: Buffer, personal: Buffer | None = None
    ) -> link_pb2.Counted:
        """Count how the encoded model in `payload` does on this device's validation data.

        After the job's `fine_tune_steps`; or count the data, in a job that collects statistics.
        With the figures that are this device's own, which are for its owner.

        Raises:
            TaskError: the task's code raised, or this device has no validation data.
        """
        check_measured(self.job, "counts of an evaluation")
        if self.job.statistics.collect:
            with self._own_numbers():
                return link_pb2.Counted(counts=self.data.statistics(self.participant))
        if self._validation is None:
            with self._own_numbers(), user_code("validation_data()"):
                self._validation = self.task.validation_data(self.participant)
        if self._validation is None:
            raise TaskError(f"validation_data() of {self.participant.name} returned None")
        start = self.layout.decode(payload)
        self._load(start, personal)
        too_different = self._measure_form(round_, start, personal)
        self._fine_tune(round_, start, personal)
        vector = evaluation_vector(self.job, self.task)
        with self._own_numbers():
            counts = vector.measure(self.model, self._validation, self.job.evaluation.batch_size)
        self._structure.check(self.model)
        if too_different is not None:
            raise too_different
        return link_pb2.Counted(counts=counts.tolist(), own_figures=vector.own_figures(counts))

    def _fine_tune(self, round_: int, start: torch.Tensor, personal: Buffer | None) -> None:
        """Train the loaded model for a few steps, with the rates of a schedule's first step."""
        settings = self.job.federated.fine_tuning
        schedules = self._schedules
        if settings is None:
            return
        self._settle_lone_row(round_, start, personal, settings)
        # A fine-tuning is no part of the run: its schedule begins anew, and the run's goes on
        # afterwards.
        self._schedules = {}
        first = RoundPosition(0, 1, settings.cohort)
        try:
            self._steps(round_, first, start, {}, lambda _: None, lambda: False, settings)
            self._structure.check(self.model)
        finally:
            self._schedules = schedules

    def _subtract_end(self, start: torch.Tensor) -> None:
        """Replace `start` (N) by start minus end, in place."""
        for tensor, part in self.layout.pairs(self.model, start):
            part.sub_(tensor.to(part.device))
        # They are computed on a datacenter's data, so those of a device need not leave it.
        if self.job.exchange.buffers == "recompute":
            start[self.layout.trained_size :].zero_()

    def _on_device(self, vector: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's name and its part of a vector (N), where the model is."""
        for name, part in self.layout.parts(vector):
            yield name, part.to(self._arithmetic.device)
