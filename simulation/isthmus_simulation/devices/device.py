"""One simulated device: a real device's agent, on a model that it shares and with simulated time.

The agent is that of `isthmus client`, so that a simulated device checks, clips, trains, scores and
encodes as a real one does. Only three things differ: the memory of the model is shared, vectors of
secure sums are not masked, and a request takes the time of the device's profile.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import ParticipantLost, TaskError
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.task_host import InProcessHost, TrainingResult, states_key
from isthmus_clients.training.local_run import DeviceRun, pieces
from isthmus_clients.training.personal_state import PersonalStates
from isthmus_privacy.compression.sum_codecs import sum_codec
from isthmus_simulation.devices.fleet import FleetRun, VirtualFleet
from isthmus_simulation.devices.profiles import DeviceProfile
from isthmus_simulation.devices.stacks.training import DeviceTraining, TrainedOrFailed
from isthmus_simulation.devices.unmasked import UnmaskedSessions, read_once, unchecked

_UNUSED_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
"""A simulated device signs nothing, and making a key takes longer than the rest of it."""


class VirtualHost(InProcessHost):
    """Runs the task of one simulated device on the model that its fleet shares."""

    trains = True
    """Whether a batch of devices may train this one; False for one whose update is made up."""

    def __init__(self, fleet: VirtualFleet, participant: Participant) -> None:
        """Set up; `open` loads the device's data."""
        folder = None if fleet.folder is None else fleet.folder / participant.name
        self.folder = folder
        super().__init__(participant, fleet.data, None, threads=1)
        self._fleet = fleet
        self.finished: tuple[TrainedOrFailed, DeviceTraining] | None = None
        """The result of a batch that the device was trained in."""

    def open(self, work: link_pb2.OpenRun) -> int:
        """See `TaskHost.open`."""
        with self._fleet.lock:
            self.close()
            self._run_id = work.run_id
            shared = self._fleet.open(work, self._participant).shared
            own = shared.participant == self._participant
            self.run = shared if own else shared.for_device(self._participant)
            if self.run.personal.size:
                states = PersonalStates(self.folder)
                key = states_key(work, self._participant)
                self._personal = states.open(key, self.run.personal)
            return self.run.examples

    def buffer(self, size: int, room: int = 0) -> Buffer:
        """See `TaskHost.buffer`; the fleet has the memory."""
        return memoryview(self._fleet.memory(room + size))[room:]

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """See `TaskHost.train`; the result may be that of a batch."""
        if self.finished is not None:
            (trained, training), self.finished = self.finished, None
            if isinstance(trained, TaskError):
                raise trained
            return trained, training.result
        with self._fleet.lock:
            return super().train(request_id, work, payload, progress)

    def score(self, request_id: str, work: link_pb2.Score, payload: Buffer) -> list[float]:
        """See `TaskHost.score`."""
        with self._fleet.lock:
            return super().score(request_id, work, payload)

    def evaluate(
        self, request_id: str, work: link_pb2.Evaluate, payload: Buffer
    ) -> link_pb2.Counted:
        """See `TaskHost.evaluate`."""
        with self._fleet.lock:
            return super().evaluate(request_id, work, payload)

    def release(self, request_id: str, accepted: bool = True) -> None:
        """See `TaskHost.release`; a device keeps no memory between rounds."""
        super().release(request_id, accepted)
        self._spare = None


class MadeUpHost(VirtualHost):
    """The task of a simulated device that does not train: its update is made up."""

    trains = False

    def __init__(
        self,
        fleet: VirtualFleet,
        participant: Participant,
        update: Callable[[link_pb2.TrainLocal, torch.Tensor], object],
    ) -> None:
        """`update` fills the vector (N) that the device sends in a round."""
        super().__init__(fleet, participant)
        self._update = update

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """See `TaskHost.train`."""
        assert self.run is not None
        result, *_ = pieces(self.run.layout, payload)
        self._update(work, self.run.layout.decode(result))
        weight = self.run.job.federated.weight(self.run.examples)
        # All losses are alike, so that selection by utility has only the rest to go by.
        return link_pb2.Trained(examples=weight, steps=1, training={"loss": 1.0}), result


