"""A server that wants all devices of a sum but one to send zeros: their sum would be that one's."""

import asyncio
import threading

import pytest
import torch
from tests.conftest import TABLE
from tests.server.regimes.secure_run import LAYOUT
from tests.server.regimes.test_withholding import Attacker

from isthmus.errors import TaskError
from isthmus.job import parse_job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.secure_sessions import KeptUpdate
from isthmus_clients.device.task_host import InProcessHost
from isthmus_clients.training.withholding import WITHHELD


@pytest.fixture
async def attacker(network, make_job, write_task, tmp_path):
    """An attacker that has opened the run of the table task at the victim."""
    write_task()
    attacker = Attacker(network, make_job, tmp_path)
    await attacker.connect()
    await attacker.open()
    return attacker


def test_a_cancelled_request_does_not_end_another_with_the_same_id():
    """A server could reuse the id, to have all devices of a sum but one send zeros."""
    agent = Agent(Participant(name="victim", regime="federated"), None)
    kept, cancelled = (link_pb2.Request(id="same") for _ in range(2))
    agent._secure._kept = KeptUpdate(kept, None, None, None)
    agent.cancel(cancelled, "")
    agent.acknowledged(cancelled, False, "")
    assert not agent.host._cancelled


@pytest.mark.parametrize("error", [MemoryError(), OSError(24, "Too many open files")])
async def test_a_lack_of_resources_of_the_device_is_no_zero_update(attacker, monkeypatch, error):
    """The server could cause it, with many requests at once."""

    def fails(*_):
        raise error

    monkeypatch.setattr(attacker.victim.host, "train", fails)
    reply = await attacker.train(torch.zeros(LAYOUT.size))
    assert reply.failure.reason == WITHHELD
    assert attacker.victim._secure._current is None


STATEFUL = """
    def model(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
"""


def test_a_crafted_model_has_no_effect_on_later_updates_and_scores(tmp_path):
    """Spectral normalisation keeps estimates in buffers, which a model of nan would make nan."""
    (tmp_path / "task.py").write_text(TABLE + STATEFUL)
    job = parse_job('name = "table"\n[task]\nsource = "task.py:Learn"')
    layout = TensorLayout.of(build_model(load_task("task.py:Learn", {}, base=tmp_path), job.seed))
    host = InProcessHost(Participant(name="a", regime="federated"), None, tmp_path, 1)
    host.open(link_pb2.OpenRun(run_id="run", job=job.model_dump_json(), layout=layout.header))

    def payload(vector):
        payload = host.buffer(layout.nbytes)
        payload[:] = layout.encode(vector)
        return payload

    def train(vector):
        work = link_pb2.TrainLocal(run_id="run", round=1)
        return bytes(host.train("train", work, payload(vector), lambda progress: None)[1])

    def score(vector):
        work = link_pb2.Score(run_id="run", candidates=[link_pb2.Candidate(of=[0])])
        return host.score("score", work, payload(vector))

    start = torch.linspace(-1, 1, layout.size)
    expected = train(start), score(start)
    with pytest.raises(TaskError, match="is nan"):
        train(torch.full([layout.size], torch.nan))
    assert (train(start), score(start)) == expected


async def test_no_other_request_stops_the_training_of_a_kept_update(network, make_job, tmp_path):
    """A receipt for a running request freed its id, and a cancelled one with that id stopped it."""
    (tmp_path / "task.py").write_text(TABLE + "    pass\n")
    attacker = Attacker(network, make_job, tmp_path, "federated.mode=buffered")
    await attacker.connect()
    await attacker.open()
    blob, host = attacker.published(torch.zeros(LAYOUT.size)), attacker.victim.host
    begun, go_on, train = asyncio.Event(), threading.Event(), host.train
    loop = asyncio.get_running_loop()

    def held_back(*args):
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return train(*args)

    host.train = held_back
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=blob, keep=True)
    stream = network.link.peers["victim"].stream
    await stream.send(link_pb2.Envelope(request=link_pb2.Request(id="same", train_local=work)))
    await begun.wait()
    await stream.send(link_pb2.Envelope(receipt=link_pb2.Receipt(id="same", accepted=True)))
    # Without a model, so that it waits for the other one to end.
    other = link_pb2.Request(id="same", agree=link_pb2.Agree(run_id="run"))
    await stream.send(link_pb2.Envelope(request=other))
    await stream.send(link_pb2.Envelope(cancel=link_pb2.Cancel(id="same")))
    await attacker.ask(mean_gradient=link_pb2.MeanGradient())  # refused, after all of that is read
    go_on.set()
    attacker.attempts = 1
    reply = await attacker.agree(torch.zeros(LAYOUT.size))
    assert "keeps no update of that run" in reply.failure.reason
    assert attacker.victim._secure._current is None
