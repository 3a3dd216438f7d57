"""What tests of the link ask participants for, and what those answer."""

from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.wire import link_pb2


def pattern(size):
    """Bytes without a zero, different in every chunk."""
    return bytearray(1 + (i + i // CHUNK_BYTES) % 251 for i in range(min(size, 1 << 12))) * (
        -(-size // (1 << 12))
    )


def payload_of(size):
    payload = pattern(size)[:size]
    for start in range(0, size, CHUNK_BYTES):
        payload[start] = 1 + start // CHUNK_BYTES
    return payload


def train(link, model=None):
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=model)
    return link_pb2.Request(id=link.new_id(), train_local=work)


def answering(payload=b"", examples=1):
    """Work that is done at once, with a result."""

    async def work(guest, request, model):
        trained = link_pb2.Trained(result=describe(payload), examples=examples)
        return link_pb2.Reply(trained=trained), payload

    return work


def waiting(work, event):
    async def wait(guest, request, model):
        await event.wait()
        return await work(guest, request, model)

    return wait
