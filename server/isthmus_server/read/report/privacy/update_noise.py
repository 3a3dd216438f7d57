"""The noise of a round over its signal, and that of an evaluation, for a number of devices."""

from __future__ import annotations

import math
from pathlib import Path

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus.job.measurements import EvaluationSection
from isthmus.task import Task, load_task
from isthmus.task.measurements.bounded_means import BoundedMeans, measured_norm
from isthmus.task.measurements.evaluation import check_evaluates_on_devices
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.distributed import fit_ring
from isthmus_privacy.secagg.graph import corrupt_clients
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.secure_sums.round_configs import CORRUPT_PERMILLE


def update_size(job: Job, base: Path) -> int:
    """N, elements of an update: the task's model is built, and nothing is trained.

    Raises:
        UserError: the task cannot be used.
    """
    strategy = job.strategy
    return GlobalModel(
        _task(job, base), job.seed, strategy.server_optimizer, strategy.served_average, job.exchange
    ).layout.size


def noise_to_signal(job: Job, plan: NoisePlan, size: int, cohort: int) -> float:
    """See `NoisePlan.noise_to_signal`; the sum has the updates of the whole cohort.

    Raises:
        JobError: no sum can have so many devices.
    """
    honest = None
    if plan.privacy.mechanism == "distributed":
        honest = _honest(job, cohort)
    return plan.noise_to_signal(size, cohort, honest)


def update_bytes(job: Job, plan: NoisePlan, size: int) -> int:
    """Bytes of an update of N elements as a device sends it.

    Raises:
        JobError: its noise does not fit the ring of a secure sum.
    """
    if plan.privacy.mechanism != "distributed":
        return 4 * size
    cohort = job.federated.cohort
    try:
        _, bits = fit_ring(
            clip=plan.privacy.clip,
            multiplier=plan.multiplier,
            honest=_honest(job, cohort),
            clients=cohort,
            size=size,
        )
    except ValueError as error:
        raise JobError(f"privacy: {error}; invite more devices, or lower the noise") from None
    return bits // 8 * size


def metric_noise(job: Job, plan: NoisePlan, base: Path) -> float | None:
    """Deviation of the noise of a metric that all devices of an evaluation answer, over its range.

    None without `evaluation.devices`.

    Raises:
        UserError: the task cannot be used, or its devices cannot evaluate it with noise.
    """
    if not job.evaluation.devices:
        return None
    check_evaluates_on_devices(job, task := _task(job, base))
    size = BoundedMeans(task).size
    devices = job.evaluation.devices
    deviation = plan.measuring_multiplier * measured_norm(size) / devices / 2
    if plan.privacy.mechanism == "distributed":
        deviation *= math.sqrt(devices / _honest(job, devices, job.evaluation))
    return deviation


def _honest(job: Job, cohort: int, measured: EvaluationSection | None = None) -> int:
    """Devices whose noise is counted on: see `RoundConfig.honest_survivors`."""
    corrupt = 0 if job.federated.clients else CORRUPT_PERMILLE
    section = job.federated
    settings = section.for_cohort(cohort) if measured is None else measured.on_devices(section)
    return settings.needed - corrupt_clients(cohort, corrupt)


def _task(job: Job, base: Path) -> Task:
    return load_task(job.task.source, job.task.settings, base=base, data=job.task.data_in(base))
