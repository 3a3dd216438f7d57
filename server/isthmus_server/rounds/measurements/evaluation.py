"""Evaluation of a round's model: centrally, and on the devices' own validation data.

Devices count whole numbers (`isthmus.task.measurements`), which are summed securely where the job's
updates are; with `[privacy]` they send means, and their sum has noise. The server derives metrics
from the sums and stores only these. An evaluation belongs to an attempt at a round and is committed
with it. It is of the served model, so a crash leaves nothing to continue: the next attempt trains
the same model and evaluates it on the same devices, because devices that have unmasked a sum of a
model's counts are in another one only together.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from isthmus.errors import CannotContinue, JobError, RoundFailed, UpdateError
from isthmus.job.measurements import evaluations_run_id
from isthmus.task.measurements.bounded_means import (
    BoundedMeans,
    evaluation_vector,
    measured_norm,
    numbers_of,
)
from isthmus.task.measurements.evaluation import EvaluationVector, check_evaluates_on_devices
from isthmus.task.measurements.metrics import LARGEST
from isthmus.task.measurements.statistics import StatisticsVector
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import EvaluationPurpose, evaluated_model, statistics_of
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.summed_evaluation import TRIES, GroupEvaluation, SummedEvaluation
from isthmus_server.regimes.attempt_result import TrainingResult
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector
from isthmus_server.rounds.measurements.followed_metrics import (
    check_apart,
    check_followed_metrics,
    followed_metrics,
    known_metrics,
)
from isthmus_server.rounds.measurements.questions import Answers, DeviceQuestions, Question
from isthmus_server.rounds.model_publication import ModelPublication, Offer
from isthmus_server.rounds.retries import GivenUp, Retries
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.policy import Policy
from isthmus_server.strategy.round_spec import RoundSpec, evaluates

_Vector = EvaluationVector | StatisticsVector
"""What devices count: metrics of a model, or statistics of their data."""
CLIPPED_SHARE = 0.01
"""Part of the clipped values with which a metric may still decide about a run."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What is known about the model of a round."""

    metrics: Mapping[str, float]
    """Central metrics, and those of devices with the prefix ``devices_``."""
    on_devices: SummedEvaluation | None = None


class _TooClipped(AttemptFailed):
    """A sum of which too many values were clipped for a metric that decides about the run."""


