"""Federated model comparison: devices score several models on their own data, for a policy.

The models travel in one blob, each vector once however many candidates average it. A device
returns the few numbers of `isthmus.task.paired_scores`; they are summed securely where the job's
updates are. Each attempt is logged before devices are asked, and its outcome afterwards: a
comparison that is in the log is not repeated after a crash, and one that a crash interrupted asks
the same devices again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from isthmus.errors import JobError, RoundFailed, UpdateError
from isthmus.job.federated import FederatedSection
from isthmus.task import paired_scores
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import ComparisonPurpose
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.slots import SCORING_SLOTS
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.round_configs import margins
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.held_model import HeldModel
from isthmus_server.rounds.measurements.noisy_sum import NoisySum
from isthmus_server.rounds.measurements.plaintext import PlaintextAnswers
from isthmus_server.rounds.measurements.quorum import check_budgets_left, check_quorum
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.retries import GivenUp, Retries
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_progress import RunProgress
from isthmus_server.storage.events import Event, ModelsCompared
from isthmus_server.storage.records import ComparisonRecord, Receipt
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.policy import Compare, Comparison
from isthmus_server.transport.bundle import published

_WHAT = "a comparison"


@dataclasses.dataclass(frozen=True)
class PairedScores:
    """The mean of the devices' score vectors, and the receipts of all invited devices."""

    mean: Sequence[float]
    devices: int
    """Number of devices in the mean."""
    receipts: Sequence[Receipt]
    deviation: float = 0.0
    """Standard deviation of the noise of an element of the mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Begun:
    """An attempt at a comparison that devices are asked for."""

    state: RunState
    """State of the run before the attempt."""
    number: int
    """Number of the comparison, from 1."""
    attempt: int
    """Number of the attempt at the comparison, from 1."""
    started: float
    """When it began, in seconds of the run's clock."""


