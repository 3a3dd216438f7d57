"""Recompute the model's running statistics on a datacenter's data (`exchange.buffers`)."""

from __future__ import annotations

from isthmus.job import Job
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.attempt_result import TrainingResult, with_earlier
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.rounds.model_publication import ModelPublication
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.strategy.round_spec import RoundSpec


class RunningStatistics:
    """Replaces the running statistics of merged models, if the job recomputes them."""

    def __init__(
        self,
        job: Job,
        model: GlobalModel,
        datacenter: DatacenterRegime,
        roster: ParticipantRoster,
        publication: ModelPublication,
    ) -> None:
        """`roster` knows the datacenters that are ready."""
        self._recomputed = job.exchange.buffers == "recompute"
        self._model = model
        self._datacenter = datacenter
        self._roster = roster
        self._publication = publication

    def check(self, spec: RoundSpec) -> None:
        """Refuse an attempt whose statistics no datacenter can compute, before anybody trains.

        Raises:
            AttemptFailed: no datacenter is connected.
        """
        if self._applies(spec):
            self._source()

    async def recompute(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Replace the statistics after a merge, and add the receipt of the work to `results`.

        Raises:
            AttemptFailed: no datacenter could compute them.
        """
        if not self._applies(spec):
            return
        name = self._source()
        model = self._model
        # Nothing is summed while the datacenter computes, so the model can stay in memory.
        async with self._publication.current(summing=False, devices=False) as offer:
            result = await self._datacenter.statistics(name, spec, offer.blob)
        assert result.vector is not None
        # Parameters come first in the vector, and buffers after them; only these are replaced.
        trained = model.layout.trained_size
        model.vector[trained:] = result.vector[trained:]
        model.mark_changed()
        results.earlier = with_earlier(results.earlier, result.receipts)

    def _applies(self, spec: RoundSpec) -> bool:
        """Whether a round has other statistics than a datacenter's own training would give."""
        return self._recomputed and spec.plan.regime != "datacenter"

    def _source(self) -> str:
        # The first name in every attempt: the same participants have to give the same bytes.
        names = sorted(self._roster.datacenters)
        if not names:
            raise AttemptFailed(
                "exchange.buffers='recompute' computes running statistics on a datacenter's data, "
                "and no datacenter is connected; start one, or use buffers = 'average'",
                [],
            )
        return names[0]
