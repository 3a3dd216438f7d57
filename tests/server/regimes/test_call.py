"""Calls of one participant: whatever happens, it learns whether its reply was used."""

import asyncio
import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, ParticipantLost, PeerMisbehaved, UpdateError
from isthmus.wire import link_pb2
from isthmus_server.regimes.call import ROUND_OVER, SERVER_FAILED, CallFailed, ReceiptBook, call
from isthmus_server.transport.peer import LastStep, Peer

TRAINED = link_pb2.Reply(trained=link_pb2.Trained(examples=7))
FAILURE = link_pb2.Reply(failure=link_pb2.Failure(reason="the battery is empty"))
OPENED = link_pb2.Reply(opened=link_pb2.Opened())


class ScriptedLink:
    """Replies to a request with one reply, raises an error, or never answers (None)."""

    def __init__(self, answer):
        self.answer = answer
        self.peers = {}
        self.requested = []
        self.acknowledged = []
        """Name, request id, whether the reply was used, and the reason if not."""

    def new_id(self):
        return "new"

    async def ask(self, name, request):
        self.requested.append((name, request.id))
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def acknowledge(self, name, request_id, accepted, reason):
        self.acknowledged.append((name, request_id, accepted, reason))


def request():
    return link_pb2.Request(train_local=link_pb2.TrainLocal())


@pytest.fixture
def receipts():
    """A book in which `a` was invited."""
    return ReceiptBook(["a"], "federated")


def receipt_of(receipts):
    (receipt,) = receipts.complete("no receipt was written")
    return (receipt.status, receipt.reason, receipt.started, receipt.sent)


async def test_a_used_reply_is_acknowledged_and_the_block_writes_its_receipt(receipts):
    link = ScriptedLink(TRAINED)
    async with call(link, "a", request(), "trained", receipts) as reply:
        assert link.acknowledged == []
        receipts.record("a", "accepted", examples=reply.trained.examples, sent=True)
    assert link.requested == [("a", "new")]
    assert link.acknowledged == [("a", "new", True, "")]
    assert receipt_of(receipts) == ("accepted", "", True, True)
    assert receipts.get("a").examples == 7


async def test_a_request_keeps_its_id(receipts):
    link = ScriptedLink(TRAINED)
    work = request()
    work.id = "own"
    async with call(link, "a", work, "trained", receipts):
        pass
    assert link.requested == [("a", "own")]
    assert link.acknowledged == [("a", "own", True, "")]


async def test_a_reply_that_is_given_is_not_requested_again(receipts):
    link = ScriptedLink(None)
    async with call(link, "a", request(), "trained", receipts, reply=TRAINED) as reply:
        assert reply is TRAINED
    assert link.requested == []
    assert link.acknowledged == [("a", "new", True, "")]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FAILURE, "the battery is empty"),
        (OPENED, "it answered something else than was asked"),
    ],
)
async def test_another_outcome_is_rejected_and_the_block_does_not_run(receipts, answer, reason):
    link = ScriptedLink(answer)
    with pytest.raises(CallFailed, match=reason) as caught:
        async with call(link, "a", request(), "trained", receipts):
            pytest.fail("the block ran")
    assert (caught.value.status, caught.value.reached) == ("rejected", True)
    assert receipt_of(receipts) == ("rejected", reason, True, True)
    assert link.acknowledged == [("a", "new", False, reason)]


@pytest.mark.parametrize("reached", [True, False])
async def test_a_participant_lost_before_its_reply_is_dropped_and_nothing_is_acknowledged(
    receipts, reached
):
    link = ScriptedLink(ParticipantLost("it is gone", reached=reached))
    with pytest.raises(CallFailed, match="it is gone") as caught:
        async with call(link, "a", request(), "trained", receipts):
            pytest.fail("the block ran")
    assert (caught.value.status, caught.value.reached) == ("dropped", reached)
    assert not caught.value.timed_out
    assert receipt_of(receipts) == ("dropped", "it is gone", reached, False)
    assert link.acknowledged == []


