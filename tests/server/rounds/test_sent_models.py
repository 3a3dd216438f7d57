"""What participants are sent of the model, counted on the wire: no model that they hold.

Receipts have the bytes of blobs (models, changes and updates) and of messages, of which secure
aggregation has the most. What else is on the wire is the framing of HTTP/2, and what opens and
closes the run, which belongs to no attempt.
"""

import pytest
from tests.server.rounds.policies import write_policy
from tests.server.rounds.test_device_evaluation import WITHOUT_CENTRAL
from tests.server.waiting import wait_until

from isthmus_privacy.compression.model_change import ChangeCodec
from isthmus_server.observability.run_figures import RunFigures
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.records import RoundRecord

NAMES = ("a", "b", "c", "d")
LARGE = (
    WITHOUT_CENTRAL
    + """
def model(self):
    return nn.Sequential(nn.Linear(4, 30000), nn.Linear(30000, 3))

def optimizer(self, parameters, participant):
    return torch.optim.SGD(parameters, lr=1e-5)
"""
)
COMPARES = """
from isthmus_server.strategy import Compare, Plan

class Mine:
    def __init__(self, strategy): pass

    def plan(self, seen):
        if seen.round == 3 and not seen.comparisons:
            return Compare(("initial", "current"), 4, "to know", {"asked": True})
        return Plan("federated", "it is planned", dict(seen.state))
"""
SETTINGS = (
    "federated.clients=4",
    "federated.cohort=4",
    "federated.quorum=4",
    "evaluation.devices=4",
    "evaluation.quorum=4",
    "rounds=4",
    "time.join_seconds=100",
)
MESSAGES = 20_000
"""More than the bytes of messages to a device in a secure sum of four."""
FRAMING = 80
"""More than the bytes of HTTP/2's frames of a call, in one direction."""
SMALL = (
    "federated.secure_aggregation=true",
    "federated.compression={bits=3,one_in=5}",
    "federated.download_bits=3",
)


async def counted_run(deployment, network, *overrides, methods=LARGE):
    """A run of which each device has a proxy: attempts, figures, bytes by device, calls, model.

    Without the bytes of requests that open and close the run, and of the answers.
    """
    await deployment.start(methods, names=())
    proxies = []
    for name in NAMES:
        proxy, port = await network.start_proxy()
        proxies.append(proxy)
        network.dial(deployment.device(name), name, port)
    await wait_until(lambda: set(NAMES) <= deployment.link.peers.keys())
    store = deployment.create_run("run", *SETTINGS, *overrides)
    parts = RunParts.of(store, deployment.link)
    figures = RunFigures("run", store.job)
    parts.events.subscribe(figures)
    opening = {"up": 0, "down": 0}
    calls = 0
    ask = deployment.link.ask

    async def counting_ask(name, request):
        nonlocal calls
        calls += 1
        reply = await ask(name, request)
        if request.WhichOneof("work") in ("open", "close"):
            opening["down"] += request.ByteSize() / len(NAMES)
            opening["up"] += reply.ByteSize() / len(NAMES)
        return reply

    deployment.link.ask = counting_ask
    before = [carried(proxy) for proxy in proxies]
    await Coordinator(parts).run()
    moved = [
        {way: after[way] - first[way] - opening[way] for way in after}
        for after, first in zip(map(carried, proxies), before, strict=True)
    ]
    return list(store.attempts()), figures, moved, calls, parts.model


def carried(proxy):
    """Bytes that a proxy has forwarded, by direction."""
    return {way: sum(each[way] for each in proxy.carried) for way in ("up", "down")}


@pytest.mark.parametrize(
    ("methods", "settings"),
    [
        (LARGE, SMALL),
        (LARGE, ("federated.secure_aggregation=false",)),
        (WITHOUT_CENTRAL, ("federated.secure_aggregation=true",)),
    ],
    ids=["compressed", "plain", "tiny"],
)
async def test_receipts_and_metrics_have_the_bytes_that_are_on_the_wire(
    deployment, network, tmp_path, methods, settings
):
    """With evaluations, a comparison, compression and an attempt that fails.

    The model of 15 parameters is smaller than the messages of a secure sum.
    """
    policy = write_policy(tmp_path, "compares", COMPARES)
    deployment.faults["c"] = {(2, 1): "the battery is empty"}
    attempts, figures, moved, calls, _ = await counted_run(
        deployment, network, policy, *settings, methods=methods
    )
    assert [(each.round, each.attempt) for each in attempts] == [
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 1),
        (4, 1),
    ]
    for way, counted in (("down", figures.bytes_down), ("up", figures.bytes_up)):
        wire = sum(each[way] for each in moved)
        assert counted == sum(getattr(each.cost, f"bytes_{way}") for each in attempts)
        # What is received is acknowledged: gRPC's flow control takes a thousandth of it.
        acknowledged = 0.002 * figures.bytes_down if way == "up" else 0
        # The frames of a request or a reply, with its receipt: only of tiny models they are more
        # than a hundredth of the bytes.
        framing = FRAMING * calls
        assert counted <= wire <= 1.01 * counted + acknowledged + framing, way


async def test_a_device_is_sent_each_model_once(deployment, network, tmp_path):
    """Whatever it is for: training, a second attempt, an evaluation, a comparison."""
    policy = write_policy(tmp_path, "compares", COMPARES)
    deployment.faults["c"] = {(2, 1): "the battery is empty"}
    attempts, _, moved, _, model = await counted_run(
        deployment, network, policy, "federated.secure_aggregation=false"
    )
    size = model.layout.nbytes
    received = [
        {receipt.participant: receipt.bytes_out for receipt in each.receipts} for each in attempts
    ]
    # The first model comes with the first training, and each later one with its evaluation.
    assert received == [dict.fromkeys(NAMES, size)] + [dict.fromkeys(NAMES, 0)] * 4
    rounds = [each for each in attempts if isinstance(each, RoundRecord)]
    for each in rounds:
        assert 4 * size < each.evaluation.bytes_down < 4 * size + 8000  # and messages
    # Of the two models that are compared devices hold the current one.
    (comparison,) = rounds[2].comparisons
    assert [receipt.bytes_out for receipt in comparison.receipts] == [size] * 4
    for each in moved:
        assert each["down"] == pytest.approx(6 * size, rel=0.01)


async def test_an_evaluation_sends_the_change_of_the_model(deployment, network):
    attempts, _, moved, _, model = await counted_run(deployment, network, *SMALL)
    layout = model.layout
    change = ChangeCodec(layout.size, layout.trained_size, 3).nbytes
    evaluated = [each.evaluation.bytes_down for each in attempts]
    # With the messages of a secure sum of four, and of the loss of devices in it.
    assert all(0 < sent <= 4 * (change + MESSAGES) for sent in evaluated)
    trained = [{receipt.bytes_out for receipt in each.receipts} for each in attempts]
    assert trained == [{layout.nbytes}, {0}, {0}, {0}]
    for each in moved:
        # Each round has two secure sums of the training, and one of its evaluation.
        assert each["down"] < 1.01 * (layout.nbytes + 4 * change + 12 * MESSAGES)
