"""Updates that devices reply with: good ones, and every kind that the server must refuse."""

import asyncio

import torch

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2

LAYOUT = TensorLayout.from_shapes({"bias": (1,), "weight": (2,)})
SAME_SIZE = TensorLayout.from_shapes({"bias": (2,), "weight": (1,)})
LARGER = TensorLayout.from_shapes({"bias": (1,), "weight": (3,)})
ROUND_SECONDS, LEASE_SECONDS = 77.0, 66.0
TIMES = (f"time.round_seconds={ROUND_SECONDS}", f"time.lease_seconds={LEASE_SECONDS}")
EXPIRES = {"disconnection": LEASE_SECONDS, "silence": ROUND_SECONDS}
"""The wait that has to expire before the server gives up on a silent participant."""


async def forever():
    """Wait until cancelled."""
    await asyncio.Event().wait()


def update_reply(layout, vector, examples=10, **fields):
    """A reply with an update (or a model), and its payload."""
    payload = layout.encode(torch.as_tensor(vector, dtype=torch.float32))
    trained = link_pb2.Trained(
        result=describe(payload), examples=examples, steps=1, seconds=0.5, **fields
    )
    return link_pb2.Reply(trained=trained), payload


def updating(vector=(1.0, 2.0, 3.0), layout=LAYOUT, **fields):
    """Replies with this update."""

    async def respond(participant, request, model):
        return update_reply(layout, vector, **fields)

    return respond


async def fail(participant, request, model):
    raise TaskError("loss() failed at task.py:7")


async def fail_at_length(participant, request, model):
    raise TaskError("\x1b[2J" + 10_000 * "no ")


async def reply_with_another_outcome(participant, request, model):
    return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None


async def send_no_blob(participant, request, model):
    reply, _ = update_reply(LAYOUT, [0.0] * 3)
    return reply, None


async def send_other_bytes(participant, request, model):
    reply, payload = update_reply(LAYOUT, [0.0] * 3)
    payload[-1] ^= 1
    return reply, payload


async def disconnect(participant, request, model):
    asyncio.get_running_loop().call_soon(participant.connection.cancel)
    await forever()


async def never_reply(participant, request, model):
    await forever()


MISBEHAVIOURS = {
    "another size": (updating([0.0] * 4, LARGER), "rejected", "its update has 144 bytes where"),
    "another header": (
        updating(layout=SAME_SIZE),
        "rejected",
        "it is not an update of this exchange set",
    ),
    "nan": (updating([0, torch.nan, 0]), "rejected", "its update of 'weight' is not fin"),
    "infinity": (updating([torch.inf, 0, 0]), "rejected", "its update of 'bias' is not"),
    "huge": (updating([0, 0, 1e7]), "rejected", "its update of 'weight' is out of range"),
    "no weight": (updating(examples=0), "rejected", "its weight=0 does not fit"),
    "too much weight": (
        updating(examples=2**53),
        "rejected",
        "its weight=9007199254740992 does",
    ),
    "no loss": (
        updating(training={"loss": torch.nan}),
        "rejected",
        "its time or one of its fig",
    ),
    "many words": (fail_at_length, "rejected", r"\x1b[2Jno no no"),
    "failure": (fail, "rejected", "loss() failed at task.py:7"),
    "another outcome": (
        reply_with_another_outcome,
        "rejected",
        "it answered something else than was asked",
    ),
    "no blob": (send_no_blob, "rejected", "bad does not hold the blob it named"),
    "other bytes": (send_other_bytes, "rejected", "a transfer does not match its SHA-256"),
    "disconnection": (disconnect, "dropped", "lost: silent for longer than the lease of 66 s"),
    "silence": (never_reply, "dropped", "the round's 77 s were over"),
}
"""By kind: how a device responds, and the status and the start of the reason of its receipt."""