async def test_a_participant_lost_after_an_earlier_reply_has_started(receipts):
    receipts.remember("a", seconds=1.5)
    link = ScriptedLink(ParticipantLost("it is gone", reached=False))
    with pytest.raises(CallFailed):
        async with call(link, "a", request(), "trained", receipts):
            pytest.fail("the block ran")
    assert receipt_of(receipts) == ("dropped", "it is gone", True, False)
    assert receipts.get("a").seconds == 1.5


async def test_a_participant_lost_after_its_reply_is_dropped_and_the_reply_refused(receipts):
    """Its blob could not be fetched any more."""
    link = ScriptedLink(TRAINED)
    with pytest.raises(CallFailed) as caught:
        async with call(link, "a", request(), "trained", receipts):
            raise ParticipantLost("it is gone", reached=False)
    assert (caught.value.status, caught.value.reached) == ("dropped", True)
    assert receipt_of(receipts) == ("dropped", "it is gone", True, False)
    assert link.acknowledged == [("a", "new", False, "it is gone")]


@pytest.mark.parametrize("error", [UpdateError, PeerMisbehaved, AdmissionRefused])
async def test_a_reply_that_the_block_finds_unusable_is_refused(receipts, error):
    link = ScriptedLink(TRAINED)
    with pytest.raises(CallFailed) as caught:
        async with call(link, "a", request(), "trained", receipts):
            raise error("its update is not finite")
    assert isinstance(caught.value.__cause__, error)
    assert receipt_of(receipts) == ("rejected", "its update is not finite", True, True)
    assert link.acknowledged == [("a", "new", False, "its update is not finite")]


@pytest.mark.parametrize(
    ("code", "started"), [("draw-not-now", False), ("storage-failed", True), ("task-failed", True)]
)
async def test_a_refusal_says_by_its_code_whether_work_was_done(receipts, code, started):
    """A disk may be full when the work is done: such a failure gives no charge back."""
    failure = link_pb2.Failure(reason="no", code=code)
    with pytest.raises(CallFailed):
        async with call(
            ScriptedLink(link_pb2.Reply(failure=failure)), "a", request(), "trained", receipts
        ):
            pytest.fail("the block ran")
    assert receipt_of(receipts)[2] is started


async def test_an_answer_that_the_server_refuses_with_a_code_was_work_all_the_same(receipts):
    error = AdmissionRefused("its enrolment has expired")
    error.code = "enrolment-expired"
    with pytest.raises(CallFailed):
        async with call(ScriptedLink(TRAINED), "a", request(), "trained", receipts):
            raise error
    assert receipt_of(receipts) == ("rejected", "its enrolment has expired", True, True)


async def test_an_error_of_the_server_is_not_a_failure_of_the_participant(receipts):
    link = ScriptedLink(TRAINED)
    with pytest.raises(OSError, match="the disk is full"):
        async with call(link, "a", request(), "trained", receipts):
            raise OSError("the disk is full")
    assert "a" not in receipts
    assert link.acknowledged == [("a", "new", False, SERVER_FAILED)]


@pytest.mark.parametrize("seconds", [None, 60.0])
async def test_a_timeout_of_another_origin_is_an_error_of_the_server(receipts, seconds):
    link = ScriptedLink(TRAINED)
    with pytest.raises(TimeoutError, match="the file system does not answer"):
        async with call(link, "a", request(), "trained", receipts, seconds=seconds):
            raise TimeoutError("the file system does not answer")
    assert "a" not in receipts


async def test_a_call_without_a_receipt_book_acknowledges_all_the_same():
    link = ScriptedLink(FAILURE)
    with pytest.raises(CallFailed):
        async with call(link, "a", request(), "trained"):
            pytest.fail("the block ran")
    assert link.acknowledged == [("a", "new", False, "the battery is empty")]


