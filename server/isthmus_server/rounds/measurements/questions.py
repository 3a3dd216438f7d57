"""One attempt at a question to devices: an evaluation, statistics, or a comparison of models.

Whatever is asked takes the same way: whether the devices' budgets allow it, who is asked, the
charge before anybody is asked, a secure sum (by group) or answers in plaintext, and the noise of
`[privacy]`. A `Question` says what differs. What the devices are sent for it is an `Offer`, and the
link counts what they fetch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from isthmus.job.federated import FederatedSection
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.slots import PRIVATE_SLOTS, SCORING_SLOTS
from isthmus_server.budgets.budget import Measurement
from isthmus_server.budgets.server_noise import is_too_long
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt, SecureSum
from isthmus_server.regimes.secure_sums.groups import GroupedAttempt, UnmaskingGate
from isthmus_server.regimes.secure_sums.round_configs import margins
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort
from isthmus_server.rounds.measurements.noisy_sum import NoisySum
from isthmus_server.rounds.measurements.plaintext import PlaintextAnswers
from isthmus_server.rounds.measurements.quorum import check_budgets_left, check_quorum
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.gradients import REST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What devices are asked in one attempt, and how their answers are summed."""

    kind: Measurement
    """What it is charged as."""
    number: int
    """Number of the question in the run; all attempts at it have the same."""
    attempt: int
    settings: FederatedSection
    """Settings with the cohort and the quorum of the question."""
    select: Callable[[], SelectedCohort]
    """The devices; raises `NoAllowedCohort` if too few may take part."""
    request: Callable[[bytes, str], link_pb2.Request]
    """The first request, for the configuration of a secure sum and the group that it is of; both
    are empty for an answer in plaintext."""
    outcome: Literal["counted", "scored"]
    """Name of the outcome of a reply in plaintext, a field of `link_pb2.Reply`."""
    read: Callable[[link_pb2.Reply], torch.Tensor]
    """The vector (size) in a reply in plaintext; raises `UpdateError` if it is not usable."""
    verb: str
    """What devices do, for messages: "evaluate the model"."""
    run_id: str
    """Names the secure sums of all questions of this kind."""
    about: bytes
    """What sums are about, of which each device is in those with one survivor set only."""
    purpose: Callable[[str], bytes]
    """Hash of what the devices of a group do, see `isthmus_privacy.purpose`."""
    size: int
    """Elements of a device's vector."""
    whole: bool
    """The elements are whole numbers: their sum is wanted, and not their mean."""
    norm: float
    """Bound on the 2-norm of a vector, for the noise of a job with `[privacy]`."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """The sum of the devices' vectors, and the receipts of all invited devices."""

    total: torch.Tensor
    """The sum of whole numbers, int64 (size); else the mean, float32 (size)."""
    devices: int
    """Number of devices in the sum."""
    receipts: Sequence[Receipt]
    groups: Mapping[str, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    """Sum and devices of each group that was summed by itself."""
    by_device: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The vector of each device, where answers are in plaintext."""
    deviation: float = 0.0
    """Standard deviation of the noise of an element of the mean."""


class DeviceQuestions:
    """Asks the devices of one run."""

    def __init__(self, context: FederatedContext, cohorts: CohortSelector) -> None:
        """Prepare.

        Args:
            context: of the run's federated rounds.
            cohorts: knows whose budgets are used up, and notes who was asked.
        """
        self._context = context
        self._cohorts = cohorts

    async def ask(self, question: Question) -> Answers:
        """Ask a cohort; every attempt at a question selects the same devices if it can.

        Raises:
            RoundFailed: too few devices.
        """
        settings = question.settings
        if self._context.privacy is not None:
            # Earlier attempts at the question were charged, too.
            await self._context.privacy.account(self._context.link.peers)
        what = "a comparison" if question.kind == "comparison" else "an evaluation"
        check_budgets_left(settings, self._cohorts, what)
        cohort = question.select()
        check_quorum(cohort, settings, what)
        self._cohorts.note_asked(cohort.examples, cohort.draw)
        charged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        noisy = None
        if (privacy := self._context.privacy) is not None:
            noisy = NoisySum(privacy, question.kind, question.norm)
            # Before a device is asked, as rounds are: after a crash no charge is missing.
            charged = noisy.charged(question.number, question.attempt, cohort.examples)
        with charged:
            if not settings.secure_aggregation:
                return await self._plaintext(question, cohort, noisy)
            if cohort.groups:
                return await self._by_group(question, cohort)
            return await self._securely(question, cohort, noisy)

    def repeats(self, round_: int) -> Callable[[], bool]:
        """Tells whether a question may be asked again that is asked from now on, and fails.

        `round_` is the one whose model it is about: later evaluations need their measurements.
        """
        privacy = self._context.privacy
        if privacy is None:
            return lambda: True
        before = privacy.measured
        return lambda: privacy.may_repeat_measurement(round_, before)

    def note_refused(self, run_id: str, number: int, attempt: int) -> None:
        """Note that the sum of an attempt cannot be used, so that others are asked if they can be.

        The same devices would give it again, and one that lies would end all attempts.
        """
        self._context.unmaskings.note_refused_sum(run_id, number, attempt)

    async def _securely(
        self, question: Question, cohort: SelectedCohort, noisy: NoisySum | None
    ) -> Answers:
        config = self._config(question, cohort, question.settings, "")
        config = config if noisy is None else noisy.config(config)
        attempt = self._sum(question, cohort, list(cohort.examples), config, "")
        try:
            result = await attempt.run()
        except AttemptFailed:
            if attempt.has_sum:
                self.note_refused(question.run_id, question.number, question.attempt)
            raise
        devices = int(result.training["examples"])  # every usable vector has a weight of 1
        total = result.pseudo_gradient
        deviation = 0.0
        if noisy is not None:
            deviation = noisy.release(total, devices, attempt.config)
            # With the devices' noise the sum was compared when it was decoded.
            by_server = attempt.config.noise is None
            if by_server and is_too_long(total, question.norm, deviation):
                raise AttemptFailed(
                    f"the mean of what {devices} devices measured is longer than honest devices "
                    "and noise can make it: one sent a vector that does not have the agreed form",
                    result.receipts,
                )
        return Answers(total, devices, result.receipts, deviation=deviation)

    async def _by_group(self, question: Question, cohort: SelectedCohort) -> Answers:
        sums = {}
        needed = question.settings.needed
        for group, names in cohort.groups.items():
            part = question.settings.for_group(len(names), exact=cohort.exact)
            assert part is not None  # others are not summed by themselves
            declared = "" if group == REST else group
            config = self._config(question, cohort, part, declared)
            sums[group] = self._sum(question, cohort, names, config, declared)
        # All groups are unmasked or none. If some were, and were too few, their devices could take
        # part in no other sum of this model but exactly the same one.
        gate = UnmaskingGate(self._context.unmaskings, len(sums), needed)
        attempt = GroupedAttempt(sums, {}, gate, needed)
        try:
            results, receipts = await attempt.results()
        except AttemptFailed:
            if attempt.has_sum:
                self.note_refused(question.run_id, question.number, question.attempt)
            raise
        groups = {
            group: (result.pseudo_gradient, int(result.training["examples"]))
            for group, result in results.items()
        }
        total = torch.stack([counts for counts, _ in groups.values()]).sum(0)
        devices = sum(number for _, number in groups.values())
        groups.pop(REST, None)
        return Answers(total, devices, receipts, groups)

    def _config(
        self, question: Question, cohort: SelectedCohort, settings: FederatedSection, group: str
    ) -> RoundConfig:
        """The configuration of a secure sum of the vectors of a group."""
        return RoundConfig(
            run_id=question.run_id,
            round=question.number,
            attempt=question.attempt,
            model_hash=question.about,
            purpose=question.purpose(group),
            size=question.size,
            slots=SCORING_SLOTS if self._context.privacy is None else PRIVATE_SLOTS,
            **margins(self._context, settings),
            whole=question.whole,
            bits=64 if question.whole else 32,
            clip=1.0,
            draw=cohort.draw,
            selected_ppm=cohort.selected_ppm,
        )

    def _sum(
        self,
        question: Question,
        cohort: SelectedCohort,
        names: Sequence[str],
        config: RoundConfig,
        group: str,
    ) -> SecureAggregationAttempt:
        def first_request(encoded: bytes) -> link_pb2.Request:
            return question.request(encoded, group)

        wanted = SecureSum(
            config=config,
            cohort=names,
            first_request=first_request,
            exact=cohort.exact,
            question=question.verb,
        )
        return secure_attempt(self._context, wanted)

    async def _plaintext(
        self, question: Question, cohort: SelectedCohort, noisy: NoisySum | None
    ) -> Answers:
        answers = PlaintextAnswers(
            self._context,
            lambda: question.request(b"", ""),
            question.read,
            outcome=question.outcome,
            verb=question.verb,
        )
        needed = question.settings.needed
        vectors, receipts = await answers.of(list(cohort.examples), needed=needed)
        stacked = torch.stack(list(vectors.values()))
        total = stacked.sum(0) if question.whole else stacked.mean(0)
        deviation = 0.0 if noisy is None else noisy.release(total, len(vectors))
        return Answers(total, len(vectors), receipts, deviation=deviation, by_device=vectors)