class ComparisonRunner:
    """Runs the comparisons of one run, and logs them."""

    def __init__(
        self,
        store: Store,
        context: FederatedContext,
        clock: Clock,
        progress: RunProgress,
        roster: ParticipantRoster,
        cohorts: CohortSelector,
        versions: ModelVersions,
        held: HeldModel,
        publish: Callable[[Event], None],
    ) -> None:
        """Prepare.

        Args:
            store: logs each attempt before devices are asked, and its outcome.
            context: of the run's federated rounds.
            clock: measures durations.
            progress: the state of the run, which each attempt changes.
            roster: the devices that are ready.
            cohorts: selects those that are asked.
            versions: of the model.
            held: the current model, as far as only a datacenter has it.
            publish: receives an event for each attempt.
        """
        self._store = store
        self._job = context.job
        self._context = context
        self._clock = clock
        self._progress = progress
        self._roster = roster
        self._cohorts = cohorts
        self._versions = versions
        self._held = held
        self._publish = publish

    async def answer(self, question: Compare, drain: Drain) -> None:
        """Have devices compare models, in several attempts if it takes them.

        The result is in the run's state, and so in the next observation.

        Args:
            question: which models to compare, on how many devices.
            drain: ends the run between attempts.

        Raises:
            RoundFailed: too few devices answered, in all attempts.
        """
        retries = Retries(self._job, self._clock)
        begun: _Begun | None = None

        async def attempt() -> None:
            nonlocal begun
            with drain.held():
                async with drain.during(self._turn()):
                    # Logged in its turn: an attempt begins when devices can be asked for it.
                    begun = self._begin(question)
                    await self._held.fetch()
                    scores = await self._scores(begun.state, question, begun.number, begun.attempt)
                    result = _comparison(question, scores, self._price(question, scores.receipts))
                    record = self._record(question, begun, scores.receipts, result=result)
                    self._store.end_comparison(record)
            self._note(record)

        def note_failure(failure: RoundFailed, last: bool) -> None:
            assert begun is not None
            receipts = failure.receipts if isinstance(failure, AttemptFailed) else ()
            record = self._record(question, begun, receipts, error=str(failure), ended=last)
            self._store.end_comparison(record)
            self._note(record)

        try:
            await retries.until_done(attempt, note_failure, drain)
        except GivenUp as given_up:
            raise RoundFailed(
                f"devices could not compare the models in {given_up.attempts} tries; the last "
                f"time because: {given_up}"
            ) from None

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until this job may ask devices, and the datacenter that has the model."""
        holder = self._progress.state.holder
        return self._context.link.turn([*self._roster.clients, *filter(None, [holder])])

    def _begin(self, question: Compare) -> _Begun:
        state = self._progress.state
        begun = _Begun(
            state=state,
            number=state.comparisons_ended + 1,
            attempt=state.comparison_attempts + 1,
            started=self._clock.now(),
        )
        self._store.begin_comparison(begun.number, begun.attempt, state.round + 1, question)
        return begun

    def _record(
        self,
        question: Compare,
        begun: _Begun,
        receipts: Sequence[Receipt],
        *,
        result: Comparison | None = None,
        error: str | None = None,
        ended: bool = True,
    ) -> ComparisonRecord:
        """The record of an attempt that has ended, with a `result` or an `error`."""
        # A policy that was not answered is asked again in the state before its question.
        policy_state = begun.state.policy_state if result is None else question.state
        return ComparisonRecord(
            number=begun.number,
            attempt=begun.attempt,
            round=begun.state.round + 1,
            ended=ended,
            reason=question.reason,
            models=question.models,
            result=result,
            error=error,
            price=self._price(question, receipts),
            device_bytes=sum(r.bytes_in + r.bytes_out for r in receipts),
            seconds=self._clock.now() - begun.started,
            receipts=receipts,
            policy_state=dict(policy_state),
        )

    def _note(self, record: ComparisonRecord) -> None:
        self._progress.state = self._progress.state.after_comparison(record)
        self._publish(ModelsCompared(record=record))

    async def _scores(
        self, state: RunState, question: Compare, number: int, attempt: int
    ) -> PairedScores:
        """Have a cohort score the models; every attempt selects the same devices if it can.

        Raises:
            AttemptFailed: too few devices.
        """
        context = self._context
        settings = comparison_settings(question, self._job.federated)
        names = sorted({part for model in question.models for part in model.split("+")})
        candidates = [
            link_pb2.Candidate(of=[names.index(part) for part in model.split("+")])
            for model in question.models
        ]
        vectors = (self._versions.read(name, state.models) for name in names)
        async with published(
            context.link, context.layout, context.spool, vectors, len(names)
        ) as blob:
            work = link_pb2.Score(
                run_id=context.run_id,
                comparison=number,
                attempt=attempt,
                models=blob,
                candidates=candidates,
            )
            check_budgets_left(settings, self._cohorts, _WHAT)
            # Only now: whom a sum may contain depends on the digest of what it is about.
            cohort = self._cohorts.select_for_comparison(number, settings, blob.sha256)
            check_quorum(cohort, settings, _WHAT)
            self._cohorts.note_asked(cohort.examples, cohort.draw)
            charged: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            noisy = None
            if context.privacy is not None:
                norm = paired_scores.centred_norm(len(candidates))
                noisy = NoisySum(context.privacy, "comparison", norm)
                # Charged before a device is asked, as rounds are: after a crash no charge is
                # missing.
                charged = noisy.charged(number, attempt, cohort.examples)
            with charged:
                if settings.secure_aggregation:
                    return await _secure_scores(context, work, cohort, settings, noisy)
                devices = list(cohort.examples)
                return await _plaintext_scores(context, work, devices, settings, noisy)

    def _price(self, question: Compare, receipts: Sequence[Receipt]) -> float:
        reached = sum(receipt.started for receipt in receipts)
        return reached * len(question.models) * self._job.prices.client_evaluation


def comparison_settings(question: Compare, federated: FederatedSection) -> FederatedSection:
    """Cohort and quorum of a comparison; the job's own quorum is for updates.

    Raises:
        AttemptFailed: so few devices cannot compare models, or not securely.
    """
    try:
        settings = federated.model_copy(update={"quorum": None}).for_cohort(question.devices)
    except JobError as error:
        raise AttemptFailed(f"models cannot be compared: {error}", []) from None
    if question.devices < 2:
        raise AttemptFailed("models cannot be compared on one device; ask at least two", [])
    return settings.model_copy(update={"quorum": max(2, settings.needed)})


def _comparison(question: Compare, scores: PairedScores, price: float) -> Comparison:
    """The result of a comparison, as the policy observes it."""
    means, differences, errors = paired_scores.comparison(
        scores.mean, devices=scores.devices, noise=scores.deviation
    )
    return Comparison(
        models=question.models,
        devices=scores.devices,
        score=dict(zip(question.models, means, strict=True)),
        difference=dict(zip(question.models, differences, strict=True)),
        standard_error=dict(zip(question.models, errors, strict=True)),
        price=price,
    )


async def _secure_scores(
    context: FederatedContext,
    work: link_pb2.Score,
    selected: SelectedCohort,
    settings: FederatedSection,
    noisy: NoisySum | None,
) -> PairedScores:
    def first_request(config: bytes) -> link_pb2.Request:
        request = link_pb2.Request(score=work)
        request.score.secure = config
        return request

    candidates = tuple(tuple(mean.of) for mean in work.candidates)
    purpose = ComparisonPurpose(context.purpose, candidates)
    config = RoundConfig(
        run_id=paired_scores.comparisons_run_id(context.run_id),
        round=work.comparison,
        attempt=work.attempt,
        model_hash=work.models.sha256,
        purpose=purpose.hash,
        size=paired_scores.vector_size(len(work.candidates)),
        slots=SCORING_SLOTS,
        **margins(context, settings),
        clip=1.0,
        draw=selected.draw,
        selected_ppm=selected.selected_ppm,
    )
    if noisy is not None:
        config = noisy.config(config)
    attempt = secure_attempt(
        context, config, work.models, selected.examples, first_request, exact=selected.exact
    )
    result = await attempt.run()
    # Every usable vector has a weight of 1.
    devices = int(result.training["examples"])
    return _released(result.pseudo_gradient, devices, result.receipts, noisy, config)


def _released(
    mean: torch.Tensor,
    devices: int,
    receipts: Sequence[Receipt],
    noisy: NoisySum | None,
    config: RoundConfig | None = None,
) -> PairedScores:
    """The mean of score vectors, with noise of centred ones, float (3k - 2)."""
    if noisy is None:
        return PairedScores(mean.tolist(), devices, receipts)
    deviation = noisy.release(mean, devices, config)
    return PairedScores(paired_scores.restored(mean).tolist(), devices, receipts, deviation)


async def _plaintext_scores(
    context: FederatedContext,
    work: link_pb2.Score,
    cohort: Sequence[str],
    settings: FederatedSection,
    noisy: NoisySum | None,
) -> PairedScores:
    """A comparison in which the server sees the scores of each device."""

    def read(reply: link_pb2.Reply) -> torch.Tensor:
        scores = list(reply.scored.scores)
        if len(scores) != len(work.candidates):
            raise UpdateError(f"it scored {len(scores)} models of {len(work.candidates)}")
        if not all(0 <= score <= 1 for score in scores):
            raise UpdateError(f"its scores {scores} are not all from 0 to 1")
        return paired_scores.score_vector(scores)

    answers = PlaintextAnswers(
        context,
        lambda: link_pb2.Request(score=work),
        read,
        outcome="scored",
        verb="score the models",
    )
    vectors, receipts = await answers.of(
        cohort, needed=settings.needed, sent_bytes=work.models.size
    )
    if noisy is not None:
        # Centred vectors are shorter, and the noise is in proportion to the longest.
        vectors = [paired_scores.centred(vector) for vector in vectors]
    return _released(torch.stack(vectors).mean(0), len(vectors), receipts, noisy)