class RoundEvaluator:
    """Evaluates the models of one run."""

    def __init__(
        self,
        model: GlobalModel,
        cohorts: CohortSelector,
        context: FederatedContext,
        clock: Clock,
        publication: ModelPublication,
        busy: Callable[[], Sequence[str]] = list,
    ) -> None:
        """Read the task's declaration of what devices measure.

        Args:
            model: of the run.
            cohorts: selects the devices.
            context: of the run's federated rounds.
            clock: measures durations.
            publication: offers the served model to devices.
            busy: devices that train across rounds, which are not asked.

        Raises:
            JobError: devices are to evaluate a task without `validation_data`.
            TaskError: the task's `device_metrics` cannot be used.
        """
        self._job = context.job
        self._model = model
        self._context = context
        self._cohorts = cohorts
        self._busy = busy
        self._publication = publication
        self._questions = DeviceQuestions(context, cohorts)
        self._clock = clock
        self._vector: EvaluationVector | None = None
        self._followed: dict[str, str] = {}
        """Metrics that decide something, by the keys that name them."""
        self._evaluated = False
        """Whether devices could evaluate a model before."""
        if self._job.evaluation.devices:
            check_evaluates_on_devices(self._job, model.task)
            self._vector = evaluation_vector(self._job, model.task)

    @property
    def known_metrics(self) -> list[str] | None:
        """Names of all metrics that a round can have; None if central data decide."""
        return known_metrics(self._model.task, self._vector)

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy, or a target, that follows a metric which no round will have.

        Raises:
            JobError: with the key to change.
        """
        check_followed_metrics(self._job, self._model.task, policy, self._vector)
        self._followed = followed_metrics(self._job, policy)

    def _check_evaluated(self, metrics: Mapping[str, float]) -> None:
        """Refuse to follow a metric where nothing evaluates, which only the task's data show.

        Raises:
            JobError: no data were found.
        """
        if metrics:
            return
        for key, name in self._followed.items():
            raise JobError(
                f"{key}={name!r} follows a metric, and nothing evaluates the model: eval_data() "
                "returned None"
            )

    def central(self) -> dict[str, float]:
        """Metrics of the served model on the central held-out data; empty without such data."""
        return self._model.evaluate(self._job.evaluation.batch_size)

    async def evaluate(self, spec: RoundSpec, results: TrainingResult) -> Evaluated:
        """Evaluate the served model after a round, if the job evaluates that round."""
        if not evaluates(self._job, spec.round):
            return Evaluated({})
        # The ranks have evaluated their model, which the server may not have.
        if spec.evaluate:
            metrics = results.datacenters[0].evaluation
        else:
            metrics = await asyncio.to_thread(self.central)
        if self._vector is None:
            self._check_evaluated(metrics)
            return Evaluated(metrics)
        check_apart(metrics, self._vector)
        on_devices = await self._on_devices(self._vector, spec)
        return Evaluated({**metrics, **on_devices.metrics}, on_devices)

    async def _on_devices(self, vector: EvaluationVector, spec: RoundSpec) -> SummedEvaluation:
        """Evaluate on devices, in up to `attempts` attempts; a round is not lost if they fail."""
        started = self._clock.now()
        first = spec.attempt * TRIES
        sums, tried, failure = await self._tried(
            vector, spec.round, lambda last, failed: first + failed
        )
        self._check_counted(sums, failure)
        why = str(failure) if isinstance(failure, _TooClipped) else ""
        if sums is not None:
            why = self._too_clipped(vector, sums)
        if why:
            raise CannotContinue(why)
        clipped = {} if sums is None else vector.clipped(sums.total)
        receipts = [receipt for each in tried for receipt in each]
        reached = sum(receipt.started for receipt in receipts)
        return SummedEvaluation(
            asked=len(tried[-1]),
            devices=0 if sums is None else sums.devices,
            sums={} if sums is None else vector.sums(sums.total),
            metrics={} if sums is None else _figures(vector, sums),
            groups={}
            if sums is None
            else {
                name: GroupEvaluation(devices=devices, metrics=vector.figures(total))
                for name, (total, devices) in sums.groups.items()
            },
            by_device={} if sums is None else self._by_device(vector, sums),
            clipped={name: each.sentence for name, each in clipped.items()},
            error=None if failure is None else str(failure),
            price=reached * self._job.prices.client_evaluation,
            device_bytes=sum(receipt.moved.total for receipt in receipts),
            bytes_down=sum(receipt.moved.down for receipt in receipts),
            seconds=self._clock.now() - started,
        )

    def _too_clipped(self, vector: EvaluationVector, sums: Answers) -> str:
        """Why a metric of a sum may not decide about the run; empty if it may.

        The mean of clipped values can be far off without looking so, and here it would choose a
        model or end the run.
        """
        clipped = vector.clipped(sums.total)
        for name in self._followed.values():
            if name in clipped and clipped[name].share > CLIPPED_SHARE:
                return f"{clipped[name].sentence}: this metric decides about the run"
        return ""

    @property
    def _asks_others(self) -> bool:
        """Whether a sum that one device can have spoiled is followed by one of other devices."""
        job = self._job
        may_lie = self._context.certified and job.federated.secure_aggregation
        return may_lie and not job.evaluation.same_devices

    def _by_device(self, vector: EvaluationVector, sums: Answers) -> dict[str, Mapping[str, float]]:
        """The figures of each device, where the job asks for them."""
        if not self._job.evaluation.per_device:
            return {}
        return {name: vector.figures(counts) for name, counts in sums.by_device.items()}

    def _check_counted(self, sums: Answers | None, failure: RoundFailed | None) -> None:
        """End a run of which devices cannot evaluate the first model because of their task.

        Raises:
            CannotContinue: so it is.
        """
        by_task = isinstance(failure, AttemptFailed) and bool(failure.task_failures)
        if sums is None and not self._evaluated and by_task:
            raise CannotContinue(f"devices cannot evaluate the model: {failure}")
        self._evaluated = self._evaluated or sums is not None

    async def statistics(self, vector: StatisticsVector) -> Answers:
        """Sum the counts of the devices' data, in up to `attempts` attempts.

        Attempts are not stored, and have to follow those before an interruption: their numbers are
        times. One at a time when the clock was wrong is refused by the devices, and does not count.

        Args:
            vector: what devices count.

        Raises:
            CannotContinue: too few devices could be summed in any attempt.
        """

        def number(last: int | None, failed: int) -> int:
            now = int(self._clock.utc())
            return now if last is None else max(now, last + 1)

        sums, _, failure = await self._tried(vector, 1, number)
        if sums is None:
            raise CannotContinue(
                f"the devices' data could not be counted: {failure}; a device takes part in "
                "statistics of one version of a task only with one set of devices"
            )
        return sums

    async def _tried(
        self, vector: _Vector, round_: int, number: Callable[[int | None, int], int]
    ) -> tuple[Answers | None, list[Sequence[Receipt]], RoundFailed | None]:
        """The sums, the receipts of each attempt, and the last failure.

        `number` is that of the next attempt, by the last one that a device may have accepted and
        by how many have failed.
        """
        last: int | None = None
        retries = Retries(self._job, self._clock)
        tried: list[Sequence[Receipt]] = []
        failure: RoundFailed | None = None
        trying = 0
        async with self._offered() as offer:

            async def attempt() -> Answers:
                nonlocal trying
                trying = number(last, retries.failed)
                sums = await self._questions.ask(self._question(vector, round_, trying, offer))
                try:
                    self._check_usable(vector, sums)
                except AttemptFailed:
                    run_id = evaluations_run_id(self._context.run_id)
                    self._questions.note_refused(run_id, round_, trying)
                    raise
                return sums

            def note_failure(failed: RoundFailed, _last: bool) -> None:
                nonlocal failure, last
                failure = failed
                tried.append(failed.receipts if isinstance(failed, AttemptFailed) else ())
                if not failed.all_refused([receipt.participant for receipt in tried[-1]]):
                    last = trying

            try:
                sums = await retries.until_done(
                    attempt, note_failure, may_repeat=self._questions.repeats(round_)
                )
            except GivenUp:
                return None, tried, failure
            return sums, [*tried, sums.receipts], failure

    def _offered(self) -> contextlib.AbstractAsyncContextManager[Offer]:
        """What devices need of the model: nothing to count their data."""
        if self._job.statistics.collect:
            return contextlib.nullcontext(Offer(link_pb2.Blob()))
        return self._publication.served()

    def _check_usable(self, vector: _Vector, sums: Answers) -> None:
        """Refuse sums that devices cannot have, and those that would have to end the run.

        Raises:
            _TooClipped: a metric of the sum may not decide about the run, and others can be asked.
            AttemptFailed: so many devices cannot have the sum of a group, or of all; or it is not
                of the same devices as all others.
        """
        self._check_same(vector, sums)
        try:
            self._check(vector, sums.total, sums.devices)
            for total, devices in sums.groups.values():
                self._check(vector, total, devices)
        except ValueError as error:
            reason = f"a sum of the devices' counts is one that they cannot have: {error}"
            raise AttemptFailed(reason, sums.receipts) from None
        if not isinstance(vector, EvaluationVector) or not self._asks_others:
            return
        if why := self._too_clipped(vector, sums):  # one device can say so of all its values
            raise _TooClipped(why, sums.receipts)

    def _check_same(self, vector: _Vector, sums: Answers) -> None:
        """Refuse a sum without the counts of some of the devices that evaluate all models.

        Whose task fails can follow from a setting of the job: with the sum of another job the
        counts of one device would be in the reports.

        Raises:
            AttemptFailed: so it is.
        """
        if not (self._job.evaluation.same_devices and isinstance(vector, EvaluationVector)):
            return
        summed = sum(receipt.status == "accepted" for receipt in sums.receipts)
        if sums.devices < summed:
            raise AttemptFailed(
                f"the task of {summed - sums.devices} of {summed} devices failed, and with "
                "evaluation.same_devices no sum is without their counts; the devices' own logs "
                "say why",
                sums.receipts,
            )

    def _check(self, vector: _Vector, total: torch.Tensor, devices: int) -> None:
        """Refuse a sum of counts that so many devices cannot have; one with noise may be any.

        Raises:
            ValueError: it is such a sum.
        """
        if self._context.privacy is None:
            vector.check(total, devices)

    def _question(self, vector: _Vector, round_: int, attempt: int, offer: Offer) -> Question:
        """An attempt at an evaluation of the offered model, or at statistics without one."""
        job = self._job
        size = vector.size
        context = self._context
        measured = job.statistics if job.statistics.collect else job.evaluation
        settings = measured.on_devices(job.federated)
        # Counts are whole numbers, which are added as they are; with noise devices send means.
        whole = context.privacy is None
        about = evaluated_model(offer.blob.sha256)
        if job.statistics.collect and settings.secure_aggregation:
            about = statistics_of(context.purpose.task)

        def request(secure: bytes, group: str) -> link_pb2.Request:
            work = link_pb2.Evaluate(
                run_id=context.run_id,
                round=round_,
                attempt=attempt,
                model=offer.blob,
                secure=secure,
                group=group,
                changes=offer.changes,
            )
            return link_pb2.Request(evaluate=work)

        def read(reply: link_pb2.Reply) -> torch.Tensor:
            counts = list(reply.counted.counts)
            if not (counts or whole):
                counts = [0] * size  # the middle of the bounds: it could not, which nobody sees
            if len(counts) != size:
                raise UpdateError(f"it sent {len(counts)} counts where the task has {size}")
            if not all(abs(count) <= LARGEST for count in counts):
                raise UpdateError(f"one of its counts is above {LARGEST}")
            numbers = torch.tensor(counts, dtype=torch.int64)
            try:
                self._check(vector, numbers, 1)
            except ValueError as error:
                raise UpdateError(str(error)) from None
            return numbers if whole else numbers_of(numbers)

        return Question(
            kind="evaluation",
            number=round_,
            attempt=attempt,
            settings=settings,
            select=lambda: self._cohorts.select_for_evaluation(
                round_, settings, about, self._busy()
            ),
            request=request,
            outcome="counted",
            read=read,
            verb="evaluate the model",
            run_id=evaluations_run_id(context.run_id),
            about=about,
            purpose=lambda group: EvaluationPurpose(context.purpose, group).hash,
            size=size,
            whole=whole,
            norm=measured_norm(size),
        )


def _figures(vector: EvaluationVector, sums: Answers) -> dict[str, float]:
    if isinstance(vector, BoundedMeans):
        return vector.figures_of_mean(sums.total, sums.deviation)
    return vector.figures(sums.total)
