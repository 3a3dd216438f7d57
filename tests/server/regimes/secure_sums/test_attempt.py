"""Secure aggregation over a real link: the sum is that of the devices that did not drop out."""

import asyncio
import dataclasses
import types

import pytest
import torch
from tests.server.regimes.secure_run import NAMES, SecureRun
from tests.server.waiting import wait_until

from isthmus.errors import IsthmusError, UpdateError
from isthmus.job import with_changes
from isthmus.job.tables import TimeSection
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.training.history_files import EMPTY, write_head
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.messages import MAX_ENTRY_BYTES, ConsistencySignatures
from isthmus_server.model.summed_evaluation import TRIES
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt, SecureSum
from isthmus_server.regimes.secure_sums.step_limits import StepLimits

MESSAGES = ("open", "train_local", "roster", "inbox", "survivors", "consistency_signatures")
MESSAGE_OF_STEP = dict(
    zip(("training", "sharing keys", "sending", "signing", "unmasking"), MESSAGES[1:], strict=True)
)
"""The message that devices receive in each step of an attempt."""


@pytest.fixture
async def run(network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    job = make_job(
        "federated.cohort=5",
        "federated.quorum=4",
        "federated.secure_aggregation=true",
        # Without a sum of ranges before it, which has the same steps.
        "federated.clip=4",
        "federated.max_examples=1000",
        "time.round_seconds=6000",  # deadlines pass only where a test lets them
        "time.lease_seconds=2000",
    )
    run = SecureRun(network, job, tmp_path)
    await run.open()
    return run


class DeadlineOfSilent(float):
    """A deadline that passes when only devices that stay silent are left."""

    def __new__(cls, deadline, waited_for):
        instance = super().__new__(cls, deadline)
        instance.waited_for = waited_for
        return instance

    def __sub__(self, now):
        return float(self) - now if self.waited_for else 0.0


@pytest.fixture
def deadlines(run, monkeypatch):
    """Seconds that each step has, by its name; they pass when only the silent are left."""
    seconds = {}
    run_step = SecureAggregationAttempt._step

    async def timed(self, what, names, part, deadline, wanted=None, **more):
        seconds[what] = deadline - asyncio.get_running_loop().time()
        left = {name for name in names if run.devices[name].silent_at != MESSAGE_OF_STEP[what]}

        async def counted(name):
            try:
                await part(name)
            finally:
                left.discard(name)

        await run_step(self, what, names, counted, DeadlineOfSilent(deadline, left), wanted, **more)

    monkeypatch.setattr(SecureAggregationAttempt, "_step", timed)
    return seconds


async def test_the_unmasked_sum_is_the_plain_weighted_mean(run):
    result = await run.train()
    expected = await run.plain_mean(NAMES)
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)
    assert result.training["examples"] == 20 * len(NAMES)
    assert result.training["clipped"] == 0
    assert [receipt.status for receipt in result.receipts] == ["accepted"] * 5
    assert {receipt.examples for receipt in result.receipts} == {
        0
    }  # the server does not learn those of one device


@pytest.mark.parametrize("how", ["silent_at", "fails_at"])
@pytest.mark.parametrize("step", MESSAGES[1:])
async def test_a_device_may_drop_out_at_any_step(run, deadlines, step, how):
    setattr(run.devices["c"], how, step)
    result = await run.train()
    late = step in ("survivors", "consistency_signatures")  # its masked vector was in already
    left = NAMES if late else NAMES.replace("c", "")
    expected = await run.plain_mean(left)
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)
    receipt = result.receipts[NAMES.index("c")]
    assert receipt.status == (
        "accepted" if late else "dropped" if how == "silent_at" else "rejected"
    )
    assert receipt.reason


AUTOMATIC_STEP = 60.0 + 0.001 * 5 * (5 + 4 * 4)


@pytest.mark.parametrize(
    ("changes", "step", "sending"),
    [
        ({}, AUTOMATIC_STEP, 6000),  # after a fast training all of the round is left
        ({"round_seconds": 30, "lease_seconds": 20}, AUTOMATIC_STEP, AUTOMATIC_STEP),
        ({"secure_step_seconds": 70}, 70, 6000),
        ({"secure_upload_seconds": 80}, AUTOMATIC_STEP, 80),
    ],
)
async def test_each_step_has_its_own_limit(run, deadlines, changes, step, sending):
    job = with_changes(run.job, {f"time.{key}": value for key, value in changes.items()})
    began = asyncio.get_running_loop().time()
    await run.train(job)
    took = asyncio.get_running_loop().time() - began
    expected = {"training": 0.75 * job.time.round_seconds, "sending": sending}
    expected |= dict.fromkeys(("sharing keys", "signing", "unmasking"), step)
    for name, seconds in expected.items():
        assert seconds - took <= deadlines[name] <= seconds + 0.01


