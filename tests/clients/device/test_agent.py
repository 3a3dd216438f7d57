"""The device agent: runs, buffers, training, scoring and cancellation."""

import asyncio
import threading

import pytest
import torch

from isthmus.errors import AdmissionRefused, IsthmusError, TaskError, UpdateError
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.transport.shared_memory import offered, opened
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.task_host import InProcessHost
from isthmus_clients.training.personal_state import PersonalStates

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


@pytest.fixture
def opening(write_task, make_job, tmp_path):
    """A request that opens a run of the table task."""

    def opening(run_id="run", methods="pass", *overrides):
        write_task(methods)
        job = make_job(*overrides).model_dump_json()
        work = link_pb2.OpenRun(run_id=run_id, job=job, base=str(tmp_path), layout=LAYOUT.header)
        return link_pb2.Request(id=f"open {run_id}", open=work)

    return opening


@pytest.fixture
def agent():
    return Agent(Participant(name="a", regime="federated"), None)


def train(run_id="run", id_="train"):
    work = link_pb2.TrainLocal(run_id=run_id, round=1, attempt=1)
    return link_pb2.Request(id=id_, train_local=work)


def ignore(progress):
    pass


async def test_open_train_close(agent, opening):
    reply, blob = await agent.work(opening(), None, ignore)
    assert reply.opened.examples == 20
    assert blob is None
    model = agent.buffer(train(), LAYOUT.nbytes)
    model[:] = LAYOUT.encode(LAYOUT.decode(bytearray(LAYOUT.header + bytes(4 * LAYOUT.size))))
    reply, blob = await agent.work(train(), model, ignore)
    assert blob.obj is model.obj  # the update took the model's place
    assert reply.trained.result == describe(model)
    assert LAYOUT.decode(model).any()
    agent.acknowledged(train(), True, "")
    close = link_pb2.Request(close=link_pb2.CloseRun(run_id="run"))
    reply, _ = await agent.work(close, None, ignore)
    assert reply.WhichOneof("outcome") == "closed"
    with pytest.raises(UpdateError, match=r"^the run 'run' is not open on this device$"):
        agent.buffer(train(), LAYOUT.nbytes)


@pytest.mark.parametrize(("accepted", "is_reused"), [(True, True), (False, False)])
async def test_memory_that_the_server_may_be_reading_is_not_reused(opening, accepted, is_reused):
    agent = Agent(Participant(name="a", regime="federated"), None, shares=True)
    await agent.work(opening(), None, ignore)
    model = agent.buffer(train(), LAYOUT.nbytes)
    model[:] = LAYOUT.encode(torch.zeros(LAYOUT.size))
    _, update = await agent.work(train(), model, ignore)
    with opened(offered(update), LAYOUT.nbytes) as file:
        agent.acknowledged(train(), accepted, "")
        assert file.read() == bytes(update)
    assert (agent.buffer(train(), LAYOUT.nbytes).obj is update.obj) == is_reused


async def test_the_link_names_an_update_that_may_pass_as_a_file(opening):
    agent = Agent(Participant(name="a", regime="federated"), None, shares=True)
    await agent.work(opening(), None, ignore)
    model = agent.buffer(train(), LAYOUT.nbytes)
    model[:] = LAYOUT.encode(torch.zeros(LAYOUT.size))
    reply, update = await agent.work(train(), model, ignore)
    assert reply.trained.result == link_pb2.Blob(size=len(update))


@pytest.mark.parametrize("kind", ["train_local", "score"])
async def test_work_without_a_model_is_refused_by_name(agent, opening, kind):
    """The server did not announce a model, so no memory was asked for."""
    request = link_pb2.Request()
    getattr(request, kind).run_id = "run"
    await agent.work(opening(), None, ignore)
    with pytest.raises(UpdateError, match=f"^the request '{kind}' came without a model$"):
        await agent.work(request, None, ignore)
    await agent.work(link_pb2.Request(close=link_pb2.CloseRun(run_id="run")), None, ignore)
    with pytest.raises(IsthmusError):
        await agent.work(request, None, ignore)


