"""Whole runs in one process: devices, a simulated datacenter, and run directories."""

import asyncio
import contextlib
import hashlib
import io

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.server.waiting import wait_until

from isthmus.errors import TaskError, UserError
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, parse
from isthmus_clients.training.history_files import EMPTY, head_of, write_head
from isthmus_server.read.report.report import read_report
from isthmus_server.read.transcript import Transcript
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_verify.check import check

NAMES = ("a", "b", "c")


class Killed(BaseException):
    """Ends a coordinator as a signal would: nothing catches it."""


def round_of(event):
    """The number of the round that an event is about; None for other events."""
    return getattr(getattr(event, "record", event), "round", None)


class FaultyDevice:
    """An edge client in this process: the real agent, made to fail in some attempts.

    All devices of a process share PyTorch's random state, so `training_lock` lets one work at a
    time. Before it trains each device awaits `before_training()`.
    """

    def __init__(
        self,
        name,
        training_lock,
        faults,
        before_training,
        signing_key=None,
        group="",
        own_figures=None,
    ):
        """`faults`: the reason of the failure by (round, attempt)."""
        participant = Participant(name=name, regime="federated")
        self.agent = Agent(
            participant, None, signing_key=signing_key, group=group, own_figures=own_figures
        )
        self.training_lock = training_lock
        self.faults = faults
        self.before_training = before_training
        self.buffer, self.acknowledged, self.cancel = (
            self.agent.buffer,
            self.agent.acknowledged,
            self.agent.cancel,
        )
        self.identity, self.welcomed = self.agent.identity, self.agent.welcomed
        self.wanted = self.agent.models.wanted
        self.held = self.agent.models.held

    async def work(self, request, model, progress):
        training = request.train_local
        if reason := self.faults.get((training.round, training.attempt)):
            raise TaskError(reason)
        if request.WhichOneof("work") == "train_local":
            await self.before_training()
        async with self.training_lock:
            return await self.agent.work(request, model, progress)


class SimulatedDatacenter:
    """A datacenter without ranks: every step subtracts `rate` from every parameter."""

    def __init__(self, layout):
        self.layout = layout
        self.vector = None
        self.step = 0
        self.rate = 0.001
        self.gradient = torch.zeros(layout.size)
        self.requests = []
        self.failing_exports = 0
        """How many of the next exports fail."""

    async def respond(self, participant, request, model):
        kind = request.WhichOneof("work")
        self.requests.append(request)
        if kind == "open":
            return link_pb2.Reply(opened=link_pb2.Opened(examples=100)), None
        if kind == "close":
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        if kind == "export":
            if self.failing_exports:
                self.failing_exports -= 1
                raise TaskError("the disk is full")
            assert request.export.step == self.step
            return self._reply(self.vector, exported=True)
        if kind == "mean_gradient":
            return self._reply(self.gradient)
        training = request.train_steps
        if model is not None:
            self.vector = self.layout.decode(model).clone()
        assert model is not None or training.from_step == self.step
        self.step = training.until_step
        self.vector -= self.rate * (training.until_step - training.from_step)
        return self._reply(self.vector if training.hand_back else None, evaluate=training.evaluate)

    def _reply(self, vector, exported=False, evaluate=False):
        payload = self.layout.encode(vector) if vector is not None else None
        blob = link_pb2.Blob()
        if payload is not None:
            blob.sha256, blob.size = hashlib.sha256(payload).digest(), len(payload)
        if exported:
            return link_pb2.Reply(exported=link_pb2.Exported(model=blob)), payload
        trained = link_pb2.Trained(result=blob, examples=1, steps=50, training={"loss": 1.0})
        if evaluate:
            trained.evaluation.update({"loss": 0.75, "accuracy": 0.5})
        return link_pb2.Reply(trained=trained), payload


async def never_delayed():
    """Does not wait."""