def test_automatic_limits_grow_with_cohort_and_model():
    def limits(clients, size):
        config = RoundConfig(
            run_id="r",
            round=1,
            attempt=1,
            model_hash=bytes(32),
            purpose=bytes(32),
            size=size,
            clients_max=clients,
        )
        return StepLimits.of(TimeSection(), config, clients)

    few, many = limits(5, 1000), limits(200, 1000)
    assert few.step_seconds < 61
    assert many.step_seconds > 3 * few.step_seconds
    assert limits(200, 25_000_000).upload_seconds > many.upload_seconds + 1000


@pytest.mark.parametrize("step", MESSAGES[1:4])
async def test_below_the_quorum_the_attempt_ends_with_a_reason_and_the_next_one_works(run, step):
    for name in "bc":
        run.devices[name].fails_at = step
    with pytest.raises(AttemptFailed, match=r"secure aggregation stopped: .*battery") as caught:
        await run.train()
    assert {r.participant: r.status for r in caught.value.receipts}["b"] == "rejected"
    for name in "bc":
        run.devices[name].fails_at = None
    result = await run.train(attempt=2)
    assert torch.allclose(result.pseudo_gradient.double(), await run.plain_mean(NAMES), atol=1e-6)


async def test_a_device_that_was_never_reached_has_not_started(run):
    run.network.link.disconnect("c", "it left just before")
    result = await run.train()
    started = {receipt.participant: receipt.started for receipt in result.receipts}
    assert started == {name: name != "c" for name in NAMES}


async def test_cancelling_an_attempt_cancels_the_requests_of_all_devices(run):
    peers = run.network.link.peers
    for device in run.devices.values():
        device.silent_at = "train_local"
    attempt = asyncio.create_task(run.train())
    await wait_until(lambda: all(peers[name].pending for name in NAMES))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert not any(peers[name].pending for name in NAMES)


async def test_cancelling_an_attempt_lets_devices_free_their_vectors(run, monkeypatch):
    sending = set()
    before = [set(peer.unacknowledged) for peer in run.network.link.peers.values()]

    async def never(name, blob, write):
        sending.add(name)
        await asyncio.Event().wait()

    monkeypatch.setattr(run.network.link, "fetch", never)
    attempt = asyncio.create_task(run.train())
    await wait_until(lambda: sending == set(NAMES))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert [peer.unacknowledged for peer in run.network.link.peers.values()] == before


async def test_an_attempt_ends_at_its_deadline(run, monkeypatch):
    run.devices["a"].silent_at = run.devices["b"].silent_at = "train_local"
    run_attempt = SecureAggregationAttempt.run
    monkeypatch.setattr(
        SecureAggregationAttempt,
        "run",
        lambda self: run_attempt(self, asyncio.get_running_loop().time()),
    )
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptFailed, match="did not finish training in time"):
        await run.train()
    assert asyncio.get_running_loop().time() - began < run.job.time.round_seconds / 2


async def test_devices_refuse_an_attempt_number_that_they_have_seen(run):
    await run.train()
    with pytest.raises(AttemptFailed, match="is not after round 1 attempt 1"):
        await run.train()


async def test_a_device_stores_each_sum_that_it_helped_to_unmask(run, tmp_path):
    memory = tmp_path / "history.log"
    write_head(memory, EMPTY)
    agent = run.devices["a"].agent
    agent._secure._history_file, agent._secure._credentials = memory, None
    await run.train()
    unmasked = HistoryLog(memory).entries[-1]
    model = describe(run.model).sha256
    assert (unmasked.run_id, unmasked.round, unmasked.model_hash) == ("run", 1, model)


