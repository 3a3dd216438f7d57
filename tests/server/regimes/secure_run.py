"""Real device agents on a real link that have opened a run with secure aggregation."""

import asyncio

import torch
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import Participant
from isthmus.task.code_digest import code_digest
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_clients.training.history_files import EMPTY, write_head
from isthmus_server.regimes.base import AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime

NAMES = "abcde"
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


class InterruptedDevice:
    """A real agent that falls silent, fails, or changes its vector at a certain message."""

    def __init__(self, name, training_lock, **choices):
        self.agent = Agent(Participant(name=name, regime="federated"), None, **choices)
        self.identity, self.welcomed = self.agent.identity, self.agent.welcomed
        self.buffer, self.acknowledged = self.agent.buffer, self.agent.acknowledged
        self.cancel = self.agent.cancel
        self.training_lock = training_lock
        self.silent_at = None
        self.is_silent = False
        self.fails_at = None
        self.tamper = None

    async def work(self, request, model, progress):
        step = request.WhichOneof("work")
        if step == "secure_step":
            step = request.secure_step.WhichOneof("message")
        if step == self.silent_at:
            self.is_silent = True
            await asyncio.Event().wait()
        if step == self.fails_at:
            raise TaskError("the battery is empty")
        async with self.training_lock:
            reply, payload = await self.agent.work(request, model, progress)
        if self.tamper is not None and step == "inbox":
            payload = self.tamper(reply, payload)
        return reply, payload


class SecureRun:
    """Devices that have opened a run, and attempts with all of them."""

    def __init__(self, network, job: Job, directory):
        self.network, self.job = network, job
        self.directory = directory
        self.devices = {}

    async def open(self):
        # The first optimizer of a process imports PyTorch's compiler, which takes a minute where
        # many tests share a machine: no wait of a test is for that.
        torch.optim.SGD([torch.zeros(1)])
        training_lock = asyncio.Lock()
        for name in NAMES:
            self.devices[name] = InterruptedDevice(name, training_lock, **self.choices(name))
            self.network.dial(self.devices[name], name)
        await wait_until(lambda: set(NAMES) <= self.network.link.peers.keys())
        for name in NAMES:
            opening = self.opening(self.job)
            request = link_pb2.Request(id=self.network.link.new_id(), open=opening)
            reply = await self.network.link.ask(name, request)
            assert reply.opened.examples == 0  # devices do not report how much data they have

    def choices(self, name):
        """What the owner of a device has chosen."""
        return {}

    def opening(self, job):
        return link_pb2.OpenRun(
            run_id="run",
            job=job.model_dump_json(),
            base=str(self.directory),
            layout=LAYOUT.header,
            task_digest=code_digest(job.task.source, self.directory),
        )

    async def train(
        self,
        job=None,
        attempt=1,
        *,
        round_=1,
        sums=None,
        ranges=None,
        gradient_scale=0.0,
        names=NAMES,
        round_times=None,
    ):
        """One attempt from a fixed model, another one in each round."""
        self.model = LAYOUT.encode(torch.linspace(-1, 1 + (round_ - 1) / 100, LAYOUT.size))
        blob = self.blob = describe(self.model)
        self.network.link.publish(blob, self.model)
        opening = self.opening(self.job)
        context = self.context = FederatedContext(
            self.network.link,
            job or self.job,
            opening,
            LAYOUT,
            self.directory,
            sums=sums,
            ranges=ranges,
            round_times=round_times,
        )
        regime = self.regime = FederatedRegime(context)
        spec = AttemptSpec(
            round=round_,
            attempt=attempt,
            model=blob,
            cohort=dict.fromkeys(names, 20),
            gradient_scale=gradient_scale,
            settings=(job or self.job).federated,
        )
        return await regime.train(spec)

    async def plain_mean(self, names, round_=1):
        """The mean of the updates of those devices, which have equally many examples."""
        updates = []
        for name in names:
            payload = LAYOUT.encode(LAYOUT.decode(self.model))
            open_run = self.devices[name].agent.host.run
            work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
            open_run.train(work, payload, lambda progress: None, lambda: False)
            updates.append(LAYOUT.decode(payload).double())
        return torch.stack(updates).mean(0)


class OwnedRun(SecureRun):
    """Devices whose owners have installed the task, so that the server is on another machine."""

    def __init__(self, network, job: Job, directory):
        super().__init__(network, job, directory / "tasks")
        self.state = directory
        (self.directory / "learn").mkdir(parents=True)
        (directory / "task.py").rename(self.directory / "learn" / "task.py")

    def choices(self, name):
        account = ExamplesAccount(self.state / f"state-{name}")
        return {"tasks": self.directory, "account": account}

    async def open(self):
        await super().open()
        for name, device in self.devices.items():
            device.agent._secure._history_file = self.state / f"{name}.log"
            write_head(self.state / f"{name}.log", EMPTY)
            device.agent._secure._credentials = None
        await wait_until(lambda: set(NAMES) <= self.network.link.peers.keys())
