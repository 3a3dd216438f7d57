"""In a secure run a device's failures tell the server nothing, even if it makes them happen.

The server here is the attacker: it chooses the models, and reads every byte that it receives.
"""

import asyncio
import contextlib
import math
import threading
from textwrap import dedent

import pytest
import torch
from tests.server.regimes.secure_run import LAYOUT, NAMES, SecureRun
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.task.code_digest import code_digest
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device import agent as agent_module
from isthmus_clients.device import secure_measurements, task_host
from isthmus_clients.device.agent import Agent
from isthmus_clients.training.withholding import WITHHELD
from isthmus_privacy.purpose import BufferedPurpose, ComparisonPurpose, TrainingPurpose, buffer_name
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.slots import SCORING_SLOTS
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.round_configs import margins, training_config

REQUESTS = 17
SETTINGS = (
    "federated.cohort=5",
    "federated.quorum=4",
    "federated.secure_aggregation=true",
    "time.round_seconds=6000",
)
SECRET = "4711.25"
RAISES = f"raise ValueError(f'cannot use the row {{[{SECRET}]}}')"


class Attacker:
    """A server, with one victim whose bytes it receives through a proxy."""

    def __init__(self, network, make_job, directory, *overrides):
        self.network, self.directory = network, directory
        self.job = make_job(*SETTINGS, *overrides)
        self.attempts = 0

    async def connect(self):
        link = await self.network.listen()
        self.proxy, port = await self.network.start_proxy()
        self.victim = Agent(Participant(name="victim", regime="federated"), None)
        self.network.dial(self.victim, "victim", port)
        await wait_until(lambda: "victim" in link.peers)
        self.opening = link_pb2.OpenRun(
            run_id="run",
            job=self.job.model_dump_json(),
            base=str(self.directory),
            layout=LAYOUT.header,
            task_digest=code_digest(self.job.task.source, self.directory),
        )
        self.context = FederatedContext(link, self.job, self.opening, LAYOUT, self.directory)

    async def ask(self, **work):
        request = link_pb2.Request(id=self.network.link.new_id(), **work)
        return await self.network.link.ask("victim", request)

    async def open(self):
        return await self.ask(open=self.opening)

    def published(self, vector):
        payload = LAYOUT.encode(vector)
        blob = describe(payload)
        self.network.link.publish(blob, payload)
        return blob

    def next_attempt(self, model):
        self.attempts += 1
        return AttemptSpec(
            round=1,
            attempt=self.attempts,
            model=model,
            cohort=dict.fromkeys(NAMES, 20),
            settings=self.job.federated,
        )

    def config(self, spec):
        purpose = TrainingPurpose(self.context.purpose)
        return training_config(self.context, spec, spec.name, purpose.hash)

    async def train(self, vector, *, keep=False):
        spec = self.next_attempt(self.published(vector))
        work = link_pb2.TrainLocal(
            run_id="run", round=1, attempt=spec.attempt, model=spec.model, keep=keep
        )
        if not keep:
            work.secure = self.config(spec).to_bytes()
        return await self.ask(train_local=work)

    async def agree(self, trained):
        """Sum the update that the device keeps, which it trained from the model `trained`."""
        start = (1, self.published(trained).sha256, False, (0, 0, 0))
        name = link_pb2.Blob(sha256=buffer_name("run", 1))
        spec = self.next_attempt(name)
        purpose = BufferedPurpose(self.context.purpose, (start,))
        config = training_config(self.context, spec, spec.name, purpose.hash).to_bytes()
        starts = [link_pb2.BufferedStart(round=1, model=start[1])]
        work = link_pb2.Agree(
            run_id="run", round=1, attempt=spec.attempt, secure=config, starts=starts
        )
        return await self.ask(agree=work)

    async def score(self, vector):
        self.attempts += 1
        blob = self.published(vector)
        config = RoundConfig(
            run_id="run/comparisons",
            round=1,
            attempt=self.attempts,
            model_hash=blob.sha256,
            purpose=ComparisonPurpose(self.context.purpose, ((0,),)).hash,
            size=1,
            slots=SCORING_SLOTS,
            **margins(self.context, self.job.federated),
        )
        work = link_pb2.Score(
            run_id="run",
            comparison=1,
            attempt=self.attempts,
            models=blob,
            candidates=[link_pb2.Candidate(of=[0])],
            secure=config.to_bytes(),
        )
        return await self.ask(score=work)


@pytest.fixture
async def attacker(network, make_job, write_task, tmp_path):
    """An attacker that has opened the run of the table task at the victim."""
    write_task()
    attacker = Attacker(network, make_job, tmp_path)
    await attacker.connect()
    await attacker.open()
    return attacker


def overflows_above(threshold):
    """A model whose loss is nan if a value of the first feature is above the threshold."""
    weight, bias = torch.zeros(3, 4), torch.zeros(3)
    weight[0, 0] = torch.finfo(torch.float32).max / threshold
    return torch.cat([bias, weight.flatten()])  # in the order of the layout


