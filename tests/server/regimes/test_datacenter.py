"""Rounds of a datacenter."""

import asyncio

import pytest
from tests.server.regimes.replies import (
    EXPIRES,
    LAYOUT,
    LEASE_SECONDS,
    MISBEHAVIOURS,
    TIMES,
    update_reply,
)
from tests.server.waiting import wait_until

from isthmus.job.federated import FederatedSection
from isthmus.wire import link_pb2
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.strategy.policy import Plan
from isthmus_server.strategy.round_spec import RoundSpec


@pytest.fixture
def connect(network, make_job):
    """Connect a datacenter that responds so; returns the regime and the participant."""

    async def connect(respond, *overrides):
        await network.listen(LEASE_SECONDS)
        participant = await network.join("dc", respond, role=link_pb2.DATACENTER)
        return DatacenterRegime(network.link, make_job(*overrides), "run", LAYOUT), participant

    return connect


def ten_steps(round_):
    """A round of ten steps from the ranks' own model, which is returned."""
    return RoundSpec(
        plan=Plan(regime="datacenter", reason=""),
        round=round_,
        attempt=1,
        cohort={},
        federated=FederatedSection(),
        datacenters=["dc"],
        from_step=10,
        steps=10,
        datacenter_has_model=True,
        evaluate=True,
        hand_back=True,
    )


async def test_a_datacenter_trains_to_a_step_and_returns_its_model(connect, network):
    async def respond(participant, request, model):
        assert model is None
        return update_reply(
            LAYOUT, [1.0, 2.0, 3.0], training={"loss": 1.0}, events=["rank 1 came back"]
        )

    regime, participant = await connect(respond)
    result = await regime.train("dc", ten_steps(3), None)
    assert result.vector.tolist() == [1.0, 2.0, 3.0]
    assert result.training == {"loss": 1.0}
    (receipt,) = result.receipts
    assert (receipt.status, receipt.reason) == ("accepted", "rank 1 came back")
    (request,) = participant.requests
    training = request.train_steps
    assert (training.round, training.from_step, training.until_step) == (3, 10, 20)
    assert not training.HasField("model")
    await wait_until(lambda: participant.receipts == [(True, "")])


async def test_a_datacenter_exports_its_model(connect):
    async def respond(participant, request, model):
        reply, payload = update_reply(LAYOUT, [4.0, 5.0, 6.0])
        return link_pb2.Reply(exported=link_pb2.Exported(model=reply.trained.result)), payload

    regime, participant = await connect(respond)
    payload = memoryview(bytearray(LAYOUT.nbytes))
    await regime.export("dc", 20, payload)
    assert LAYOUT.decode(payload).tolist() == [4.0, 5.0, 6.0]
    assert participant.requests[0].export.step == 20


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("failure", "rejected", "dc: loss() failed at task.py:7"),
        ("another outcome", "rejected", "dc: it answered something else"),
        ("another size", "rejected", "dc: its model has 144 bytes where"),
        (
            "another header",
            "rejected",
            "dc: another exchange set was received: parameter 'bias' has",
        ),
        ("nan", "rejected", "dc: its model is not finite"),
        ("disconnection", "dropped", "dc: lost: silent for longer than the lease of 66 s"),
        ("silence", "dropped", "dc: it did not answer within 77 s"),
    ],
)
async def test_a_misbehaving_datacenter_fails_the_attempt(
    connect, network, timeouts, kind, status, reason
):
    respond = MISBEHAVIOURS[kind][0]
    regime, participant = await connect(respond, *TIMES)
    training = asyncio.create_task(regime.train("dc", ten_steps(1), None))
    if kind in EXPIRES:
        await wait_until(lambda: participant.requests)
        await timeouts.expire(EXPIRES[kind])
    with pytest.raises(AttemptFailed) as caught:
        await training
    assert str(caught.value).startswith(reason)
    (receipt,) = caught.value.receipts
    assert (receipt.participant, receipt.regime, receipt.status) == ("dc", "datacenter", status)
    if status == "rejected":
        await wait_until(lambda: participant.receipts)
        assert not participant.receipts[0][0]


async def test_a_datacenter_that_is_not_connected_fails_the_attempt(network, make_job):
    await network.listen()
    with pytest.raises(AttemptFailed, match=r"^dc: dc is not connected$"):
        await DatacenterRegime(network.link, make_job(), "run", LAYOUT).export(
            "dc", 1, memoryview(bytearray(LAYOUT.nbytes))
        )
