"""What a plan says of a step of a datacenter: by a run, by a model of its GPUs, or by a rate."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.job import Job
from isthmus.job.planned import FAKE, GIVEN, MEASURED, Figure, PlannedRanks
from isthmus_server.plan.calibration import Calibration
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.step_time import figures, step_time

STEP = "time of a step"
ROUND = "time of a round"


def step_figures(
    job: Job, ranks: PlannedRanks, options: PlanOptions, calibration: Calibration | None
) -> list[Figure]:
    """Operations of a step, the rate, and the seconds of a step, a round and the run.

    Without a rate or a measured step there are operations only.

    Args:
        job: the job.
        ranks: what was found of its ranks.
        options: which say the rate, or the GPU.
        calibration: a run that has measured steps; None for none.
    """
    found = []
    if ranks.operations is not None:
        found.append(Figure("operations of a step", ranks.operations, "FLOP", FAKE))
    by_option = options.tflops is not None or options.gpu is not None
    if calibration is not None and ranks.rate is None and not by_option:
        measured = calibration.step_seconds(job, ranks.ranks)
        if measured is not None:
            return found + _times(job, measured.low, measured.high, calibration.how)
    if options.nodes is not None:
        return found + _modelled(job, ranks, options)
    rate = ranks.rate
    obtained = MEASURED
    how = f"rate {MEASURED}, of one rank on its processors; without messages between ranks"
    if options.tflops is not None:
        rate = options.tflops * 1e12
        obtained = GIVEN
        how = f"rate {GIVEN} by --tflops; without messages between ranks"
    if rate is None or ranks.operations is None:
        return found
    seconds = ranks.operations / rate
    found.append(Figure("rate", rate, "FLOP/s", obtained))
    return found + _times(job, seconds, seconds, how)


def time_of_step(found: Iterable[Figure]) -> float | None:
    """Seconds of a step by its figures, in the middle of what they can be; None if not known."""
    for each in found:
        if each.name == STEP:
            return (each.value + each.highest) / 2
    return None


def _modelled(job: Job, ranks: PlannedRanks, options: PlanOptions) -> list[Figure]:
    """Parts of a step on named GPUs, and the seconds of a step, a round and the run."""
    assert options.nodes is not None
    step = step_time(job, ranks, options.nodes, options.peak_share)
    if step is None:
        return []
    how = f"model of --gpu {options.gpu}"
    return figures(step, how) + _times(job, step.seconds, step.seconds, how)


def _times(job: Job, least: float, most: float, how: str) -> list[Figure]:
    """Seconds of a step, a round and the run, by those of a step."""
    steps = job.datacenter.steps
    every = job.rounds * steps
    of_run = f"if each round is the datacenter's; {how}"
    return [
        Figure(STEP, least, "s", how, most=most),
        Figure(ROUND, steps * least, "s", how, most=steps * most),
        Figure("time of the run", every * least, "s", of_run, most=every * most),
    ]