def seen(reply):
    """All that a reply tells, except for the keys, which are random and have one length."""
    trained = reply.trained
    assert len(trained.secure) > 100 or not reply.HasField("trained")
    rest = link_pb2.Reply.FromString(reply.SerializeToString())
    rest.id = ""
    rest.trained.secure = bytes(len(trained.secure))
    return rest.SerializeToString()


async def bisect(attacker, feature):
    """Bisect the largest absolute value of a feature; all that the server sees on the way."""
    replies, answers = set(), set()
    low, high = 0.0, 8.0
    for _ in range(REQUESTS):
        middle = (low + high) / 2
        reply = await attacker.train(overflows_above(middle))
        replies.add(seen(reply))
        answers.add(feature > middle)
        low, high = (middle, high) if feature > middle else (low, middle)
    assert math.isclose(low, feature, abs_tol=1e-3)
    assert answers == {True, False}
    return replies


def largest_feature(attacker):
    rows, _ = attacker.victim.host.run.dataset.tensors
    return float(rows[:, 0].max())


async def test_bisecting_a_feature_with_crafted_models_gives_no_bit(attacker):
    feature = largest_feature(attacker)
    run = attacker.victim.host.run
    for threshold, fails in ((feature * 0.99, True), (feature * 1.01, False)):  # the model works
        payload = LAYOUT.encode(overflows_above(threshold))
        work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
        with pytest.raises(Exception, match="nan") if fails else contextlib.nullcontext():
            run.train(work, payload, lambda progress: None, lambda: False)
    replies = await bisect(attacker, feature)
    assert len(replies) == 1
    assert b"nan" not in attacker.proxy.received


async def test_without_the_zero_update_the_bisection_succeeds(attacker, monkeypatch):
    """A mutation of the protection: the attack above is a real one, and detects its absence."""
    monkeypatch.setattr(task_host, "attempted", lambda what, work: work())
    assert len(await bisect(attacker, largest_feature(attacker))) == 2


def as_method(signature, statement):
    return f"def {signature}:\n    {statement}"