async def test_memory_is_allocated_for_exactly_one_model_of_an_open_run(agent, opening):
    with pytest.raises(UpdateError, match="'run' is not open"):
        agent.buffer(train(), LAYOUT.nbytes)
    await agent.work(opening(), None, ignore)
    for size in (0, LAYOUT.nbytes - 1, 2**60):
        with pytest.raises(UpdateError, match=f"1 models in {size} bytes were announced; a model"):
            agent.buffer(train(), size)
    assert len(agent.buffer(train(), LAYOUT.nbytes)) == LAYOUT.nbytes


async def test_the_next_model_takes_the_memory_of_an_update_that_is_acknowledged(agent, opening):
    await agent.work(opening(), None, ignore)
    model = agent.buffer(train(), LAYOUT.nbytes)
    model[:] = LAYOUT.encode(torch.zeros(LAYOUT.size))
    reply, blob = await agent.work(train(), model, ignore)
    meanwhile = agent.buffer(train(id_="other"), LAYOUT.nbytes)
    meanwhile[:] = bytes(LAYOUT.nbytes)
    assert describe(blob) == reply.trained.result  # the server may still fetch it
    agent.acknowledged(train(), True, "")
    assert agent.buffer(train(id_="next"), LAYOUT.nbytes).obj is model.obj
    assert agent.buffer(train(id_="next but one"), LAYOUT.nbytes).obj is not model.obj


def score(candidates, secure=b""):
    listed = [link_pb2.Candidate(of=of) for of in candidates]
    work = link_pb2.Score(run_id="run", comparison=1, attempt=1, candidates=listed, secure=secure)
    return link_pb2.Request(id="score", score=work)


async def test_models_are_scored_on_the_devices_own_data(agent, opening):
    methods = """
        def score(self, output, target):
            return (output.argmax(-1) != target).float()
    """
    await agent.work(opening("run", methods), None, ignore)
    never, always = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    never[0], always[2] = 1.0, 1.0  # by their bias alone: class 0, and class 2
    request = score([[0], [1], [0, 1]])
    payload = agent.buffer(request, 2 * LAYOUT.nbytes)
    payload[:] = LAYOUT.encode(never) + LAYOUT.encode(always)
    reply, blob = await agent.work(request, payload, ignore)
    target = agent.host.run.dataset.tensors[1]
    shares = [float((target != of).double().mean()) for of in (0, 2)]
    assert blob is None
    assert list(reply.scored.scores[:2]) == shares
    assert reply.scored.scores[2] == shares[0]  # the first of the largest two


@pytest.mark.parametrize("request_", [train(), score([[0]])])
async def test_a_secure_run_sends_nothing_in_plaintext(request_, agent, opening):
    await agent.work(opening("run", "pass", "federated.secure_aggregation=true"), None, ignore)
    sent = bytearray(LAYOUT.encode(torch.ones(LAYOUT.size)))
    model = bytearray(sent)
    with pytest.raises(UpdateError, match="would send this device's own figures in plaintext"):
        await agent.work(request_, model, ignore)
    assert model == sent  # and nothing was computed


async def test_only_received_models_are_scored(agent, opening):
    await agent.work(opening(), None, ignore)
    with pytest.raises(UpdateError, match="9 models are to be scored, and the maximum is 8"):
        agent.buffer(score([[8]]), 9 * LAYOUT.nbytes)
    with pytest.raises(UpdateError, match=f"2 models in {LAYOUT.nbytes} bytes were announced"):
        agent.buffer(score([[0, 1]]), LAYOUT.nbytes)
    model = bytearray(LAYOUT.encode(torch.zeros(LAYOUT.size)))
    for candidates in ([[1]], [[]]):
        with pytest.raises(UpdateError, match=r"is to be scored and 1 came|bytes were announced"):
            await agent.work(score(candidates), model, ignore)