async def test_devices_get_the_signatures_of_a_quorum_and_a_transcript_those_of_all(
    run, monkeypatch
):
    heard = []
    device = run.devices["a"].agent
    work = device.work

    def hear(request, model, progress):
        if request.secure_step.consistency_signatures:
            heard.append(request.secure_step.consistency_signatures)
        return work(request, model, progress)

    def keep(context, config, roster, survivors, signatures, set_up):
        kept.append((config.graph(len(roster.entries)).quorum, signatures))

    kept = []
    monkeypatch.setattr(device, "work", hear)
    monkeypatch.setattr(FederatedContext, "keep_signed", keep)
    await run.train()
    (sent,) = map(ConsistencySignatures.from_bytes, heard)
    ((quorum, signatures),) = kept
    everybody = ConsistencySignatures.from_bytes(signatures).signatures
    assert quorum < len(everybody) == len(NAMES)
    assert sent.signatures == everybody[:quorum]


async def test_a_roster_is_offered_once_and_not_part_of_each_device_s_request(run, monkeypatch):
    """With 800 devices it has 2 MB, and the requests of all of them had 1.7 GB in memory."""
    link = run.network.link
    ask = link.ask
    asked = []

    def hear(name, request):
        if request.secure_step.HasField("roster"):
            asked.append(request.ByteSize())
            assert len(link._blobs.get(request.secure_step.roster.sha256).payload) > 5 * 2500
        return ask(name, request)

    monkeypatch.setattr(link, "ask", hear)
    result = await run.train()
    assert len(asked) == 5
    assert max(asked) < 200
    assert link.published_blobs == 1  # the model
    # They count as messages, and not as models.
    receipt = result.receipts[0]
    assert receipt.bytes_out == len(run.model)
    assert receipt.messages_out > 5 * 2500


@pytest.mark.parametrize(
    ("size", "attempt", "said"),
    [
        (5 * MAX_ENTRY_BYTES + 1, 1, "a roster of 20481 bytes was announced"),
        (100, 2, "not in that attempt of secure aggregation"),
    ],
)
async def test_a_device_has_no_memory_for_a_roster_that_cannot_be(run, size, attempt, said):
    run.devices["a"].silent_at = "roster"
    training = asyncio.create_task(run.train())
    await wait_until(lambda: run.devices["a"].is_silent)
    step = link_pb2.SecureStep(
        run_id="run", round=1, attempt=attempt, roster=link_pb2.Blob(sha256=bytes(32), size=size)
    )
    agent = run.devices["a"].agent
    with pytest.raises(IsthmusError):  # the server is not told why
        agent.buffer(link_pb2.Request(secure_step=step), size)
    with pytest.raises(UpdateError, match=said):
        agent._secure.check_roster(step, size)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training


async def test_a_roster_of_no_devices_is_refused(run, monkeypatch):
    link = run.network.link
    ask = link.ask

    def lie(name, request):
        if name == "a" and request.secure_step.HasField("roster"):
            request.secure_step.roster.Clear()
            request.secure_step.roster.SetInParent()
        return ask(name, request)

    monkeypatch.setattr(link, "ask", lie)
    receipt = (await run.train()).receipts[0]
    assert (receipt.participant, receipt.status) == ("a", "rejected")


async def test_a_changed_vector_is_rejected_and_the_others_go_on(run):
    def tamper(reply, payload):
        payload[0] ^= 1
        reply.secure_stepped.masked.CopyFrom(describe(payload))
        return payload

    run.devices["e"].tamper = tamper
    result = await run.train()
    assert result.receipts[-1].status == "rejected"
    assert "was changed" in result.receipts[-1].reason
    expected = await run.plain_mean("abcd")
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)


async def test_the_same_round_gives_the_same_bytes_again(run):
    first = await run.train(attempt=1)
    second = await run.train(attempt=2)
    assert torch.equal(first.pseudo_gradient, second.pseudo_gradient)


def test_a_sum_says_what_it_is_of():
    config = types.SimpleNamespace(run_id="digits-1", round=3, attempt=2)
    wanted = SecureSum(config=config, cohort=(), first_request=None)
    assert wanted.about == "digits-1, round 3, attempt 2"
    asked = dataclasses.replace(wanted, question="evaluate the model")
    assert asked.about == "digits-1, question 3 (evaluate the model), attempt 2"
    config.attempt = 2 * TRIES + 1  # the second try of this attempt's evaluation
    assert asked.about == "digits-1, question 3 (evaluate the model), attempt 2 try 2"
