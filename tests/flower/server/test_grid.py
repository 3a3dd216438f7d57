"""Unmodified Flower strategies and ClientApps over Isthmus connections."""

import asyncio
import random

import numpy as np
import pytest
from tests.server.waiting import wait_until

from isthmus.task import Participant
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_flower import messages as flower_messages
from isthmus_flower.device.client_app import FlowerRun
from isthmus_flower.server.grid import LinkGrid

APP = '''
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

app, fixed, adaptive = ClientApp(), ClientApp(), ClientApp()


def train(message, context):
    """A step that depends on the device and on the number of steps in its state."""
    own = context.node_config["partition-id"]
    steps = context.state.setdefault("steps", MetricRecord({"made": 0}))
    steps["made"] += 1
    step = np.float32(0.1 * (own + 1) * steps["made"])
    received = message.content["arrays"]
    arrays = ArrayRecord({key: Array(array.numpy() + step) for key, array in received.items()})
    metrics = MetricRecord({"num-examples": 10 + own, "train_loss": 1.0 + own})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    far = float(sum(np.abs(array.numpy()).sum() for array in message.content["arrays"].values()))
    metrics = MetricRecord({"num-examples": 10, "far": far})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


app.train()(train)
fixed.train(mods=[fixedclipping_mod])(train)
adaptive.train(mods=[adaptiveclipping_mod])(train)
app.train("noisy", mods=[LocalDpMod(1.0, 0.0, 1.0, 0.1)])(train)
fixed.evaluate()(evaluate)
adaptive.evaluate()(evaluate)


@app.query()
def fail(message, context):
    raise ValueError("no\\nbattery")
'''

NOISE = {"noise_multiplier": 0.5, "num_sampled_clients": 4}
STRATEGIES = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.9},
    "FedProx": {"proximal_mu": 0.1},
    "FedAdagrad": {},
    "FedAdam": {},
    "FedYogi": {},
    "FedMedian": {},
    "FedTrimmedAvg": {"beta": 0.25},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 2},
    "Bulyan": {"num_malicious_nodes": 0},
    "QFedAvg": {"client_learning_rate": 0.1},
    "DifferentialPrivacyServerSideFixedClipping": {"clipping_norm": 0.2, **NOISE},
    "DifferentialPrivacyClientSideFixedClipping": {"clipping_norm": 0.2, **NOISE},
    "DifferentialPrivacyServerSideAdaptiveClipping": {"clipped_count_stddev": 0.5, **NOISE},
    "DifferentialPrivacyClientSideAdaptiveClipping": {"clipped_count_stddev": 0.5, **NOISE},
}
NAMES = ("a", "b", "c", "d")


def app_for(name):
    if "ClientSide" not in name:
        return "app"
    return "fixed" if "Fixed" in name else "adaptive"


def make(name):
    from flwr.serverapp import strategy

    options = dict(STRATEGIES[name])
    if name.startswith("Differential"):
        options["strategy"] = strategy.FedAvg()
    return getattr(strategy, name)(**options)


def model():
    draw = np.random.default_rng(5)
    return flower_messages.ArrayRecord(
        {
            "bias": flower_messages.Array(draw.normal(size=3).astype("f4")),
            "weight": flower_messages.Array(draw.normal(size=(3, 2)).astype("f4")),
        }
    )


