"""A transfer that moves is not ended by the limits of a round; one that is too slow is."""

import asyncio
import contextlib
import logging
import os
import types

import pytest
from tests.server.waiting import wait_until

from isthmus.transport.blobs import describe, into
from isthmus.transport.requests import model_of
from isthmus.transport.transfer_time import TransferTime
from isthmus.transport.uplink import CHANNEL_OPTIONS
from isthmus.wire import link_pb2
from isthmus_clients.device.link_rate import too_slow
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.call import CallFailed, call
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundPlanned

LARGE = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 60000), nn.Linear(60000, 3))
"""
RATE = 400_000
"""Of the slow link, in bytes per second: the model takes five seconds in each direction."""


async def outcome_of_slow_device(deployment, network, *settings):
    """The receipt of a device behind a slow link in a round of three seconds, and all accepted."""
    await deployment.start(LARGE)
    proxy, port = await network.start_proxy()
    network.dial(deployment.device("d"), "d", port)
    await wait_until(lambda: "d" in deployment.link.peers)
    store = deployment.create_run(
        "run",
        "federated.cohort=4",
        "time.lease_seconds=0.5",
        "time.round_seconds=3",
        "rounds=1",
        "attempts=9",
        *settings,
    )

    def slow_down(event):
        if isinstance(event, RoundPlanned):
            proxy.rate = RATE

    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.events.subscribe(slow_down)
    await coordinator.run()
    (record,) = read_report(store).rounds
    (receipt,) = (each for each in record.receipts if each.participant == "d")
    return receipt, record.participants.accepted


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_transfer_that_moves_takes_longer_than_the_round(deployment, network, secure):
    secure = f"federated.secure_aggregation={secure}"
    receipt, accepted = await outcome_of_slow_device(
        deployment, network, secure, "time.secure_step_seconds=20"
    )
    assert (receipt.status, accepted) == ("accepted", 4)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_transfer_below_the_least_rate_uses_up_the_round(deployment, network, secure):
    secure = f"federated.secure_aggregation={secure}"
    settings = f"time.least_rate={100 * RATE}", "time.secure_step_seconds=20"
    receipt, accepted = await outcome_of_slow_device(deployment, network, secure, *settings)
    assert receipt.status != "accepted"
    assert accepted == 3


async def test_a_device_says_before_a_round_that_its_link_is_too_slow(deployment, network, caplog):
    await deployment.start(LARGE)
    proxy, port = await network.start_proxy()
    uplink = deployment.device("d").agent.uplink(f"127.0.0.1:{port}")
    network.connections.append(asyncio.create_task(uplink.run()))
    await wait_until(lambda: "d" in deployment.link.peers)
    store = deployment.create_run(
        "run",
        "federated.cohort=4",
        "time.lease_seconds=0.5",
        "time.round_seconds=3",
        f"time.least_rate={100 * RATE}",
        "rounds=4",
        "attempts=9",
    )
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    proxy.rate = RATE / 2
    with caplog.at_level(logging.WARNING):
        await coordinator.run()
    (said,) = (each for each in caplog.messages if "link moves" in each)
    assert said.startswith("d: this device's link moves ")
    assert "it most likely ends without this device; use a faster link, or ask for a job" in said
    rate = uplink.received.rate
    assert rate is not None
    assert rate < RATE
    assert coordinator.parts.link.peers["d"].transfer_time.count > 0


async def test_chunks_that_take_longer_than_a_lease_become_smaller(network):
    """In both directions: the usual ones end the stream, and would do so whenever it is opened."""
    link = await network.listen(lease_seconds=2.0)
    proxy, port = await network.start_proxy()
    payload = os.urandom(1 << 20)
    model = describe(payload)
    received = []

    async def respond(participant, request, blob):
        received.append(bytes(blob))
        result = bytearray(blob)
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    await network.join("d", respond, port, wanted=model_of)
    link.publish(model, memoryview(payload))
    proxy.rate = 80_000
    request = link_pb2.Request(id=link.new_id(), train_local=link_pb2.TrainLocal(model=model))
    reply = await link.ask("d", request)
    assert received == [payload]
    result = bytearray(len(payload))
    await link.fetch("d", reply.trained.result, into(result))
    assert result == payload
    assert len(proxy.carried) > 1


PAYLOAD = os.urandom(400_000)
MODEL = describe(PAYLOAD)


@contextlib.asynccontextmanager
async def repeating(network, repeat):
    """A device `d` that repeats something for as long as the block runs, and the server's link."""
    link = await network.listen()
    link.publish(MODEL, memoryview(PAYLOAD))
    async with network.raw_stream(CHANNEL_OPTIONS, name="d") as (_, send, receive):
        await receive("welcome")
        task = asyncio.create_task(repeat(send, receive))
        try:
            yield link
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ask_again_and_again(send, receive):
    while True:
        await send(pull=link_pb2.Pull(sha256=MODEL.sha256))
        received = 0
        while received < MODEL.size:
            received += len((await receive("chunk")).data)


