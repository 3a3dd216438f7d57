"""Federated model comparison: devices score several models on their own data, for a policy.

The models travel in one blob, each vector once however many candidates average it. A device
returns the few numbers of `isthmus.task.paired_scores`, which are summed by `DeviceQuestions`. Each
attempt is logged before devices are asked, and its outcome afterwards: a comparison that is in the
log is not repeated after a crash, and one that a crash interrupted asks the same devices again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from isthmus.errors import JobError, RoundFailed, UpdateError
from isthmus.job.federated import FederatedSection
from isthmus.task import paired_scores
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import ComparisonPurpose
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.held_model import HeldModel
from isthmus_server.rounds.measurements.questions import Answers, DeviceQuestions, Question
from isthmus_server.rounds.model_publication import ModelPublication, Offer
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.retries import GivenUp, Retries
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_progress import RunProgress
from isthmus_server.storage.events import Event, ModelsCompared
from isthmus_server.storage.records import ComparisonRecord, Receipt
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.policy import CURRENT, SERVED, Compare, Comparison


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
        publication: ModelPublication,
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
            publication: offers models to devices.
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
        self._publication = publication
        self._questions = DeviceQuestions(context, cohorts)
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
        round_ = self._progress.state.round  # the evaluation of the next one is still to come
        begun: _Begun | None = None

        async def attempt() -> None:
            nonlocal begun
            with drain.held():
                async with drain.during(self._turn()):
                    # Logged in its turn: an attempt begins when devices can be asked for it.
                    begun = self._begin(question)
                    await self._held.fetch()
                    scores = await self._scores(begun.state, question, begun.number, begun.attempt)
                    price = self._price(question, scores.receipts)
                    # Noise is in proportion to the vectors, and centred ones are shorter.
                    centred = self._context.privacy is not None
                    result = _comparison(question, scores, price, centred=centred)
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
            await retries.until_done(attempt, note_failure, drain, self._questions.repeats(round_))
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
            device_bytes=sum(receipt.moved.total for receipt in receipts),
            seconds=self._clock.now() - begun.started,
            receipts=receipts,
            policy_state=dict(policy_state),
        )

    def _note(self, record: ComparisonRecord) -> None:
        self._progress.state = self._progress.state.after_comparison(record)
        self._publish(ModelsCompared(record=record))

    async def _scores(
        self, state: RunState, question: Compare, number: int, attempt: int
    ) -> Answers:
        """Have a cohort score the models; every attempt selects the same devices if it can.

        Raises:
            AttemptFailed: too few devices, or one has sent what no scores can be.
        """
        settings = comparison_settings(question, self._job.federated)
        parts = {part for model in question.models for part in model.split("+")}
        # First the model that most devices hold: they fetch the rest only.
        names = sorted(parts, key=lambda name: (name != CURRENT, name != SERVED, name))
        candidates = [
            link_pb2.Candidate(of=[names.index(part) for part in model.split("+")])
            for model in question.models
        ]
        vectors = (self._versions.read(name, state.models) for name in names)
        first = await asyncio.to_thread(self._versions.sha256, names[0], state.models)
        async with self._publication.bundle(vectors, len(names), first) as offer:
            asked = self._question(settings, number, attempt, candidates, offer)
            answers = await self._questions.ask(asked)
        if self._context.privacy is None:  # with noise it may be any
            try:
                paired_scores.check(answers.total.tolist())
            except ValueError as error:
                self._questions.note_refused(asked.run_id, number, attempt)
                reason = f"the sum of the scores is one that devices cannot have: {error}"
                raise AttemptFailed(reason, answers.receipts) from None
        return answers

    def _question(
        self,
        settings: FederatedSection,
        number: int,
        attempt: int,
        candidates: Sequence[link_pb2.Candidate],
        offer: Offer,
    ) -> Question:
        """An attempt at a comparison of the offered models."""
        context = self._context
        models = offer.blob

        def request(secure: bytes, group: str) -> link_pb2.Request:
            work = link_pb2.Score(
                run_id=context.run_id,
                comparison=number,
                attempt=attempt,
                models=models,
                candidates=candidates,
                secure=secure,
                first_model=offer.first_model,
            )
            return link_pb2.Request(score=work)

        def read(reply: link_pb2.Reply) -> torch.Tensor:
            scores = list(reply.scored.scores)
            if not scores and context.privacy is not None:
                scores = [0.5] * len(candidates)  # it could not, which nobody sees
            if len(scores) != len(candidates):
                raise UpdateError(f"it scored {len(scores)} models of {len(candidates)}")
            if not all(0 <= score <= 1 for score in scores):
                raise UpdateError(f"its scores {scores} are not all from 0 to 1")
            vector = paired_scores.score_vector(scores)
            return vector if context.privacy is None else paired_scores.centred(vector)

        means = tuple(tuple(mean.of) for mean in candidates)
        return Question(
            kind="comparison",
            number=number,
            attempt=attempt,
            settings=settings,
            # Whom a sum may contain depends on the digest of what it is about.
            select=lambda: self._cohorts.select_for_comparison(number, settings, models.sha256),
            request=request,
            outcome="scored",
            read=read,
            verb="score the models",
            run_id=paired_scores.comparisons_run_id(context.run_id),
            about=models.sha256,
            purpose=lambda group: ComparisonPurpose(context.purpose, means).hash,
            size=paired_scores.vector_size(len(candidates)),
            whole=False,
            norm=paired_scores.centred_norm(len(candidates)),
        )

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


def _comparison(question: Compare, scores: Answers, price: float, *, centred: bool) -> Comparison:
    """The result of a comparison, as the policy observes it; `centred`: of centred vectors."""
    mean = paired_scores.restored(scores.total) if centred else scores.total
    means, differences, errors = paired_scores.comparison(
        mean.tolist(), devices=scores.devices, noise=scores.deviation
    )
    return Comparison(
        models=question.models,
        devices=scores.devices,
        score=dict(zip(question.models, means, strict=True)),
        difference=dict(zip(question.models, differences, strict=True)),
        standard_error=dict(zip(question.models, errors, strict=True)),
        price=price,
    )
