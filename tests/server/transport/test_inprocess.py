import asyncio

import pytest
from tests.server.listeners import RecordingListener

from isthmus.errors import ParticipantLost, TaskError, UpdateError
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2
from isthmus_server.transport.inprocess import InProcessLink


class Echo:
    """A worker that returns the model with 1 added to each byte."""

    def __init__(self):
        self.acknowledgements = []
        self.cancelled = []
        self.going = asyncio.Event()
        self.may_go = asyncio.Event()
        self.may_go.set()

    def buffer(self, request, size):
        return bytearray(size)

    async def work(self, request, model, progress):
        self.going.set()
        await self.may_go.wait()
        if model is None:
            raise TaskError("there is no model")
        for i in range(len(model)):
            model[i] += 1
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(model))), model

    def acknowledged(self, request, accepted, reason):
        self.acknowledgements.append((request.id, accepted, reason))

    def cancel(self, request, reason):
        self.cancelled.append(request.id)


@pytest.fixture
def link():
    link = InProcessLink()
    link.worker = Echo()
    link.listener = RecordingListener()
    link.listeners.attach(link.listener)
    link.join("a", link_pb2.CLIENT, link.worker)
    return link


def request(link, blob=None):
    work = link_pb2.TrainLocal(model=blob)
    return link_pb2.Request(id=link.new_id(), train_local=work)


async def test_a_model_is_sent_and_a_result_received(link):
    model = describe(b"\x01\x02")
    link.publish(model, b"\x01\x02")
    asked = request(link, model)
    reply = await link.ask("a", asked)
    back = bytearray(reply.trained.result.size)
    await link.fetch("a", reply.trained.result, into(back))
    assert back == b"\x02\x03"
    link.acknowledge("a", asked.id, True)
    assert link.worker.acknowledgements == [(asked.id, True, "")]
    with pytest.raises(UpdateError, match="does not hold"):
        await link.fetch("a", reply.trained.result, into(back))


async def test_an_error_of_a_worker_is_a_failure_with_its_message(link):
    reply = await link.ask("a", request(link))
    assert reply.failure.reason == "there is no model"
    retracted = await link.ask("a", request(link, describe(b"\x01")))
    assert "no longer has the model" in retracted.failure.reason


async def test_an_unexpected_error_of_a_worker_is_a_failure_as_of_a_real_participant(link):
    async def work(request, model, progress):
        raise KeyError("0.weight")

    link.worker.work = work
    reply = await link.ask("a", request(link))
    assert reply.failure.reason == "internal error: KeyError: '0.weight'"


async def test_a_participant_that_leaves_fails_its_pending_requests(link):
    link.worker.may_go.clear()
    asking = asyncio.create_task(link.ask("a", request(link)))
    await link.worker.going.wait()
    link.leave("a", "its window closed")
    with pytest.raises(ParticipantLost, match="its window closed"):
        await asking
    assert link.listener.left_reasons == [("a", "its window closed")]
    with pytest.raises(ParticipantLost, match="not connected"):
        await link.ask("a", request(link))


async def test_a_cancelled_wait_cancels_the_work(link):
    link.worker.may_go.clear()
    asked = request(link)
    asking = asyncio.create_task(link.ask("a", asked))
    await link.worker.going.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert link.worker.cancelled == [asked.id]