class Deployment:
    """A link with devices in this process, and the runs that use it; all have the same task."""

    names = NAMES

    def __init__(self, network, make_job, write_task, folder):
        self.network = network
        self.faults = {name: {} for name in NAMES}
        """By device: the reason of the failure by (round, attempt)."""
        self.before_training = never_delayed
        """What a device awaits before it trains; looked up each time."""
        self.link = None
        self._make_job = make_job
        self._write_task = write_task
        self._folder = folder
        self._training_lock = asyncio.Lock()
        self.groups = {}
        """The group of a device by its name, for devices that have declared one."""
        self.own_figures = {}
        """Where a device by this name keeps its own evaluations for its owner."""
        self.policies = {}
        """The owner's limits of a device by its name, as the text of a policy file."""
        self._signing_keys = {}
        self.of_one_machine = False
        """Whether devices have no identity of their own, as those of `isthmus run`."""
        self._stores = []
        self.honest = True
        """Whether all runs are as they were recorded: then their transcripts hold."""

    async def start(self, methods="pass", names=NAMES):
        """Write the task, with some methods replaced, and connect devices of these names."""
        self._write_task(methods)
        self.link = await self.network.listen()
        for name in names:
            self.network.dial(self.device(name), name)
        await wait_until(lambda: set(names) <= self.link.peers.keys())

    def device(self, name):
        """A device that is not connected; a second one of the name has the key of the first."""
        faults = self.faults.setdefault(name, {})
        key = None
        if not self.of_one_machine:
            key = self._signing_keys.setdefault(name, Ed25519PrivateKey.generate())
        wait, group = (lambda: self.before_training()), self.groups.get(name, "")
        own = self.own_figures.get(name)
        device = FaultyDevice(name, self._training_lock, faults, wait, key, group, own)
        if name in self.policies:
            # The limits of an owner on this machine: others are for devices with certificates.
            limits = parse(self.policies[name], "policy.toml")
            device.agent._guard = LimitsGuard(limits, self._folder / f"{name}.json")
            history = self._folder / f"{name}.log"
            if not head_of(history).exists():
                write_head(history, EMPTY)
            device.agent._secure._history_file = history
        return device

    def create_run(self, name, *overrides):
        """The store of a new run: three rounds on three devices, with secure aggregation."""
        job = self._make_job(
            "strategy.policy=federated",
            f"federated.clients={len(self.link.peers)}",
            "federated.cohort=3",
            "federated.quorum=3",
            "federated.secure_aggregation=true",
            "rounds=3",
            *overrides,
        )
        self._stores.append(Store.create(self._folder / name, job, self._folder))
        return self._stores[-1]

    def reopen(self, store):
        """The run opened again, as after a restart of the server."""
        self._stores.append(Store.open_to_continue(store.directory))
        return self._stores[-1]

    async def run(self, name, *overrides, **options):
        """Run a new job to its end; returns the report and the final model."""
        store = self.create_run(name, *overrides)
        final = await Coordinator(RunParts.of(store, self.link, **options)).run()
        return read_report(store).to_json(), final

    async def run_until_killed(self, coordinator, kind, round_):
        """Run until an event of that kind and round, which kills it; the store, opened again."""

        def kill(event):
            if isinstance(event, kind) and round_of(event) == round_:
                raise Killed

        coordinator.events.subscribe(kill)
        with pytest.raises(Killed):
            await coordinator.run()
        return self.reopen(coordinator.store)

    async def run_until_killed_at_merge(self, store):
        """Run until a round has all sums and its model is made; the store, opened again."""
        coordinator = Coordinator(RunParts.of(store, self.link))

        def die(spec, results):
            raise Killed

        coordinator.parts.merger.merge = die
        with pytest.raises(Killed):
            await coordinator.run()
        return self.reopen(store)

    def close(self):
        """Close all runs, and have the stand-alone verifier check the transcript of each."""
        for store in self._stores:
            store.close()
        if self.honest:
            for directory in dict.fromkeys(store.directory for store in self._stores):
                verified(directory)


def verified(directory):
    """What `isthmus-verify` says of a run; None for one that was damaged on purpose."""
    try:
        with contextlib.closing(Store.open(directory, check=True)) as store:
            transcript = b"".join(Transcript(store).lines())
    except UserError:
        return None
    return check(io.BytesIO(transcript))
