"""What a job's privacy budget means before anything runs."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Self

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_server.budgets.budget import ADJACENCY, UNIT

LARGER_COHORTS = (2, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyForecast:
    """Noise, cost and budget of a job."""

    mechanism: str
    epsilon: float
    delta: float
    rounds: int
    participations: int
    """Most rounds of one device."""
    noise_multiplier: float
    gain: float
    """How much less noise correlated noise leaves than independent noise of equal privacy."""
    clip: float
    clip_quantile: float | None
    cohort: int
    size: int
    """Elements of an update."""
    noise_to_signal: dict[int, float]
    """2-norm of the noise of a round over that of the sum of equal, clipped updates, by the number
    of devices in the sum."""
    epsilon_after: dict[int, float]
    """Epsilon of a device after so many rounds, if it is in each that it may be in."""
    update_bytes: int
    """What a device sends in a round."""
    measurements: int = 0
    """Most evaluations and comparisons of one device."""
    metric_noise: float | None = None
    """Standard deviation of the noise of a metric that is evaluated on devices, as a part of its
    range; None without `evaluation.devices`."""

    @classmethod
    def of(cls, job: Job, base: Path) -> Self | None:
        """Compute it; the task's model is built for its size, and nothing is trained.

        Returns None for a job without `[privacy]`.

        Raises:
            UserError: its budget cannot be met, or its task cannot be used.
        """
        if job.privacy is None:
            return None
        from isthmus_server.read.report.privacy.update_noise import (
            metric_noise,
            noise_to_signal,
            update_bytes,
            update_size,
        )

        plan = NoisePlan.of_job(job)
        size = update_size(job, base)
        cohort = job.federated.cohort
        rounds = tenths(job.rounds)
        ratios = {cohort: noise_to_signal(job, plan, size, cohort)}
        for larger in (cohort * factor for factor in LARGER_COHORTS):
            with contextlib.suppress(JobError):  # above the most devices of a secure sum
                ratios[larger] = noise_to_signal(job, plan, size, larger)
        return cls(
            mechanism=job.privacy.mechanism,
            epsilon=job.privacy.epsilon,
            delta=job.privacy.delta,
            rounds=job.rounds,
            participations=plan.participations,
            noise_multiplier=plan.multiplier,
            gain=1.0 if plan.correlated is None else plan.correlated.gain,
            clip=job.privacy.clip,
            clip_quantile=job.privacy.clip_quantile,
            cohort=cohort,
            size=size,
            noise_to_signal=ratios,
            epsilon_after={each: epsilon_after(job, plan, each) for each in rounds},
            update_bytes=update_bytes(job, plan, size),
            measurements=plan.measurements,
            metric_noise=metric_noise(job, plan, base),
        )

    def to_json(self) -> dict[str, Any]:
        """All figures, with the unit and the adjacency of the guarantee."""
        return {**dataclasses.asdict(self), "unit": UNIT, "adjacency": ADJACENCY}

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences for a terminal."""
        first, *larger = self.noise_to_signal.items()
        after = ", ".join(f"{epsilon:.4g} after {n}" for n, epsilon in self.epsilon_after.items())
        buys = ", ".join(f"{ratio:.2g} with {n}" for n, ratio in larger)
        return [
            ("mechanism", f"{self.mechanism} noise"),
            ("protects", f"one {UNIT} ({ADJACENCY}: all its updates become zeros)"),
            ("budget", budget(self.epsilon, self.delta)),
            ("rounds", f"{self.rounds}, at most {self.participations} of one device"),
            (
                "noise",
                self._noise(),
            ),
            (
                "signal",
                f"the noise is {first[1]:.2g} times as long as the sum of {first[0]} equal updates "
                f"of {self.size:,} elements: a signal-to-noise ratio of {1 / first[1]:.3g}",
            ),
            ("clipping", self._clipping()),
            *([("cohort", f"a larger one buys: {buys} devices")] if larger else []),
            ("epsilon", f"{after} rounds"),
            ("bytes", f"{self.update_bytes:,} for each update"),
            *([("measured", self._measured())] if self.measurements else []),
        ]

    def _measured(self) -> str:
        most = f"at most {self.measurements} evaluations and comparisons of one device"
        if self.metric_noise is None:
            return most
        return f"{most}; the noise of a metric is {self.metric_noise:.2g} of its range"

    def _clipping(self) -> str:
        if self.clip_quantile is None:
            return f"an update is shortened to a 2-norm of {self.clip:g}"
        return (
            f"the bound is {self.clip:g} at first, and moves towards the {self.clip_quantile:g} "
            "quantile of the 2-norms of updates"
        )

    def _noise(self) -> str:
        times = f"{self.noise_multiplier:.4g} times"
        if self.mechanism != "correlated":
            return f"{times} the clipping bound in the sum of a round"
        return (
            f"{times} what one device changes in all rounds; {self.gain:.1f} times less of it is "
            "left than of independent noise"
        )


_USUAL_EPSILON = 10.0
"""Up to which a budget is called reasonable (Ponomareva et al. 2023, "How to DP-fy ML", 5.2.1)."""


def budget(epsilon: float, delta: float) -> str:
    """A budget, with a note if it promises little."""
    text = f"epsilon {epsilon:g} at delta {delta:g}"
    if epsilon <= _USUAL_EPSILON:
        return text
    return f"{text}: above {_USUAL_EPSILON:g}, which promises little"


def tenths(count: int) -> list[int]:
    """A tenth of a number, two tenths, and so on up to the number; 1 or more."""
    return sorted({max(1, count * tenth // 10) for tenth in range(1, 11)})


def epsilon_after(job: Job, plan: NoisePlan, rounds: int) -> float:
    """Epsilon of a device after the first rounds of a job with `[privacy]`.

    It is in each round and measurement that it may be in.
    """
    assert job.privacy is not None
    own = -(-rounds // job.privacy.separation)
    return plan.epsilon(own, measurements(job, plan, rounds))


def measurements(job: Job, plan: NoisePlan, rounds: int) -> int:
    """Most measurements that a device is asked for in the first rounds of a job.

    Those that are not for evaluations are comparisons, for which any round may ask.
    """
    if not job.evaluation.devices:
        return plan.measurements
    every = job.evaluation.every
    evaluations = rounds // every + (rounds == job.rounds and rounds % every > 0)
    return evaluations + max(plan.measurements - -(-job.rounds // every), 0)
