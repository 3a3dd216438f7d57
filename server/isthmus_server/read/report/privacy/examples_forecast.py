"""What the privacy budget of a datacenter's examples means before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from isthmus.job import Job
from isthmus_privacy.dp.calibration import SampledNoisePlan
from isthmus_server.budgets.examples_budget import ADD_OR_REMOVE, EXAMPLE
from isthmus_server.read.report.privacy.device_forecast import budget, tenths


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesForecast:
    """Noise and cost of DP-SGD in a job with `[datacenter.privacy]`."""

    epsilon: float
    delta: float
    examples: int
    steps: int
    """Steps of all rounds, if each is one of a datacenter."""
    sampling_probability: float
    """Probability with which an example is in a step."""
    noise_multiplier: float
    epsilon_after: dict[int, float]
    """Epsilon of an example after so many steps."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """Compute it; None for a job without `[datacenter.privacy]`.

        Raises:
            JobError: no noise meets the budget.
        """
        plan = SampledNoisePlan.of(job)
        if plan is None:
            return None
        steps = job.rounds * job.datacenter.steps
        return cls(
            epsilon=plan.privacy.epsilon,
            delta=plan.privacy.delta,
            examples=plan.privacy.examples,
            steps=steps,
            sampling_probability=plan.probability,
            noise_multiplier=plan.multiplier,
            epsilon_after={each: plan.epsilon(each) for each in tenths(steps)},
        )

    def to_json(self) -> dict[str, Any]:
        """All figures, with the unit and the adjacency of the guarantee."""
        return {**dataclasses.asdict(self), "unit": EXAMPLE, "adjacency": ADD_OR_REMOVE}

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences for a terminal."""
        after = ", ".join(f"{epsilon:.4g} after {n}" for n, epsilon in self.epsilon_after.items())
        expected = self.sampling_probability * self.examples
        return [
            ("mechanism", "DP-SGD in the datacenter"),
            ("protects", f"one {EXAMPLE} ({ADD_OR_REMOVE})"),
            ("budget", budget(self.epsilon, self.delta)),
            ("steps", f"{self.steps}, each with about {expected:g} of {self.examples} examples"),
            ("noise", f"{self.noise_multiplier:.4g} times the clipping bound in a step's sum"),
            ("epsilon", f"{after} steps"),
        ]
