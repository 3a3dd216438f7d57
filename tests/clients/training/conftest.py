"""Open a run on a device, and train rounds of it."""

import pytest

from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.division import divide
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun


class Progress:
    def __init__(self):
        self.steps = []

    def __call__(self, progress):
        self.steps.append((progress.steps, progress.loss))


@pytest.fixture
def open_run(write_task, make_job, tmp_path):
    """A run opened on a device, and the model the server would send."""

    def open_run(*overrides, methods="pass", name="a", layout=None, tasks=None, secret=None):
        write_task(methods)
        job = make_job(*overrides)
        personal = b""
        if layout is None:
            model = build_model(load_task(job.task.source, {}, base=tmp_path), job.seed)
            divided = divide(model, job.exchange)
            layout = divided.exchanged
            personal = divided.personal.header if divided.personal.size else b""
        work = link_pb2.OpenRun(
            run_id="run",
            job=job.model_dump_json(),
            base=str(tmp_path),
            layout=layout.header,
            personal=personal,
        )
        participant = Participant(name=name, regime="federated")
        return DeviceRun(work, participant, None, tasks, secret=secret)

    return open_run


def train(run, round_=1, start=None, stopped=lambda: False):
    """Train one round; returns the update, the reply and the progress."""
    start = build_start(run) if start is None else start
    payload = run.layout.encode(start)
    progress = Progress()
    work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
    trained = run.train(work, payload, progress, stopped)
    return run.layout.decode(payload).clone(), trained, progress


def build_start(run):
    return run.layout.gather(build_model(run.task, run.job.seed))
