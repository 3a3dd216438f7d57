"""A participant whose replies a test scripts, and requests and replies for it."""

import asyncio

from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.wire import link_pb2


class ScriptedParticipant:
    """An `isthmus.transport.worker.Worker` around one coroutine function.

    `respond(participant, request, model)` returns the reply and its payload. The participant
    records the requests it receives and the receipts of its replies.
    """

    def __init__(self, respond):
        self.respond = respond
        self.requests = []
        self.receipts = []
        """Pairs: whether the server used the reply, and the reason if not."""
        self.cancelled = []
        """Cancelled requests."""
        self.buffers = []
        self.connection = None
        """The task of its uplink."""

    def buffer(self, request, size):
        self.buffers.append(bytearray(size))
        return self.buffers[-1]

    async def work(self, request, model, progress):
        self.requests.append(request)
        self.progress = progress
        return await self.respond(self, request, model)

    def acknowledged(self, request, accepted, reason):
        self.receipts.append((accepted, reason))

    def cancel(self, request, reason):
        self.cancelled.append(request)

    async def disconnect(self):
        self.connection.cancel()
        await asyncio.gather(self.connection, return_exceptions=True)


def training_request(link, model=None):
    """A request to train from a published model."""
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=model)
    return link_pb2.Request(id=link.new_id(), train_local=work)


def replying(payload=b"", name=None, *, examples=1):
    """Replies at once, with an update of these bytes, named by their SHA-256 or as given."""

    async def respond(participant, request, model):
        result = describe(payload) if name is None else name
        trained = link_pb2.Trained(result=result, examples=examples)
        return link_pb2.Reply(trained=trained), payload

    return respond


def delayed(respond, event):
    """Responds once an event is set."""

    async def wait(participant, request, model):
        await event.wait()
        return await respond(participant, request, model)

    return wait


def pattern(size):
    """Bytes without a zero, different in every chunk."""
    return bytearray(1 + (i + i // CHUNK_BYTES) % 251 for i in range(min(size, 1 << 12))) * (
        -(-size // (1 << 12))
    )


def payload_of(size):
    """`size` bytes without a zero, whose chunks begin with their number."""
    payload = pattern(size)[:size]
    for start in range(0, size, CHUNK_BYTES):
        payload[start] = 1 + start // CHUNK_BYTES
    return payload