async def test_a_gradient_follows_the_model(agent, opening):
    """It is added in every step, so three steps of plain descent move three times as far by it."""
    await agent.work(opening("run", "pass", "federated.local_steps=3"), None, ignore)
    gradient = torch.linspace(-0.01, 0.01, LAYOUT.size)
    ends = []
    for with_it in (False, True):
        request = train()
        request.train_local.with_gradient = with_it
        parts = [torch.zeros(LAYOUT.size), *([gradient] if with_it else [])]
        payload = agent.buffer(request, len(parts) * LAYOUT.nbytes)
        payload[:] = b"".join(LAYOUT.encode(part) for part in parts)
        reply, blob = await agent.work(request, payload, ignore)
        assert reply.trained.result == describe(blob)
        ends.append(LAYOUT.decode(blob))
    # The update is start minus end; the gradients of the loss are almost equal in both runs.
    torch.testing.assert_close(ends[1] - ends[0], 3 * 0.1 * gradient, atol=2e-4, rtol=0)


async def test_opening_another_run_closes_the_first(agent, opening):
    await agent.work(opening("one"), None, ignore)
    await agent.work(opening("two"), None, ignore)
    agent.buffer(train("two"), LAYOUT.nbytes)
    with pytest.raises(UpdateError, match="'one' is not open"):
        agent.buffer(train("one"), LAYOUT.nbytes)


async def test_a_run_that_fails_to_open_leaves_no_open_run(agent, opening):
    with pytest.raises(TaskError, match="is empty"):
        await agent.work(
            opening("run", "def local_data(self, participant):\n    return rows(0, 0)"),
            None,
            ignore,
        )
    with pytest.raises(UpdateError, match="'run' is not open"):
        agent.buffer(train(), LAYOUT.nbytes)


async def test_a_client_refuses_requests_for_datacenters(agent):
    request = link_pb2.Request(train_steps=link_pb2.TrainSteps())
    with pytest.raises(
        AdmissionRefused, match="an edge client does not support the request 'train_steps'"
    ):
        await agent.work(request, None, ignore)


async def test_cancelled_work_stops_while_the_link_stays_alive(agent, opening):
    await agent.work(opening("run", "pass", "federated.local_steps=1000000"), None, ignore)
    model = agent.buffer(train(), LAYOUT.nbytes)
    model[: len(LAYOUT.header)] = LAYOUT.header
    started = asyncio.Event()
    loop, here = asyncio.get_running_loop(), threading.get_ident()

    def report(progress):
        assert threading.get_ident() != here  # off the event loop
        loop.call_soon_threadsafe(started.set)

    working = asyncio.create_task(agent.work(train(), model, report))
    await started.wait()
    agent.cancel(train(), "")
    with pytest.raises(TaskError, match="no longer wants the update of this round"):
        await working
    agent.acknowledged(train(), False, "too late: the request has ended")


async def test_a_damaged_personal_state_is_told_to_the_server(write_task, make_job, tmp_path):
    write_task("pass")
    exchanged = TensorLayout.from_shapes({"weight": (3, 4)})
    opening = link_pb2.OpenRun(
        run_id="run",
        job=make_job(
            "exchange.personal=['bias']", "federated.secure_aggregation=false"
        ).model_dump_json(),
        base=str(tmp_path),
        layout=exchanged.header,
        personal=TensorLayout.from_shapes({"bias": (3,)}).header,
    )
    states = PersonalStates(tmp_path / "states")
    who = Participant(name="a", regime="federated")
    agent = Agent(who, None, host=InProcessHost(who, None, None, 1, states=states))
    await agent.work(link_pb2.Request(id="open", open=opening), None, ignore)
    notes = []
    for round_ in (1, 2, 3):
        request = train()
        request.train_local.round = round_
        model = agent.buffer(request, exchanged.nbytes)
        model[:] = exchanged.encode(torch.zeros(exchanged.size))
        reply, _ = await agent.work(request, model, lambda each: notes.append(each.note))
        assert reply.trained.steps
        if round_ == 1:
            (file,) = (tmp_path / "states").rglob("1-*.safetensors")
            file.write_bytes(file.read_bytes()[:-1])
    (note,) = filter(None, notes)
    assert "the one of round 1 was damaged" in note
