"""What a device measures for a secure sum: scores, and counts of an evaluation or of its data.

Nothing of it is sent before it is masked, and a failure of the task ends in zeros, see
`without_effect`.
PyTorch is imported on first use, so that an idle device stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus.errors import TaskError
from isthmus.job.measurements import evaluations_run_id
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.own_figures import OwnFigures
from isthmus_clients.device.secure_sessions import SecureSessions, check_wanted, state_name
from isthmus_clients.device.task_host import TaskHost
from isthmus_clients.training.withholding import attempted

if TYPE_CHECKING:
    import torch

    from isthmus_clients.training.secure import SecureParticipation


def score(
    sessions: SecureSessions,
    host: TaskHost,
    run: ActiveRun,
    request: link_pb2.Request,
    payload: Buffer,
    wanted: Callable[[], bool],
) -> link_pb2.Reply:
    """Score models, and join the sum of the scores, if it is still `wanted` then.

    Raises:
        PeerMisbehaved: the configuration is refused, before anything is scored.
        UpdateError: this device is not enrolled, cannot record the attempt, or the server has
            cancelled it.
    """
    from isthmus.task import paired_scores
    from isthmus_privacy.purpose import ComparisonPurpose, device_vector
    from isthmus_privacy.secagg.history import StartModel

    work = request.score
    about = (paired_scores.comparisons_run_id(work.run_id), work.comparison, work.attempt)
    candidates = tuple(tuple(mean.of) for mean in work.candidates)
    purpose = ComparisonPurpose(run.secure_purpose, candidates)
    slots = run.measuring_slots
    own = ComparisonPurpose(run.vector_purpose, candidates)
    state = state_name(host, run, work)
    start = StartModel(
        work.comparison,
        work.models.sha256,
        vector=device_vector(own.hash, 0, state),
        trained=0,
        work=own.hash,
    )
    name = work.models.sha256
    size = paired_scores.vector_size(len(candidates))
    attempt = sessions.propose(
        about, work.secure, name, purpose.hash, slots, size=size, start=start
    )
    norm = paired_scores.centred_norm(len(work.candidates))
    run.check_measuring_noise(attempt.config, norm, sessions.rho(work.run_id))
    vector = attempted(
        f"comparison {work.comparison} of {work.run_id}",
        lambda: paired_scores.score_vector(host.score(request.id, work, payload)),
    )
    check_wanted(wanted)
    if vector is not None and run.job.privacy is not None:
        vector = paired_scores.centred(vector)
    seed = sessions.seed(run, -work.comparison, attempt)
    return sessions.join(attempt, vector, 1, _figures(attempt), seed)


def evaluate(
    sessions: SecureSessions,
    host: TaskHost,
    run: ActiveRun,
    request: link_pb2.Request,
    payload: Buffer,
    wanted: Callable[[], bool],
    own: OwnFigures | None,
    *,
    same_devices: bool = False,
) -> link_pb2.Reply:
    """Evaluate a model, and join the sum of the counts, if it is still `wanted` then.

    This device's own figures are noted in `own`, and not sent. With `same_devices` it is in sums of
    all evaluations of the task's code with one set of devices only.

    Raises:
        PeerMisbehaved: the configuration is refused, before anything is evaluated.
        UpdateError: this device is not enrolled, cannot record the attempt, or the server has
            cancelled it.
    """
    from isthmus.task.measurements.bounded_means import measured_norm, numbers_of
    from isthmus_privacy.purpose import (
        EvaluationPurpose,
        device_vector,
        evaluated_data,
        evaluated_model,
        statistics_of,
    )
    from isthmus_privacy.secagg.config import COUNT_LEVELS
    from isthmus_privacy.secagg.history import StartModel

    work = request.evaluate
    config = sessions.read_config(work.secure)
    run.check_group(work.group, config.clients_min, of_updates=False)
    run.check_counts(config.size)
    name = evaluated_model(work.model.sha256)
    if run.job.statistics.collect:
        name = statistics_of(run.secure_purpose.task)
    private = run.job.privacy is not None
    # Only a fine-tuning has random numbers, and is repeated with those of its round.
    state = state_name(host, run, work)
    trained = 0
    if run.job.federated.fine_tune_steps:
        # Without fine-tuning it was noted as 0, which is no round.
        known = work.round if state else sessions.repeated_round(name, work.round)
        trained = known or work.round
    collects = run.job.statistics.collect
    purpose = EvaluationPurpose(run.statistics_purpose if collects else run.vector_purpose)
    start = StartModel(
        work.round,
        name,
        vector=device_vector(purpose.hash, trained, state),
        trained=trained,
        work=purpose.hash,
        data=evaluated_data(run.secure_purpose.task) if same_devices else b"",
    )
    attempt = sessions.propose(
        (evaluations_run_id(work.run_id), work.round, work.attempt),
        work.secure,
        name,
        EvaluationPurpose(run.secure_purpose, work.group).hash,
        run.measuring_slots,
        size=config.size,
        start=start,
        whole=0 if private else COUNT_LEVELS,
    )
    run.check_measuring_noise(attempt.config, measured_norm(config.size), sessions.rho(work.run_id))
    asked = link_pb2.Evaluate()
    asked.CopyFrom(work)
    asked.round = trained or work.round
    counts = attempted(
        f"evaluation in round {work.round} of {work.run_id}",
        lambda: _counts(host.evaluate(request.id, asked, payload), config.size, work, own),
    )
    check_wanted(wanted)
    vector = numbers_of(counts) if private and counts is not None else counts
    # Whole numbers need no seed, which is that of rounding.
    seed = sessions.seed(run, -work.round, attempt) if private else b""
    return sessions.join(attempt, vector, 1, _figures(attempt), seed)


def _figures(attempt: SecureParticipation) -> dict[str, float]:
    return {slot.name: 0.0 for slot in attempt.config.slots}


def _counts(
    counted: link_pb2.Counted, size: int, work: link_pb2.Evaluate, own: OwnFigures | None
) -> torch.Tensor:
    """A device's counts as a vector, int64 (size), of numbers that can be summed.

    Raises:
        TaskError: the task's code has another number of them, or one is too large.
    """
    import torch

    from isthmus.task.measurements.metrics import LARGEST

    counts = list(counted.counts)
    if len(counts) != size or not all(abs(count) <= LARGEST for count in counts):
        raise TaskError(
            f"this device has {len(counts)} counts up to {max(map(abs, counts), default=0)}, and "
            f"the server expects {size} of at most {LARGEST}"
        )
    if own is not None and counted.own_figures:
        own.note(work.run_id, work.round, counted.own_figures)
    return torch.tensor(counts, dtype=torch.int64)
