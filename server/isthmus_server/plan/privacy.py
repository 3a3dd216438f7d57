"""The privacy that a job spends, and whose, by the accountants of its ledgers."""

from __future__ import annotations

from isthmus.job import Job
from isthmus.job.planned import EXACT, GIVEN, Figure
from isthmus_privacy.dp.calibration import NoisePlan, SampledNoisePlan
from isthmus_server.budgets.budget import UNIT
from isthmus_server.budgets.examples_budget import EXAMPLE
from isthmus_server.read.report.privacy.device_examples import PromisedToExamples
from isthmus_server.read.report.privacy.device_forecast import epsilon_after


def epsilons(job: Job) -> list[Figure]:
    """Epsilon by unit after the run; none for a job without differential privacy.

    Raises:
        JobError: no noise meets a budget.
    """
    found = []
    if job.privacy is not None:
        spent = epsilon_after(job, NoisePlan.of_job(job), job.rounds)
        how = f"{EXACT}, for one that is asked as often as it may; delta {job.privacy.delta:g}"
        found.append(Figure(f"one {UNIT}", spent, "epsilon", how))
    sampled = SampledNoisePlan.of(job)
    if sampled is not None:
        steps = job.rounds * job.datacenter.steps
        how = f"{EXACT}, if each round is the datacenter's; delta {sampled.privacy.delta:g}"
        found.append(Figure(f"one {EXAMPLE} there", sampled.epsilon(steps), "epsilon", how))
    promised = PromisedToExamples.of(job)
    if promised is not None:
        how = f"{GIVEN}: each device keeps to it; delta {promised.delta:g}"
        unit = f"one {promised.unit} of a device"
        found.append(Figure(unit, 0, "epsilon", how, most=promised.budget))
    return found
