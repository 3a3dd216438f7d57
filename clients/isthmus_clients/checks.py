"""The devices' part of `isthmus job check`: train one batch as the first client would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import TaskError
from isthmus.job import Job, with_changes, write_job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task
from isthmus.task.loading import user_code
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus.task.own_numbers import own_numbers
from isthmus.task.scoring import build_start_model
from isthmus.task.scoring.pairs import pairs_in_words
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.tensors.own_buffers import OwnBuffers
from isthmus.transport.requests import fingerprint_messages, position_message
from isthmus.wire import link_pb2
from isthmus_privacy.slots import LOSS

if TYPE_CHECKING:
    from isthmus_clients.training.local_run import DeviceRun

_RUN = "check"


def check(job: Job, task: Task, base: Path) -> str:
    """Train one batch of the data of the first client that `isthmus run` or a simulation starts.

    Returns what was tried; empty if neither has clients, or the job has an app that trains.

    Raises:
        UserError: the data, the loss or the optimizer cannot be used, with the reason.
    """
    # The data of a client depends on how many there are, as it is divided among them.
    clients = job.federated.clients or job.simulation.clients
    if not clients or job.federated.app is not None:
        return ""
    from torch.utils.data import IterableDataset

    from isthmus_clients.training.local_run import DeviceRun

    name = "client-0"
    model = build_start_model(task, job, base)
    division = divide(model, job.exchange)
    layout = division.exchanged
    one_step = {"federated.local_epochs": None, "federated.local_steps": 1}
    opening = link_pb2.OpenRun(
        run_id=_RUN,
        job=write_job(with_changes(job, one_step)),
        base=str(base),
        layout=layout.header,
        frozen=fingerprint_messages(fingerprint(model, division.personal.names)),
        personal=division.personal.header if division.personal.size else b"",
    )
    participant = Participant(name=name, regime="federated", shard=(0, clients))
    run = DeviceRun(opening, participant, None, device=job.federated.device)
    position = RoundPosition(0, job.federated_round_steps, job.federated.cohort)
    train = link_pb2.TrainLocal(
        run_id=_RUN, round=1, attempt=1, position=position_message(position)
    )
    buffers = OwnBuffers(run.model)
    payload = layout.encode(layout.gather(model))
    trained = run.train(train, payload, lambda _: None, lambda: False)
    tried = f"one training batch of {name}{buffers.in_words(run.model)}"
    loss = trained.training.get("loss", 0.0)
    is_exact = job.privacy is None and job.federated.privacy is None
    if job.federated.secure_aggregation and is_exact and abs(loss) > LOSS.maximum:
        tried += (
            f", whose loss is {loss:.6g}: a loss outside of -{LOSS.maximum:g} to {LOSS.maximum:g} "
            "counts as the end of that range in the mean of secure sums; scale the loss"
        )
    if run.difference is not None:
        tried += (
            f", whose loss is {run.difference.small:.6g} with federated.frozen_dtype="
            f"{job.federated.frozen_dtype!r} and {run.difference.full:.6g} in float32"
        )
    tried += _try_last_row(job, run, opening, train, layout.encode(layout.gather(model)))
    if not isinstance(run.dataset, IterableDataset):
        tried += pairs_in_words(task, model, run.dataset, run.examples)
    if not job.evaluation.devices:
        return tried
    with own_numbers(job.seed, name), user_code("validation_data()"):
        validation = task.validation_data(participant)
    if validation is None:
        raise TaskError(f"validation_data() of {name} returned None; evaluation.devices needs data")
    vector = evaluation_vector(job, task)
    counts = vector.count(model, validation, job.evaluation.batch_size, first=1)
    tried += f"; one validation batch of {name}"
    if found := vector.not_finite(counts):
        tried += f", where {', '.join(found)} had values that are not finite"
    for clipped in vector.clipped(counts).values():
        tried += (
            f", where {clipped.sentence}, or scale it; a run that this metric decides about would "
            "end"
        )
    return tried


def _try_last_row(
    job: Job,
    run: DeviceRun,
    opening: link_pb2.OpenRun,
    train: link_pb2.TrainLocal,
    model: bytearray,
) -> str:
    """Train a batch of one row, if the rounds have one: normalisation layers may refuse it.

    Returns what the sentence about what was tried ends with; empty if they have none. With secure
    aggregation devices leave out such a row if it cannot be trained.

    Raises:
        UserError: the batch cannot be trained, with the reason.
    """
    from isthmus_clients.training.local_run import DeviceRun

    federated = job.federated
    if federated.privacy is not None or not run.data.has_lone_row(federated):
        return ""
    one_row = {
        "federated.local_epochs": None,
        "federated.local_steps": 1,
        "federated.batch_size": 1,
        "federated.accumulate": 1,
    }
    opening.job = write_job(with_changes(job, one_row))
    name = run.participant.name
    single = DeviceRun(opening, run.participant, None, device=federated.device)
    try:
        single.train(train, model, lambda _: None, lambda: False)
    except TaskError as error:
        if federated.secure_aggregation:
            return (
                "; a last batch of one row, which it has in each epoch, is left out, since it "
                f"cannot be trained: {error}"
            )
        raise TaskError(
            f"the last batch of an epoch of {name} has one row, as local_data() has "
            f"{run.examples} and federated.batch_size={federated.batch_size}"
            f"{_in_parts(federated.accumulate)}, and cannot be trained: {error}"
        ) from error
    return " and one of a single row"


def _in_parts(accumulate: int) -> str:
    return f" in {accumulate} parts" if accumulate > 1 else ""