@pytest.fixture
def fleet(network, make_job, tmp_path):
    """Devices on a link that have opened a run of an app."""

    class Fleet:
        run_id = "run"
        work = link_pb2.OpenRun

        async def start(self, app="app", names=NAMES, **more):
            (tmp_path / "app.py").write_text(APP)
            self.link = await network.listen()
            self.job = make_job(f'federated.flower.app="app.py:{app}"')
            agents = {}
            for place, name in enumerate(names):
                participant = Participant(name=name, regime="federated", shard=(place, 4))
                agents[name] = network.dial(Agent(participant, None), name)
            await wait_until(lambda: set(names) <= self.link.peers.keys())
            for name in names:
                request = link_pb2.Request(id=self.link.new_id(), open=self.opening())
                reply = await self.link.ask(name, request)
                assert reply.WhichOneof("outcome") == "opened", reply.failure.reason
            loop = asyncio.get_running_loop()
            self.grid = LinkGrid(self.link, loop, "run", lambda: self.link.peers, **more)
            self.devices = agents

        def opening(self):
            return link_pb2.OpenRun(
                run_id="run", job=self.job.model_dump_json(), base=str(tmp_path)
            )

        async def send(self, kind, to, records=None):
            """Send one message from another thread, as a strategy does."""
            if records is None:
                records = flower_messages.RecordDict({"arrays": model()})
            sent = self.grid.create_message(records, kind, flower_messages.node_of(to), "group")
            (reply,) = await asyncio.to_thread(self.grid.send_and_receive, [sent])
            return reply

        def in_process_grid(self, app):
            """The same nodes called in this process, for comparison."""
            return InProcessGrid(tmp_path, self.opening())

    return Fleet()


class InProcessGrid:
    """A Grid of apps that are called as functions."""

    def __init__(self, directory, opening):
        self.apps = {}
        for place, name in enumerate(NAMES):
            participant = Participant(name=name, regime="federated", shard=(place, 4))
            self.apps[flower_messages.node_of(name)] = FlowerRun(opening, participant, None)

    def get_node_ids(self):
        return sorted(self.apps)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in list(messages):
            app = self.apps[message.metadata.dst_node_id]
            records = flower_messages.RecordDict(
                {
                    name: type(record)(dict(record.items()))
                    for name, record in message.content.items()
                }
            )
            copy = flower_messages.message(
                records,
                kind=message.metadata.message_type,
                source=1,
                to=app.context.node_id,
                id_="m",
            )
            replies.append(app.app(copy, app.context))
        return replies


@pytest.mark.parametrize("name", STRATEGIES)
async def test_strategies_and_apps_compute_the_same_as_in_one_process(name, fleet):
    await fleet.start(app_for(name))

    def start(grid):
        np.random.seed(3)  # Flower's noise
        random.seed(3)  # Flower samples nodes in random order
        with flower_messages.captured_warnings():
            return make(name).start(grid, initial_arrays=model(), num_rounds=2, timeout=30)

    result = await asyncio.to_thread(start, fleet.grid)
    expected = start(fleet.in_process_grid(app_for(name)))
    assert result.arrays.keys() == expected.arrays.keys()
    for key, array in result.arrays.items():
        assert np.array_equal(array.numpy(), expected.arrays[key].numpy())
        assert not np.array_equal(array.numpy(), model()[key].numpy())
    assert result.train_metrics_clientapp == expected.train_metrics_clientapp
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert set(result.evaluate_metrics_clientapp) == {1, 2}
    assert not fleet.link.published_blobs


async def test_the_link_determines_the_sender_of_a_reply(fleet):
    """Flower's LocalDpMod replies to its own reply."""
    await fleet.start()
    reply = await fleet.send("train.noisy", "b")
    assert reply.has_content()
    assert reply.metadata.src_node_id == flower_messages.node_of("b")
    assert reply.metadata.dst_node_id == flower_messages.SERVER_NODE
    assert reply.metadata.reply_to_message_id == "run/1"
    assert reply.metadata.group_id == "group"


async def test_a_failure_on_a_device_is_an_error_with_its_reason(fleet, tmp_path):
    await fleet.start()
    reply = await fleet.send("query", "a")
    line = APP.splitlines().index('    raise ValueError("no\\nbattery")') + 1
    says = f"the app failed at {tmp_path}/app.py:{line}: ValueError: no battery"
    assert reply.error == flower_messages.Error(2, says)
    reply = await fleet.send("evaluate.more", "a")
    assert reply.error.reason.startswith(
        "the app has no function under @app.evaluate(\"more\") for 'evaluate.more' messages; it has"
    )
    reply = await fleet.send("train", "nobody")
    assert reply.error.code == flower_messages.ErrorCode.NODE_UNAVAILABLE
    reply = await fleet.send("train", "c", flower_messages.RecordDict())
    assert reply.error.reason.endswith("app.py:16: KeyError: 'arrays'")


