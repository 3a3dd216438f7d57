"""A visit: some devices score several models on their own data, so that a policy can compare them.

The models go out in one content, each vector once however many mixes it is part of. What comes back
is `isthmus.task.paired_scores`'s few numbers of each device, summed
securely where the job's updates are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from isthmus.errors import JobError, ParticipantLost
from isthmus.job.federated import FederatedSection
from isthmus.task import paired_scores
from isthmus.wire import link_pb2
from isthmus_privacy.secagg import RoundConfig
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure import SecureAggregationAttempt, margins
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.storage.checkpoints import Saved
from isthmus_server.storage.records import Receipt, Status
from isthmus_server.strategy.policy import Compare, Comparison
from isthmus_server.transport.bundle import published
from isthmus_server.transport.sanitize import reason_of


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a visit came to: the mean of the devices' vectors, and everyone's receipt."""

    mean: Sequence[float]
    receipts: Sequence[Receipt]

    @property
    def devices(self) -> int:
        """How many are in it."""
        return sum(receipt.status == "accepted" for receipt in self.receipts)


def settings_of(asked: Compare, federated: FederatedSection) -> FederatedSection:
    """Cohort and quorum of a visit: the job's own quorum is for updates.

    Raises:
        AttemptFailed: so few devices cannot be compared by, or not securely.
    """
    try:
        settings = federated.model_copy(update={"quorum": None}).for_cohort(asked.devices)
    except JobError as error:
        raise AttemptFailed(f"models cannot be compared: {error}", []) from None
    if asked.devices < 2:
        raise AttemptFailed("models cannot be compared on one device; ask at least two", [])
    return settings.model_copy(update={"quorum": max(2, settings.needed)})


async def visit(
    federation: FederatedContext,
    snapshots: ModelVersions,
    saved: Mapping[str, Saved],
    asked: Compare,
    number: int,
    attempt: int,
    cohort: Sequence[str],
) -> Scores:
    """Have a cohort score models.

    Args:
        federation: the devices', and the run's.
        snapshots: the models.
        saved: where the kept ones are.
        asked: which to compare.
        number: of the visit in the run.
        attempt: of the visit.
        cohort: whom to ask.

    Raises:
        AttemptFailed: too few answered.
    """
    settings = settings_of(asked, federation.job.federated)
    if len(cohort) < settings.needed:
        raise AttemptFailed(
            f"{len(cohort)} devices are ready and a visit of {asked.devices} needs "
            f"{settings.needed}",
            [],
        )
    names = sorted({part for model in asked.models for part in model.split("+")})
    candidates = [
        link_pb2.Candidate(of=[names.index(part) for part in model.split("+")])
        for model in asked.models
    ]
    vectors = (snapshots.read(name, saved) for name in names)
    link, layout, spool = federation.link, federation.layout, federation.spool
    async with published(link, layout, spool, vectors, len(names)) as blob:
        work = link_pb2.Score(
            run_id=federation.run_id,
            comparison=number,
            attempt=attempt,
            models=blob,
            candidates=candidates,
        )
        if settings.secure_aggregation:
            return await _secure(federation, work, cohort, settings)
        return await _PlainVisit(federation, work, cohort, settings).run()


def comparison(asked: Compare, scores: Scores, price: float) -> Comparison:
    """The answer to a policy's question."""
    means, differences, errors = paired_scores.comparison(scores.mean, devices=scores.devices)
    return Comparison(
        models=asked.models,
        devices=scores.devices,
        score=dict(zip(asked.models, means, strict=True)),
        difference=dict(zip(asked.models, differences, strict=True)),
        standard_error=dict(zip(asked.models, errors, strict=True)),
        price=price,
    )


async def _secure(
    federation: FederatedContext,
    work: link_pb2.Score,
    cohort: Sequence[str],
    settings: FederatedSection,
) -> Scores:
    def begin(agreed: bytes) -> link_pb2.Request:
        request = link_pb2.Request(score=work)
        request.score.secure = agreed
        return request

    config = RoundConfig(
        run_id=paired_scores.comparisons_run_id(federation.run_id),
        round=work.comparison,
        attempt=work.attempt,
        model_hash=work.models.sha256,
        size=paired_scores.vector_size(len(work.candidates)),
        **margins(settings),
        clip=1.0,
    )
    result = await SecureAggregationAttempt(federation, config, work.models, cohort, begin).run()
    return Scores(result.pseudo_gradient.tolist(), result.receipts)


class _PlainVisit:
    """Each device's scores in plain."""

    def __init__(
        self,
        federation: FederatedContext,
        work: link_pb2.Score,
        cohort: Sequence[str],
        settings: FederatedSection,
    ) -> None:
        self.federation = federation
        self.work = work
        self.cohort = cohort
        self.settings = settings
        self.figures: dict[str, torch.Tensor] = {}
        self.receipts: dict[str, Receipt] = {}

    async def run(self) -> Scores:
        """Ask everyone, and wait until all have answered or the time of a round is over."""
        seconds = self.federation.job.time.round_seconds
        tasks = [asyncio.create_task(self._ask(name)) for name in self.cohort]
        try:
            await asyncio.wait(tasks, timeout=seconds)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        for name in self.cohort:
            if name not in self.receipts:
                self._note(name, "dropped", f"it did not score within {seconds:g} s")
        receipts = [self.receipts[name] for name in self.cohort]
        if len(self.figures) < self.settings.needed:
            reasons = sorted({f"{r.participant}: {r.reason}" for r in receipts if r.reason})
            raise AttemptFailed(
                f"{len(self.figures)} of {len(receipts)} devices scored the models and "
                f"{self.settings.needed} are needed ({'; '.join(reasons[:3])})",
                receipts,
            )
        listed = [self.figures[name] for name in self.cohort if name in self.figures]
        return Scores(torch.stack(listed).mean(0).tolist(), receipts)

    async def _ask(self, name: str) -> None:
        link = self.federation.link
        request = link_pb2.Request(id=link.new_id(), score=self.work)
        try:
            reply = await link.ask(name, request)
        except ParticipantLost as lost:
            self._note(name, "dropped", str(lost), started=lost.reached)
            return
        scores = list(reply.scored.scores)
        wrong = ""
        if reply.WhichOneof("outcome") != "scored":
            wrong = reason_of(reply)
        elif len(scores) != len(self.work.candidates):
            wrong = f"it scored {len(scores)} models of {len(self.work.candidates)}"
        elif not all(0 <= score <= 1 for score in scores):
            wrong = f"its scores {scores} are not all from 0 to 1"
        link.acknowledge(name, request.id, not wrong, wrong)
        if wrong:
            self._note(name, "rejected", wrong)
            return
        self.figures[name] = paired_scores.score_vector(scores)
        self._note(name, "accepted", "")

    def _note(self, name: str, status: Status, reason: str, started: bool = True) -> None:
        self.receipts[name] = Receipt(
            participant=name,
            regime="federated",
            status=status,
            reason=reason,
            started=started,
            sent=status != "dropped",
            bytes_out=self.work.models.size if status == "accepted" else 0,
        )
