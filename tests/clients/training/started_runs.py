"""What a server sends to open a run whose job names what its model starts from."""

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus.task.scoring import build_start_model
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.transport.requests import fingerprint_messages
from isthmus.wire import link_pb2


def opening_of(folder, *overrides):
    """The request for the `job.toml` of a folder, the server's model, and its division."""
    job = load_job(folder / "job.toml", overrides)
    task = load_task(job.task.source, job.task.settings, base=folder)
    model = build_start_model(task, job, folder)
    division = divide(model, job.exchange)
    personal = division.personal
    opening = link_pb2.OpenRun(
        run_id="run",
        job=job.model_dump_json(),
        base=str(folder),
        layout=division.exchanged.header,
        frozen=fingerprint_messages(fingerprint(model, personal.names)),
        personal=personal.header if personal.size else b"",
    )
    return opening, model, division
