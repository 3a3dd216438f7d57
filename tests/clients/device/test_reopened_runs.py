"""A run that is opened again while the model of a request is on its way."""

import pytest
import torch

from isthmus.errors import UpdateError
from isthmus.job import parse_job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent

TWO_SIZES = """
def model(self):
    model = nn.Linear(4, 3)
    model.more = nn.Parameter(torch.ones(self.settings["size"]))
    return model
"""


def nbytes(size):
    shapes = {"bias": (3,), "weight": (3, 4), "more": (size,)}
    return TensorLayout.from_shapes(shapes).nbytes


SMALL, LARGE = next(
    (small, large)
    for small in range(1, 50)
    for large in range(small, 200)
    if nbytes(large) == 2 * nbytes(small)
)


@pytest.fixture
def opened(write_task, tmp_path):
    """Opens the run with a model of some size; returns its layout and the model."""
    write_task(TWO_SIZES)
    agent = Agent(Participant(name="a", regime="federated"), None)

    async def opened(size):
        text = 'name = "two"\n[task]\nsource = "task.py:Learn"\n'
        job = parse_job(text, [f"task.settings.size={size}", "federated.cohort=20"])
        task = load_task(job.task.source, job.task.settings, base=tmp_path)
        model = build_model(task, job.seed)
        layout = TensorLayout.of(model)
        opening = link_pb2.OpenRun(
            run_id="run", job=job.model_dump_json(), base=str(tmp_path), layout=layout.header
        )
        await agent.work(link_pb2.Request(open=opening), None, lambda _: None)
        return layout, layout.gather(model)

    return agent, opened


async def test_no_gradient_follows_a_model_that_was_announced_alone(opened):
    """Its name would be that of both: the same model could be summed again with zeros after it."""
    agent, opened = opened
    large, _ = await opened(LARGE)
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, secure=b"a sum")
    request = link_pb2.Request(id="x", train_local=work)
    memory = agent.buffer(request, large.nbytes)
    small, model = await opened(SMALL)
    memory[:] = small.encode(model) + small.encode(torch.zeros(small.size))
    request.train_local.model.CopyFrom(describe(bytes(memory)))
    with pytest.raises(UpdateError, match=f"1 models in {large.nbytes} bytes"):
        await agent.work(request, memory, lambda _: None)