async def test_a_reply_that_does_not_arrive_in_time_is_a_timeout(receipts):
    link = ScriptedLink(None)
    with pytest.raises(CallFailed) as caught:
        async with call(link, "a", request(), "trained", receipts, seconds=0.001):
            pytest.fail("the block ran")
    assert (caught.value.status, caught.value.timed_out) == ("dropped", True)
    assert receipt_of(receipts) == ("dropped", "it did not answer within 0.001 s", True, False)
    assert link.acknowledged == []


@pytest.mark.parametrize(
    ("role", "note", "said"),
    [
        (link_pb2.DATACENTER, ("new", "rank 0 has\nbeen"), "; its last note: rank 0 has\\nbeen"),
        (link_pb2.DATACENTER, ("new", ""), ""),  # it has got on since
        (link_pb2.DATACENTER, ("other", "rank 0 has been"), ""),
        (link_pb2.CLIENT, ("new", "in its own words"), ""),
    ],
)
async def test_the_last_note_of_a_datacenter_is_in_the_reason(receipts, role, note, said):
    link = ScriptedLink(None)
    link.peers["a"] = Peer(link_pb2.Hello(name="a", role=role))
    link.peers["a"].note = note
    with pytest.raises(CallFailed):
        async with call(link, "a", request(), "trained", receipts, seconds=0.001):
            pytest.fail("the block ran")
    assert receipt_of(receipts)[1] == f"it did not answer within 0.001 s{said}"


class SteppingLink(ScriptedLink):
    """Reports one step after the other for some seconds, and then replies as a `ScriptedLink`."""

    def __init__(self, answer, seconds):
        super().__init__(answer)
        self.peers["a"] = Peer(link_pb2.Hello(name="a", role=link_pb2.DATACENTER))
        self.seconds = seconds

    async def ask(self, name, request):
        begun = time.monotonic()
        steps = 0
        while time.monotonic() < begun + self.seconds:
            steps += 1
            report = link_pb2.Progress(id=request.id, steps=steps)
            self.peers[name].last_step = self.peers[name].last_step.followed_by(report)
            await asyncio.sleep(0.002)
        return await super().ask(name, request)


@pytest.mark.parametrize("rate", [{"least_rate": 1.0}, {}])
async def test_a_limit_between_steps_begins_again_with_each_of_them(receipts, rate):
    link = SteppingLink(TRAINED, seconds=2.5)
    limit = {"seconds": 2.0, **rate}
    async with call(link, "a", request(), "trained", receipts, between_steps=True, **limit):
        receipts.record("a", "accepted", sent=True)
    with pytest.raises(CallFailed, match=r"^it did not answer within 2 s$"):
        async with call(link, "a", request(), "trained", **limit):
            pytest.fail("the block ran")


async def test_a_limit_between_steps_ends_after_the_last_one():
    link = SteppingLink(None, seconds=0.5)
    with pytest.raises(CallFailed, match=r"^it reported no other step within 1 s$"):
        async with call(
            link, "a", request(), "trained", seconds=1.0, least_rate=1.0, between_steps=True
        ):
            pytest.fail("the block ran")


def test_the_same_step_again_is_no_other_step():
    first = LastStep().followed_by(link_pb2.Progress(id="new", steps=3))
    assert first.followed_by(link_pb2.Progress(id="new", steps=3)) is first
    assert first.followed_by(link_pb2.Progress(id="new", note="rank 1 came back")) is first
    # Ranks that have restarted do some steps again.
    assert first.followed_by(link_pb2.Progress(id="new", steps=1)).steps == 1
    assert first.followed_by(link_pb2.Progress(id="next", steps=3)).request == "next"


async def test_a_block_that_takes_too_long_is_a_timeout_and_its_reply_is_refused(receipts):
    link = ScriptedLink(TRAINED)
    with pytest.raises(CallFailed) as caught:
        async with call(link, "a", request(), "trained", receipts, seconds=0.001):
            await asyncio.Event().wait()
    assert caught.value.timed_out
    assert link.acknowledged == [("a", "new", False, "it did not answer within 0.001 s")]


