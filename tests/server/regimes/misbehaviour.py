"""Participants that fail in every way an update or a model can be wrong."""

import asyncio

import torch

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2

LAYOUT = TensorLayout.from_shapes({"bias": (1,), "weight": (2,)})
OTHER = TensorLayout.from_shapes({"bias": (2,), "weight": (1,)})
LARGER = TensorLayout.from_shapes({"bias": (1,), "weight": (3,)})
NEVER = asyncio.Event
ROUND, LEASE = 77.0, 66.0
TIMES = (f"time.round_seconds={ROUND}", f"time.lease_seconds={LEASE}")
ENDS = {"death": LEASE, "silence": ROUND}
"""What has to be over before anybody gives up whom nothing is heard of."""


def misbehaviours(update):
    """Each a coroutine function, and what its receipt says."""

    def answer(layout=LAYOUT, vector=(1.0, 2.0, 3.0), **more):
        async def work(guest, request, model):
            return update(layout, vector, **more)

        return work

    async def fail(guest, request, model):
        raise TaskError("loss() failed at task.py:7")

    async def rant(guest, request, model):
        raise TaskError("\x1b[2J" + 10_000 * "no ")

    async def something_else(guest, request, model):
        return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None

    async def hold_nothing(guest, request, model):
        reply, _ = update(LAYOUT, [0.0] * 3)
        return reply, None

    async def lie(guest, request, model):
        reply, payload = update(LAYOUT, [0.0] * 3)
        payload[-1] ^= 1
        return reply, payload

    async def die(guest, request, model):
        asyncio.get_running_loop().call_soon(guest.link.cancel)
        await NEVER().wait()

    async def sleep(guest, request, model):
        await NEVER().wait()

    return {
        "another size": (answer(LARGER, [0.0] * 4), "rejected", "its update has 144 bytes where"),
        "another header": (answer(OTHER), "rejected", "it is not an update of this exchange set"),
        "nan": (answer(vector=[0, torch.nan, 0]), "rejected", "its update of 'weight' is not fin"),
        "infinity": (answer(vector=[torch.inf, 0, 0]), "rejected", "its update of 'bias' is not"),
        "huge": (answer(vector=[0, 0, 1e6]), "rejected", "its update of 'weight' is out of range"),
        "no weight": (answer(examples=0), "rejected", "its weight=0 does not fit"),
        "too much weight": (answer(examples=2**63), "rejected", "its weight=9223372036854775808 d"),
        "no loss": (answer(training={"loss": torch.nan}), "rejected", "its time or one of its fig"),
        "many words": (rant, "rejected", "[2Jno no no"),
        "failure": (fail, "rejected", "loss() failed at task.py:7"),
        "another answer": (something_else, "rejected", "it answered something else than was asked"),
        "no content": (hold_nothing, "rejected", "bad does not hold the blob it named"),
        "another content": (lie, "rejected", "a transfer does not match its SHA-256"),
        "death": (die, "dropped", "lost: silent for longer than the lease of 66 s"),
        "silence": (sleep, "dropped", "the round's 77 s were over"),
    }