async def test_lost_and_late_devices_are_errors(fleet, network, timeouts):
    await fleet.start(seconds=77)

    async def never_reply(device, request, model):
        await asyncio.Event().wait()

    late = await network.join("late", never_reply)
    sending = asyncio.create_task(fleet.send("train", "late"))
    await wait_until(lambda: late.requests)
    await timeouts.expire(77)
    assert (await sending).error == flower_messages.Error(4, "it did not answer within 77 s")
    await wait_until(lambda: late.cancelled)

    async def disconnect(device, request, model):
        fleet.link.disconnect("gone", "lost")
        await asyncio.Event().wait()

    await network.join("gone", disconnect)
    reply = await fleet.send("train", "gone")
    assert reply.error == flower_messages.Error(5, "lost")
    assert not fleet.link.published_blobs


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
async def test_a_time_that_is_no_duration_is_refused(fleet, network, seconds):
    await fleet.start()

    async def report_time(device, request, model):
        failed = link_pb2.AppReply(error_code=1, error="no power", seconds=seconds)
        return link_pb2.Reply(app_replied=failed), None

    await network.join("liar", report_time)
    reply = await fleet.send("train", "liar")
    assert reply.error.reason.endswith("s is not a duration")


async def test_the_size_of_replies_is_limited_before_allocation(fleet, network):
    await fleet.start(max_bytes=1000)

    async def announce_huge_reply(device, request, model):
        huge = link_pb2.Blob(sha256=bytes(32), size=1 << 40)
        return link_pb2.Reply(app_replied=link_pb2.AppReply(records=huge)), None

    await network.join("boaster", announce_huge_reply)
    reply = await fleet.send("train", "boaster")
    assert reply.error.reason == (
        "its reply has 1099511627776 bytes, and the limit for each reply is 1000 "
        "(federated.flower.max_bytes)"
    )


async def test_a_device_refuses_messages_above_the_jobs_limit(network, make_job, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    link = await network.listen()
    job = make_job('federated.flower.app="app.py:app"', "federated.flower.max_bytes=100")
    network.dial(Agent(Participant(name="a", regime="federated"), None), "a")
    await wait_until(lambda: "a" in link.peers)
    opening = link_pb2.OpenRun(run_id="run", job=job.model_dump_json(), base=str(tmp_path))
    await link.ask("a", link_pb2.Request(id="1", open=opening))
    payload = bytearray(101)
    blob = describe(payload)
    link.publish(blob, payload)
    work = link_pb2.AppMessage(run_id="run", records=blob)
    reply = await link.ask("a", link_pb2.Request(id="2", app=work))
    assert reply.failure.reason == (
        "a message of 101 bytes was announced where federated.flower.max_bytes=100"
    )
    work.run_id = "other"
    reply = await link.ask("a", link_pb2.Request(id="3", app=work))
    assert reply.failure.reason == "the run 'other' is not open on this device with an app"


async def test_messages_can_be_pushed_and_their_replies_pulled(fleet):
    await fleet.start()
    pushed = [
        fleet.grid.create_message(
            flower_messages.RecordDict({"arrays": model()}),
            "train",
            flower_messages.node_of(name),
            "",
        )
        for name in NAMES
    ]

    def push_and_pull():
        ids = list(fleet.grid.push_messages(pushed))
        replies = []
        while len(replies) < len(ids):
            replies += fleet.grid.pull_messages(ids)
        return ids, replies

    ids, replies = await asyncio.to_thread(push_and_pull)
    assert sorted(ids) == sorted(reply.metadata.reply_to_message_id for reply in replies)
    assert all(reply.has_content() for reply in replies)
