"""Observe a run: what its policy and its limits decide on."""

from __future__ import annotations

from isthmus.job import Job
from isthmus_server.budgets.run_budgets import RunBudgets
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_progress import RunProgress
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policy import Observation, Plan


class RunObserver:
    """Takes observations of one run; each is of the moment in which it is taken."""

    def __init__(
        self,
        job: Job,
        clock: Clock,
        progress: RunProgress,
        roster: ParticipantRoster,
        cohorts: CohortSelector,
        versions: ModelVersions,
        budgets: RunBudgets,
        *,
        model_bytes: int,
    ) -> None:
        """`model_bytes` is the size of the encoded model."""
        self._job = job
        self._clock = clock
        self._progress = progress
        self._roster = roster
        self._cohorts = cohorts
        self._versions = versions
        self._budgets = budgets
        self._model_bytes = model_bytes

    def observe(self) -> Observation:
        """What is known about the run now."""
        state = self._progress.state
        roster = self._roster
        available = len(roster.available())
        return observe(
            self._job,
            state.history,
            spent=state.spent,
            device_bytes=state.device_bytes,
            state=state.policy_state,
            clients_ready=available,
            clients_ineligible=len(roster.clients) - available,
            seconds_until_quorum=self._cohorts.seconds_until_quorum(),
            others_may_come=self._cohorts.awaits_others(),
            datacenters=roster.datacenters,
            groups=roster.groups(),
            model_bytes=self._model_bytes,
            now=self._clock.utc(),
            elapsed=self._progress.elapsed,
            models=self._versions.names(state.models),
            comparisons=[c.result for c in state.comparisons if c.result is not None],
            epsilon_spent=self._budgets.devices_spent,
        )

    def refused_for_privacy(self, plan: Plan) -> str:
        """Why the datacenters' examples may not be used again; empty if they may.

        Accounting for thousands of steps takes seconds.
        """
        examples = self._budgets.examples
        if examples is None or plan.regime == "federated":
            return ""
        steps = plan.datacenter_steps or self._job.datacenter.steps
        return examples.refusal(steps * max(1, len(self._roster.datacenters)))