async def send_again_and_again(send, receive):
    """The first bytes of the update, and never the rest."""
    request = await receive("request")
    trained = link_pb2.Trained(result=MODEL, examples=1)
    await send(reply=link_pb2.Reply(id=request.id, trained=trained))
    await receive("pull")
    while True:
        await send(chunk=link_pb2.Chunk(sha256=MODEL.sha256, data=PAYLOAD[:65536]))
        await asyncio.sleep(0)


@pytest.mark.parametrize("repeat", [ask_again_and_again, send_again_and_again])
async def test_repeated_bytes_do_not_hold_a_round_open(network, repeat):
    """At the least rate they take two seconds, and the device moves them for ever."""
    async with repeating(network, repeat) as link:
        request = link_pb2.Request(train_local=link_pb2.TrainLocal(model=MODEL))
        limits = {"seconds": 2.0, "least_rate": MODEL.size / 2}
        async with asyncio.timeout(20):
            with pytest.raises(CallFailed, match="did not answer within 2 s"):
                async with call(link, "d", request, "trained", **limits) as reply:
                    await link.fetch("d", reply.trained.result, into(bytearray(MODEL.size)))
        moved = link.peers["d"].transfer_time
        assert moved.advanced <= MODEL.size
        assert moved.count > moved.advanced


async def test_a_model_that_is_sent_for_another_request_advances_again(network):
    async with repeating(network, ask_again_and_again) as link:
        moved = link.peers["d"].transfer_time
        for number in (1, 2):
            await wait_until(lambda least=number: moved.count > 2 * least * MODEL.size)
            before = moved.advanced
            assert before <= number * MODEL.size
            await link.peers["d"].send_request(link_pb2.Request(id=link.new_id()))
            await wait_until(lambda least=before: moved.advanced > least)


def moved_at(rate):
    """What has moved at that many bytes per second."""
    moved = TransferTime()
    moved.begin(0.0)
    for tenth in range(1, 11):
        moved.add(round(10 * rate), 10.0 * tenth)
    return moved


@pytest.mark.parametrize(
    ("down", "up", "says"),
    [
        (125_000, 125_000, False),  # 1 Mbit/s
        (25_000, 25_000, False),
        (10_000, 125_000, False),  # one makes up for the other
        (5_000, 125_000, True),
        (125_000, 5_000, True),
        (0, 125_000, False),
        (0, 0, False),
    ],
)
def test_a_link_is_too_slow_if_its_transfers_take_longer_than_a_round_allows(
    make_job, down, up, says
):
    job = make_job("time.round_seconds=600")
    sentence = too_slow(job, moved_at(down), moved_at(up), 20_000_000, 20_000_000)
    assert bool(sentence) == says


def test_the_sentence_has_the_rate_and_both_times(make_job):
    job = make_job("time.round_seconds=600")
    sentence = too_slow(job, moved_at(10_000), moved_at(20_000), 20_000_000, 20_000_000)
    assert sentence.startswith(
        "this device's link moves 10 kB/s, at which the model and the update of a round of "
        f"{job.name} take 3000 s, and a round allows 2600 s: it most likely ends without"
    )


def test_pauses_are_no_part_of_a_transfer():
    moved = TransferTime()
    moved.begin(0.0)
    moved.add(1000, 2.0)
    moved.add(1000, 5.0)
    moved.begin(20.0)
    moved.add(1000, 21.0)
    moved.add(1000, 500.0)  # without a beginning: it went on after a break
    assert (moved.seconds, moved.count) == (6.0, 4000)


def allowance_of(*chunks, least_rate):
    """The allowance of a participant after chunks, each with its bytes and its time."""
    moved = TransferTime()
    peer = types.SimpleNamespace(transfer_time=moved, is_moving=False)
    link = types.SimpleNamespace(peers={"d": peer})
    allowance = TransferAllowance(link, ["d"], least_rate)
    peer.transfer_time.begin(0.0)
    for count, now in chunks:
        peer.transfer_time.add(count, now)
    return allowance


def test_the_time_added_is_at_most_that_of_the_least_rate():
    allowance = allowance_of((100, 10.0), (100, 20.0), least_rate=100.0)
    assert allowance.seconds("d", now=1000.0) == 2.0
    allowance = allowance_of((100, 10.0), (100, 20.0), least_rate=1.0)
    assert allowance.seconds("d", now=1000.0) == 20.0
    assert allowance.seconds("nobody", now=1000.0) == 0.0


def test_after_a_fast_transfer_a_limit_is_extended_by_its_time_only():
    allowance = allowance_of((50_000_000, 1.5), least_rate=20_000.0)
    assert allowance.seconds("d", now=9.0) == 1.5
    allowance = allowance_of((50_000_000, 0.5), least_rate=20_000.0)
    assert allowance.seconds("d", now=9.0) == 0.0


def test_what_was_sent_last_may_be_on_its_way_for_a_while():
    allowance = allowance_of((100, 10.0), least_rate=1.0)
    assert allowance.seconds("d", now=11.0) == 10.0 + TransferTime.LONGEST_PAUSE
    assert allowance_of((20, 10.0), least_rate=1.0).seconds("d", now=11.0) == 20.0
    assert allowance.seconds("d", now=10.0 + TransferTime.LONGEST_PAUSE) == 10.0
