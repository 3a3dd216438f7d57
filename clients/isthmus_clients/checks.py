"""The devices' part of `isthmus job check`: train one batch as the first client would."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import TaskError
from isthmus.job import Job, with_changes, write_job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task
from isthmus.task.loading import user_code
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus.task.scoring import build_start_model
from isthmus.task.scoring.pairs import pairs_in_words
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.transport.requests import fingerprint_messages, position_message
from isthmus.wire import link_pb2

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
    run.train(train, layout.encode(layout.gather(model)), lambda _: None, lambda: False)
    tried = f"one training batch of {name}"
    if not isinstance(run.dataset, IterableDataset):
        tried += pairs_in_words(task, model, run.dataset, run.examples)
    if not job.evaluation.devices:
        return tried
    with user_code("validation_data()"):
        validation = task.validation_data(participant)
    if validation is None:
        raise TaskError(f"validation_data() of {name} returned None; evaluation.devices needs data")
    vector = evaluation_vector(job, task)
    counts = vector.count(model, validation, job.evaluation.batch_size, first=1)
    tried += f"; one validation batch of {name}"
    if found := vector.not_finite(counts):
        tried += f", where {', '.join(found)} had values that are not finite"
    return tried