WHERE = {
    "opening": as_method("local_data(self, participant)", RAISES),
    "training": as_method("loss(self, output, target)", RAISES),
    "the optimizer": as_method("optimizer(self, parameters, participant)", RAISES),
    "scoring": as_method("score(self, output, target)", RAISES),
    "a buffer": as_method("loss(self, output, target)", RAISES),
    "an error of Isthmus": dedent(
        f"""
        def forward(self, model, inputs):
            from isthmus.errors import AdmissionRefused
            raise AdmissionRefused("{SECRET}")
        """
    ),
    "memory": as_method("forward(self, model, inputs)", f"raise MemoryError({SECRET})"),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("protected", [True, False])
async def test_the_text_of_an_exception_never_reaches_the_server(
    network, make_job, write_task, tmp_path, monkeypatch, caplog, where, protected
):
    """Raw data in it is in the device's own log, and in no byte that the server receives.

    Without the protection it is received: the test detects a removal.
    """
    write_task(WHERE[where])
    if not protected:
        for module in (task_host, secure_measurements):
            monkeypatch.setattr(module, "attempted", lambda what, work: work())
        monkeypatch.setattr(
            agent_module, "constant_failures", lambda *_, **__: contextlib.nullcontext()
        )
    buffered = ["federated.mode=buffered"] if where == "a buffer" else []
    attacker = Attacker(network, make_job, tmp_path, *buffered)
    await attacker.connect()
    opened = await attacker.open()
    start = torch.zeros(LAYOUT.size)
    if where == "opening":
        reply = opened
    elif where == "scoring":
        reply = await attacker.score(start)
    elif where == "a buffer":
        reply = await attacker.train(start, keep=True)
        if protected:
            assert reply.trained == link_pb2.Trained()
            reply = await attacker.agree(start)
    else:
        reply = await attacker.train(start)
    assert (SECRET.encode() in attacker.proxy.received) == (not protected)
    if protected and where in ("opening", "memory"):  # which a server can have used up
        assert reply.failure.reason == WITHHELD
    elif protected:
        assert reply.trained == link_pb2.Trained(secure=reply.trained.secure)
    # gRPC logs by itself when a loop closes while its poller has an event for it.
    logged = [each for each in caplog.records if each.name.startswith("isthmus")]
    text = "\n".join(each.getMessage() for each in logged)
    assert SECRET in text
    if protected:
        assert text.count("Traceback") == 1
        assert "isthmus_clients" not in text.partition("Traceback")[2]  # only the task's lines


async def test_refusals_that_depend_on_the_request_only_keep_their_sentence(attacker):
    attacker.attempts = 4
    await attacker.train(torch.zeros(LAYOUT.size))
    attacker.attempts = 4
    reply = await attacker.train(torch.ones(LAYOUT.size))
    assert "is not after round 1 attempt 5" in reply.failure.reason
    reply = await attacker.ask(agree=link_pb2.Agree(run_id="other"))
    assert reply.failure.reason == "the run 'other' is not open on this device"


@pytest.mark.parametrize("ending", ["cancel", "close"])
@pytest.mark.parametrize("keep", [False, True])
async def test_work_that_the_server_ends_is_no_zero_update(
    network, make_job, write_task, tmp_path, ending, keep
):
    """It could end that of all devices but one: their sum would be that one's update."""
    write_task()
    attacker = Attacker(network, make_job, tmp_path, "federated.mode=buffered")
    await attacker.connect()
    await attacker.open()
    entered, ended = threading.Event(), threading.Event()

    def fails(*_):  # as a host does whose process was killed, or was asked to stop
        entered.set()
        assert ended.wait(30)
        raise TaskError("the process of the task ended")

    attacker.victim.host.train = fails
    training = asyncio.create_task(attacker.train(torch.zeros(LAYOUT.size), keep=keep))
    assert await asyncio.to_thread(entered.wait, 30)
    if ending == "close":
        await attacker.ask(close=link_pb2.CloseRun(run_id="run"))
    else:
        peer = network.link.peers["victim"]
        (id_,) = peer.pending
        peer.send_and_keep(link_pb2.Envelope(cancel=link_pb2.Cancel(id=id_)))
        await wait_until(lambda: attacker.victim._cancelled)
    ended.set()
    reply = await training
    assert reply.failure.reason == "the server has cancelled this request, or closed its run"
    assert attacker.victim._secure._kept is None
    assert attacker.victim._secure._current is None


async def test_a_kept_update_is_summed_only_for_the_job_it_was_trained_with(
    network, make_job, write_task, tmp_path
):
    """Otherwise all others could train with a rate of zero, and the run be opened again."""
    write_task()
    attacker = Attacker(network, make_job, tmp_path, "federated.mode=buffered")
    await attacker.connect()
    await attacker.open()
    start = torch.zeros(LAYOUT.size)
    await attacker.train(start, keep=True)
    changed = ("federated.mode=buffered", "task.settings.lr=0.0")
    attacker.job = make_job(*SETTINGS, *changed)
    attacker.opening.job = attacker.job.model_dump_json()
    link = network.link
    attacker.context = FederatedContext(link, attacker.job, attacker.opening, LAYOUT, tmp_path)
    assert (await attacker.open()).HasField("opened")
    reply = await attacker.agree(start)
    assert reply.failure.code == "config-purpose-differs"


async def test_the_server_cannot_choose_the_figures(attacker):
    spec = attacker.next_attempt(attacker.published(torch.zeros(LAYOUT.size)))
    exact = RoundConfig.from_bytes(attacker.config(spec).to_bytes().replace(b"loss", b"age!"))
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=spec.attempt, model=spec.model)
    work.secure = exact.to_bytes()
    reply = await attacker.ask(train_local=work)
    assert (
        "this device gives ['loss', 'other_weight', 'over_range', 'over_weight', 'unusable']"
        in reply.failure.reason
    )


@pytest.fixture
async def run(network, make_job, write_task, tmp_path):
    """Five devices; those that `settings.broken` names raise in training and in scoring."""

    async def run(broken, *overrides):
        write_task(
            """
            def local_data(self, participant):
                self.me = participant.name
                return rows(20, seed=sum(participant.name.encode()))

            def forward(self, model, inputs):
                if self.me in self.settings["broken"]:
                    raise ValueError("broken")
                return model(inputs)
            """
        )
        await network.listen()
        job = make_job(*SETTINGS, f"task.settings.broken='{broken}'", *overrides)
        run = SecureRun(network, job, tmp_path)
        await run.open()
        return run

    return run


async def test_an_unusable_update_does_not_count_and_only_its_number_is_known(run):
    opened = await run("c")
    result = await opened.train()
    assert result.training["unusable"] == 1
    assert result.training["examples"] == 20 * 4
    expected = await opened.plain_mean(NAMES.replace("c", ""))
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)
    assert [receipt.status for receipt in result.receipts] == ["accepted"] * 5
    assert not any(receipt.reason for receipt in result.receipts)


async def test_too_few_usable_updates_fail_the_attempt(run):
    opened = await run("bc")
    sentence = (
        "^2 of 5 devices had no usable update and the quorum is 4; the devices' own logs say why$"
    )
    with pytest.raises(AttemptFailed, match=sentence) as caught:
        await opened.train()
    assert {receipt.status for receipt in caught.value.receipts} == {"rejected"}


async def test_a_sum_without_weight_fails_the_attempt(run):
    opened = await run(NAMES)
    sentence = "^no device had a usable update; the devices' own logs say why$"
    with pytest.raises(AttemptFailed, match=sentence):
        await opened.train()
