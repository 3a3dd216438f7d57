"""Rounds of a datacenter."""

import asyncio

import pytest
from tests.server.regimes.misbehaviour import ENDS, LAYOUT, LEASE, TIMES, misbehaviours

from isthmus.job.federated import FederatedSection
from isthmus.wire import link_pb2
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.strategy.policy import Plan
from isthmus_server.strategy.round_spec import RoundSpec


@pytest.fixture
def ranks(net, make_job):
    """The datacenter regime, with one participant whose work is given."""

    async def ranks(work, *overrides):
        await net.listen(LEASE)
        guest = await net.join("dc", work, role=link_pb2.DATACENTER)
        return DatacenterRegime(net.link, make_job(*overrides), "run", LAYOUT), guest

    return ranks


def steps(round_):
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


async def test_ranks_train_to_a_step_and_hand_their_model_back(ranks, update, net):
    async def work(guest, request, model):
        assert model is None
        return update(LAYOUT, [1.0, 2.0, 3.0], training={"loss": 1.0}, events=["rank 1 came back"])

    datacenter, guest = await ranks(work)
    result = await datacenter.train("dc", steps(3), None)
    assert result.vector.tolist() == [1.0, 2.0, 3.0]
    assert result.training == {"loss": 1.0}
    (receipt,) = result.receipts
    assert (receipt.status, receipt.reason) == ("accepted", "rank 1 came back")
    (asked,) = guest.asked
    work = asked.train_steps
    assert (work.round, work.from_step, work.until_step) == (3, 10, 20)
    assert not work.HasField("model")
    await net.until(lambda: guest.receipts == [(True, "")])


async def test_ranks_export_their_model(ranks, update):
    async def work(guest, request, model):
        reply, payload = update(LAYOUT, [4.0, 5.0, 6.0])
        return link_pb2.Reply(exported=link_pb2.Exported(model=reply.trained.result)), payload

    datacenter, guest = await ranks(work)
    assert (await datacenter.export("dc", 20)).tolist() == [4.0, 5.0, 6.0]
    assert guest.asked[0].export.step == 20


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("failure", "rejected", "dc: loss() failed at task.py:7"),
        ("another answer", "rejected", "dc: it answered something else"),
        ("another size", "rejected", "dc: its model has 144 bytes where"),
        (
            "another header",
            "rejected",
            "dc: another exchange set was received: parameter 'bias' has",
        ),
        ("nan", "rejected", "dc: its model is not finite"),
        ("death", "dropped", "dc: lost: silent for longer than the lease of 66 s"),
        ("silence", "dropped", "dc: it did not answer within 77 s"),
    ],
)
async def test_ranks_that_cannot_are_a_failed_attempt(
    ranks, update, net, clock, how, status, reason
):
    work = misbehaviours(update)[how][0]
    datacenter, guest = await ranks(work, *TIMES)
    training = asyncio.create_task(datacenter.train("dc", steps(1), None))
    if how in ENDS:
        await net.until(lambda: guest.asked)
        await clock.over(ENDS[how])
    with pytest.raises(AttemptFailed) as caught:
        await training
    assert str(caught.value).startswith(reason)
    (receipt,) = caught.value.receipts
    assert (receipt.participant, receipt.regime, receipt.status) == ("dc", "datacenter", status)
    if status == "rejected":
        await net.until(lambda: guest.receipts)
        assert not guest.receipts[0][0]


async def test_ranks_that_are_not_there(net, make_job):
    await net.listen()
    with pytest.raises(AttemptFailed, match=r"^dc: dc is not connected$"):
        await DatacenterRegime(net.link, make_job(), "run", LAYOUT).export("dc", 1)
