"""One attempt at a sum of what devices count: by secure aggregation, by group, or in plaintext."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from isthmus.errors import UpdateError
from isthmus.job.federated import FederatedSection
from isthmus.job.measurements import evaluations_run_id
from isthmus.task.measurements.bounded_means import measured_norm, numbers_of
from isthmus.task.measurements.metrics import LARGEST
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import EvaluationPurpose, evaluated_model, statistics_of
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.slots import SCORING_SLOTS
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt
from isthmus_server.regimes.secure_sums.groups import GroupedAttempt, UnmaskingGate
from isthmus_server.regimes.secure_sums.round_configs import margins
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort
from isthmus_server.rounds.measurements.noisy_sum import NoisySum
from isthmus_server.rounds.measurements.plaintext import PlaintextAnswers
from isthmus_server.rounds.measurements.quorum import check_budgets_left, check_quorum
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.gradients import REST

_WHAT = "an evaluation"


@dataclasses.dataclass(frozen=True)
class DeviceSums:
    """Sums of the devices' counts, int64 (size) each, and the receipts of all devices."""

    total: torch.Tensor
    """With noise the mean of the devices' numbers, float32 (size)."""
    devices: int
    receipts: Sequence[Receipt]
    groups: Mapping[str, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    deviation: float = 0.0
    """Standard deviation of the noise of an element of the mean."""


class DeviceSummation:
    """Sums what devices count, for one run."""

    def __init__(
        self,
        context: FederatedContext,
        cohorts: CohortSelector,
        busy: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare.

        Args:
            context: of the run's federated rounds.
            cohorts: selects the devices.
            busy: devices that train across rounds, which are not asked.
        """
        self._context = context
        self._job = context.job
        self._cohorts = cohorts
        self._busy = busy

    async def attempt(
        self, size: int, round_: int, attempt: int, blob: link_pb2.Blob
    ) -> DeviceSums:
        """Have a cohort evaluate the model; every attempt selects the same devices if it can.

        Raises:
            RoundFailed: too few devices.
        """
        settings = self._settings
        name = self._name_of(blob)
        check_budgets_left(settings, self._cohorts, _WHAT)
        cohort = self._cohorts.select_for_evaluation(round_, settings, name, self._busy())
        check_quorum(cohort, settings, _WHAT)
        self._cohorts.note_asked(cohort.examples, cohort.draw)
        work = link_pb2.Evaluate(
            run_id=self._context.run_id, round=round_, attempt=attempt, model=blob
        )
        charged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        noisy = self._noisy(size)
        if noisy is not None:
            charged = noisy.charged(round_, attempt, cohort.examples)
        with charged:
            if not settings.secure_aggregation:
                return await self._plaintext(work, cohort, settings, size, noisy)
            if cohort.groups:
                return await self._by_group(work, cohort, settings, size)
            config = self._config(work, cohort, settings, size, "")
            config = config if noisy is None else noisy.config(config)
            secure = self._secure(work, cohort, list(cohort.examples), config, "")
            result = await secure.run()
            devices = int(result.training["examples"])  # every usable vector has a weight of 1
            total = result.pseudo_gradient
            deviation = 0.0
            if noisy is not None:
                deviation = noisy.release(total, devices, config)
            return DeviceSums(total, devices, result.receipts, deviation=deviation)

    def _noisy(self, size: int) -> NoisySum | None:
        """The charge and the noise of an evaluation, in a job with `[privacy]`."""
        privacy = self._context.privacy
        return None if privacy is None else NoisySum(privacy, "evaluation", measured_norm(size))

    @property
    def _settings(self) -> FederatedSection:
        job = self._job
        measured = job.statistics if job.statistics.collect else job.evaluation
        return measured.on_devices(job.federated)

    def _name_of(self, blob: link_pb2.Blob) -> bytes:
        """What sums are about, of which each device is in those with one survivor set only."""
        if self._job.statistics.collect:
            return statistics_of(self._context.purpose.task)
        return evaluated_model(blob.sha256)

    async def _by_group(
        self, work: link_pb2.Evaluate, cohort: SelectedCohort, settings: FederatedSection, size: int
    ) -> DeviceSums:
        sums = {}
        for group, names in cohort.groups.items():
            part = settings.for_group(len(names), exact=cohort.exact)
            assert part is not None  # others are not summed by themselves
            declared = "" if group == REST else group
            config = self._config(work, cohort, part, size, declared)
            sums[group] = self._secure(work, cohort, names, config, declared)
        # All groups are unmasked or none. If some were, and were too few, their devices could take
        # part in no other sum of this model but exactly the same one.
        gate = UnmaskingGate(self._context.unmaskings, len(sums), settings.needed)
        results, receipts = await GroupedAttempt(sums, {}, gate, settings.needed).results()
        groups = {
            group: (result.pseudo_gradient, int(result.training["examples"]))
            for group, result in results.items()
        }
        total = torch.stack([counts for counts, _ in groups.values()]).sum(0)
        devices = sum(number for _, number in groups.values())
        groups.pop(REST, None)
        return DeviceSums(total, devices, receipts, groups)

    def _config(
        self,
        work: link_pb2.Evaluate,
        cohort: SelectedCohort,
        settings: FederatedSection,
        size: int,
        group: str,
    ) -> RoundConfig:
        """The configuration of a secure sum of the counts of these devices."""
        # Counts are whole numbers, which are added as they are; with noise devices send means.
        whole = self._context.privacy is None
        return RoundConfig(
            run_id=evaluations_run_id(self._context.run_id),
            round=work.round,
            attempt=work.attempt,
            model_hash=self._name_of(work.model),
            purpose=EvaluationPurpose(self._context.purpose, group).hash,
            size=size,
            slots=SCORING_SLOTS,
            **margins(self._context, settings),
            whole=whole,
            bits=64 if whole else 32,
            draw=cohort.draw,
            selected_ppm=cohort.selected_ppm,
        )

    def _secure(
        self,
        work: link_pb2.Evaluate,
        cohort: SelectedCohort,
        names: Sequence[str],
        config: RoundConfig,
        group: str,
    ) -> SecureAggregationAttempt:
        def first_request(encoded: bytes) -> link_pb2.Request:
            request = link_pb2.Request(evaluate=work)
            request.evaluate.secure = encoded
            request.evaluate.group = group
            return request

        return secure_attempt(
            self._context, config, work.model, names, first_request, exact=cohort.exact
        )

    async def _plaintext(
        self,
        work: link_pb2.Evaluate,
        cohort: SelectedCohort,
        settings: FederatedSection,
        size: int,
        noisy: NoisySum | None,
    ) -> DeviceSums:
        def read(reply: link_pb2.Reply) -> torch.Tensor:
            counts = list(reply.counted.counts)
            if len(counts) != size:
                raise UpdateError(f"it sent {len(counts)} counts where the task has {size}")
            if not all(abs(count) <= LARGEST for count in counts):
                raise UpdateError(f"one of its counts is above {LARGEST}")
            return torch.tensor(counts, dtype=torch.int64)

        answers = PlaintextAnswers(
            self._context,
            lambda: link_pb2.Request(evaluate=work),
            read,
            outcome="counted",
            verb="evaluate the model",
        )
        names = list(cohort.examples)
        counts, receipts = await answers.of(
            names, needed=settings.needed, sent_bytes=work.model.size
        )
        if noisy is None:
            return DeviceSums(torch.stack(counts).sum(0), len(counts), receipts)
        mean = torch.stack([numbers_of(each) for each in counts]).mean(0)
        deviation = noisy.release(mean, len(counts))
        return DeviceSums(mean, len(counts), receipts, deviation=deviation)