async def cancelled_in_the_block(link, receipts, block, late=ROUND_OVER):
    """Cancel a call while its block waits."""
    entered = asyncio.Event()

    async def caller():
        async with call(link, "a", request(), "trained", receipts, late=late):
            block()
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(caller())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_cancelled_in_its_block_refuses_the_reply_as_late(receipts):
    link = ScriptedLink(TRAINED)
    await cancelled_in_the_block(link, receipts, lambda: None, late="the buffer is full")
    assert link.acknowledged == [("a", "new", False, "the buffer is full")]
    assert "a" not in receipts


async def test_an_update_accepted_before_the_cancellation_stays_accepted(receipts):
    link = ScriptedLink(TRAINED)
    await cancelled_in_the_block(link, receipts, lambda: receipts.record("a", "accepted"))
    assert link.acknowledged == [("a", "new", True, "")]
    assert receipts.is_accepted("a")


async def test_a_call_cancelled_before_the_reply_acknowledges_nothing(receipts):
    link = ScriptedLink(None)

    async def caller():
        async with call(link, "a", request(), "trained", receipts):
            pytest.fail("the block ran")

    task = asyncio.create_task(caller())
    await wait_until(lambda: link.requested)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.acknowledged == []
    assert "a" not in receipts


# -- any sequence of outcomes ----------------------------------------------------------------------

ANSWERS = {
    "reply": TRAINED,
    "failure": FAILURE,
    "another outcome": OPENED,
    "lost": ParticipantLost("it is gone"),
    "unreached": ParticipantLost("it is not connected", reached=False),
    "refused": AdmissionRefused("it refused"),
    "silence": None,
}
BLOCKS = {
    "accept": None,
    "do nothing": None,
    "unusable": UpdateError("it is not finite"),
    "misbehaved": PeerMisbehaved("out of step"),
    "lost": ParticipantLost("it is gone"),
    "accept and lose": ParticipantLost("it is gone"),
    "cancelled": asyncio.CancelledError(),
    "accept and cancel": asyncio.CancelledError(),
}
NAMES = ("a", "b", "c")
calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([*ANSWERS]), st.sampled_from([*BLOCKS])),
    max_size=8,
)


@given(invited=st.lists(st.sampled_from(NAMES), unique=True), outcomes=calls)
def test_every_invited_participant_has_exactly_one_receipt_whatever_the_outcomes(invited, outcomes):
    receipts = ReceiptBook(invited, "federated")
    outcomes = [outcome for outcome in outcomes if outcome[0] in invited]

    async def make_calls():
        for name, answer, block in outcomes:
            link = ScriptedLink(ANSWERS[answer])
            with contextlib.suppress(CallFailed, asyncio.CancelledError):
                async with call(link, name, request(), "trained", receipts, seconds=0.0):
                    if block.startswith("accept"):
                        receipts.record(name, "accepted")
                    if BLOCKS[block] is not None:
                        raise BLOCKS[block]
            replied = isinstance(ANSWERS[answer], link_pb2.Reply)
            assert len(link.acknowledged) == replied  # each reply exactly once
            if replied:
                ((_, _, used, reason),) = link.acknowledged
                assert used == (reason == "")
                # A block that ends without an error has used the reply, with or without a receipt.
                done = answer == "reply" and BLOCKS[block] is None
                assert used == (done or receipts.is_accepted(name))

    asyncio.run(make_calls())
    complete = receipts.complete("the round was over")
    assert [receipt.participant for receipt in complete] == invited
    assert len(receipts) == len(invited)
    assert receipts.accepted == sum(receipt.status == "accepted" for receipt in complete)
    for receipt in complete:
        assert receipt.regime == "federated"
        assert receipt.status in ("accepted", "rejected", "dropped")
        assert receipt.reason or receipt.status == "accepted"
    assert receipts.complete("another reason") == complete