class VirtualDevice(Agent):
    """One device of a fleet (an `isthmus.transport.worker.Worker`)."""

    def __init__(
        self,
        fleet: VirtualFleet,
        index: int,
        lost: Callable[[str], None] | None = None,
        host: VirtualHost | None = None,
    ) -> None:
        """Set up.

        Args:
            fleet: what it shares with other devices.
            index: its number.
            lost: called with its name when it is lost in the middle of a request.
            host: what runs its task; None for a host that does just that.
        """
        self._fleet = fleet
        self.profile: DeviceProfile = fleet.profile(index)
        participant = fleet.participant(index)
        self._host = host or VirtualHost(fleet, participant)
        super().__init__(participant, fleet.data, signing_key=_UNUSED_KEY, host=self._host)
        self._secure: UnmaskedSessions = UnmaskedSessions(participant.name, fleet.residuals)
        self._lost = lost

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """Do what a real device does, in the time of this one's profile.

        Raises:
            IsthmusError: see `Agent.work`.
        """
        kind = request.WhichOneof("work")
        if kind not in ("train_local", "score", "evaluate"):
            return await self._answer(request, model, progress)
        seconds = self._seconds(request, 0 if model is None else len(model))
        name = self.participant.name
        if self._lost is not None:
            asked = self._fleet.nth_request(name, _purpose(request))
            lost_after = self.profile.lost_after(name, asked, seconds)
            if lost_after is not None:
                await asyncio.sleep(lost_after)
                self._lost(name)
                raise ParticipantLost(f"{name} was lost")
        run = self._run_of(request)
        if kind == "train_local" and run is not None and run.in_batches:
            await self._train_in_batch(run, request.train_local, model)
        if seconds:
            await asyncio.sleep(seconds)
        reply, payload = await self._answer(request, model, progress)
        if reply.HasField("trained") and not reply.trained.secure:
            reply.trained.seconds = seconds
        return reply, payload

    async def _answer(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        reply, payload = await super().work(request, model, progress)
        if payload is None and self._secure.payload is not None:
            payload = self._secure.payload
            self._secure.payload = None
        return reply, payload

    async def _train_in_batch(
        self, run: FleetRun, work: link_pb2.TrainLocal, model: Buffer | None
    ) -> None:
        device_run = self._host.run
        if not self._host.trains:
            return
        if model is None or device_run is None:
            return  # the agent refuses the request
        self._secure.begin(run.active, work, model)
        training = DeviceTraining.of(device_run, model)
        self._host.finished = await self._fleet.train(training, work), training

    def _is_secure(self, request: link_pb2.Request) -> bool:
        """See `Agent._is_secure`; the job of a run that the fleet has open is not read again."""
        run = self._run_of(request) if request.HasField("open") else None
        if run is not None:
            return run.active.job.federated.secure_aggregation
        return super()._is_secure(request)

    def _named(self, update: Buffer) -> link_pb2.Blob:
        return unchecked(update)

    def _run_of(self, request: link_pb2.Request) -> FleetRun | None:
        run = self._fleet.run
        kind = request.WhichOneof("work")
        named = getattr(request, kind).run_id if kind else ""
        return run if run is not None and run.run_id == named else None

    def _seconds(self, request: link_pb2.Request, received: int) -> float:
        """Simulated duration of a request for training or for figures."""
        device_run = self._host.run
        kind = request.WhichOneof("work")
        if device_run is None or self.profile.is_instant:
            return 0.0
        steps = device_run.data.step_count(device_run.job.federated)
        secure = getattr(request, str(kind)).secure
        sent = self._update_bytes(device_run) if kind == "train_local" else 0
        if secure:
            sent = read_once(secure).payload_bytes
        elif kind == "train_local" and request.train_local.ranges:
            sent = self._masked_bytes(device_run, sent)
        return self.profile.seconds(received=received, steps=steps, sent=sent)

    def _masked_bytes(self, run: DeviceRun, plain: int) -> int:
        """Bytes of a masked update, about: its configuration follows from the ranges."""
        federated = run.job.federated
        compression = federated.compression
        if compression is None:
            return plain
        codec = sum_codec(run.job, run.layout, compression.bits)
        return codec.kept(run.layout.size) * codec.ring_bits(federated.cohort) // 8

    def _update_bytes(self, run: DeviceRun) -> int:
        """Bytes of a single update: at most those of the job's codec, if it has one."""
        messages = None if self._active is None else self._active.messages
        return run.layout.nbytes if messages is None else messages.max_bytes

    def _open(self, work: link_pb2.OpenRun, package: Buffer | None) -> link_pb2.Reply:
        self._active = None
        active = self._fleet.open(work, self.participant).active
        active = dataclasses.replace(active, group=self._group_in(active.job))
        examples = self.host.open(work)
        if active.job.federated.privacy is not None:
            name = self.participant.name
            self._account = self._fleet.accounts.setdefault(name, self._account)
        active = active.weighing(examples).with_account(self._account, examples)
        self._active = active
        federated = (job := active.job).federated
        sent = 0 if federated.secure_aggregation else active.weight
        opened = link_pb2.Opened(examples=sent)
        if job.federated.groups is not None:
            opened.group = active.group
        return link_pb2.Reply(opened=opened)


def _purpose(request: link_pb2.Request) -> str:
    """What a request is for, the same in every simulation; its id is of this process."""
    kind = str(request.WhichOneof("work"))
    work = getattr(request, kind)
    number = work.comparison if kind == "score" else work.round
    return f"{kind}/{number}/{work.attempt}"


def devices_of(fleet: VirtualFleet) -> list[VirtualDevice]:
    """All devices of a small fleet."""
    return [VirtualDevice(fleet, index) for index in range(fleet.count)]
