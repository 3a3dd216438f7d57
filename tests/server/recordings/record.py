"""Record the messages that a device and a server exchange in a small job.

    python tests/server/recordings/record.py > tests/server/recordings/link-N.jsonl

Run it once for each version N of the link, with the first release that supports it; the file is
then kept unchanged. Each line holds the sender, the kind of message and the serialised envelope.
The script imports nothing from the tests, so that it also runs in old checkouts.
"""

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path

from isthmus.job import parse_job
from isthmus.task import Participant
from isthmus.transport import uplink
from isthmus.transport.blobs import Piece
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Learn(isthmus.Task):
    def model(self):
        return nn.Linear(4, 3)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        return rows(20, seed=1)

    def eval_data(self):
        return rows(30, seed=0)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.1)


def rows(count, seed):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.argmax(1).clamp(max=2))
"""

JOB = """
name = "table"
seed = 3
rounds = 2
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
clients = 0
cohort = 1
quorum = 1
secure_aggregation = false
[datacenter]
ranks = 0
"""


class RecordedStream(Stream):
    """A device's stream that prints every message of both directions."""

    async def send(self, message):
        data = message if isinstance(message, bytes) else message.SerializeToString()
        write("device", data)
        await super().send(data)

    async def receive(self, timeout=None):  # noqa: ASYNC109 - the signature of the base class
        message = await super().receive(timeout)
        if message is not None:
            write("server", envelope_of(message).SerializeToString())
        return message


def envelope_of(message):
    """A received message as an envelope; chunks arrive as `Piece`."""
    if not isinstance(message, Piece):
        return message
    chunk = link_pb2.Chunk(sha256=message.sha256, offset=message.offset, data=bytes(message.data))
    return link_pb2.Envelope(chunk=chunk)


def write(sender, data):
    """Print one line of the recording; pings depend on time and are left out."""
    kind = link_pb2.Envelope.FromString(data).WhichOneof("body")
    if kind != "ping":
        envelope = base64.b64encode(data).decode()
        print(json.dumps({"from": sender, "kind": kind, "envelope": envelope}), flush=True)


async def main(folder):
    (folder / "task.py").write_text(TASK)
    uplink.Stream = RecordedStream
    link = Link(30.0)
    port = await link.start("127.0.0.1", 0)
    agent = Agent(Participant(name="phone", regime="federated"), None)
    options = {"identity": agent.identity, "on_welcome": agent.welcomed}
    device = uplink.Uplink(f"127.0.0.1:{port}", "phone", link_pb2.CLIENT, agent, **options)
    connection = asyncio.create_task(device.run())
    store = Store.create(folder / "run", parse_job(JOB), folder)
    await Coordinator(RunParts.of(store, link)).run()
    store.close()
    connection.cancel()
    await asyncio.gather(connection, return_exceptions=True)
    await link.stop()


if __name__ == "__main__":
    sys.path.insert(0, "")
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
