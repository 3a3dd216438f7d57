"""A server with its own authority, over real TLS on loopback, and its participants."""

import asyncio
import contextlib
import io
import os
import time

import grpc
import grpc.aio
import pytest
from rich.console import Console
from tests.conftest import TABLE
from tests.server.scripted_participant import ScriptedParticipant
from tests.server.waiting import wait_until

from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership
from isthmus.task import Participant
from isthmus.transport.uplink import CHANNEL_OPTIONS, METHOD, Uplink
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_clients.device.agent import Agent
from isthmus_server.cli.operators import OperatorClient
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.observability.observers import Observers
from isthmus_server.runs.jobs.runner import JobRunner
from isthmus_server.service.operator_service import SERVICE, OperatorService
from isthmus_server.service.server import ControlPlaneServer

ROLES = {"client": link_pb2.CLIENT, "datacenter": link_pb2.DATACENTER}


class Fleet:
    """A listening server, with helpers to join it and to connect to it."""

    one_port = False
    """Whether it has one port for everything."""
    fair_link = False
    """Whether connections of the link are shared out among addresses at two ports, too."""
    balancer = None
    """Where balancers forward to, if there are any."""

    def __init__(self, folder, names=("localhost", "127.0.0.1")):
        self.folder = folder
        self.state = folder / "server"
        initialise(self.state, names)
        self.connections = []
        self.stack = contextlib.AsyncExitStack()

    async def listen(
        self, lease_seconds=10.0, authority=None, queue=False, at_once=1, host="127.0.0.1"
    ):
        self.server = ControlPlaneServer(
            self.state, lease_seconds=lease_seconds, authority=authority
        )
        services = {}
        if queue:
            observers = Observers(Console(file=io.StringIO()))
            self.runner = JobRunner(self.server.link, self.state, observers, at_once)
            self.stack.callback(self.runner.queue.close)
            self.control = OperatorService(self.server.members, self.runner)
            services[SERVICE] = self.control.methods()
            self.connections.append(asyncio.create_task(self.runner.run()))
        await self.stack.enter_async_context(
            self.server.listening(
                host,
                0,
                services,
                one_port=self.one_port,
                fair_link=self.fair_link,
                balancer=self.balancer,
            )
        )
        assert self.one_port is (self.server.join_port == self.server.link_port)
        self.link = self.server.link
        self.url = f"localhost:{self.server.join_port}"
        self.address = f"localhost:{self.server.link_port}"
        return self.server

    def registry(self):
        """The registry, opened as by an operator's command in another process."""
        registry = Registry(self.state)
        self.stack.callback(registry.close)
        return registry

    def token(self, name, kind="client", seconds=600.0):
        fingerprint = tls.fingerprint(self.server.members.certificate_authority.certificate)
        token = joining.Token(os.urandom(joining.SECRET_BYTES), fingerprint)
        self.registry().add_token(token.digest, name=name, kind=kind, expires=time.time() + seconds)
        return token

    async def member(self, name, kind="client"):
        """The membership of a new participant."""
        return await joining.join(self.url, self.token(name, kind), self.folder / name, kind)

    def dial(self, member, worker=None, **more):
        """Start an uplink; returns its task."""
        uplink = Uplink(
            self.address,
            member.name,
            ROLES[member.kind],
            worker,
            longest_pause=0.05,
            membership=member,
            **more,
        )
        task = asyncio.create_task(uplink.run())
        self.connections.append(task)
        return task

    async def join(self, name, work, kind="client"):
        """A participant that has joined and is connected."""
        participant = ScriptedParticipant(work)
        member = await self.member(name, kind)
        participant.connection = self.dial(member, participant)
        await wait_until(lambda: name in self.link.peers)
        return participant

    @contextlib.asynccontextmanager
    async def raw(self, credentials, **hello):
        """A stream with any certificate, on which the test sends messages itself."""
        if isinstance(credentials, Membership):
            member = credentials
            credentials = member.channel_credentials()
            hello = {
                "name": member.name,
                "role": ROLES[member.kind],
                "identity": member.identity_public,
                **hello,
            }
        async with grpc.aio.secure_channel(self.address, credentials, CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(METHOD)()

            async def send(**body):
                await call.write(link_pb2.Envelope(**body).SerializeToString())

            async def receive(kind):
                while True:
                    message = link_pb2.Envelope.FromString(await call.read())
                    if message.WhichOneof("body") == kind:
                        return getattr(message, kind)

            fields = {"version_min": 2, "version_max": 2, "instance": "one"}
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await send(hello=link_pb2.Hello(**{**fields, **hello}))
            yield call, send, receive
            call.cancel()

    async def close(self):
        for participant in self.connections:
            participant.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        await self.stack.aclose()


@pytest.fixture
async def fleet(tmp_path, request):
    """A server without participants; call `await fleet.listen()` first.

    It has two ports, or as many as the fixture `ports` of a test file says.
    """
    fleet = Fleet(tmp_path)
    if "ports" in request.fixturenames:
        fleet.one_port = request.getfixturevalue("ports") == 1
    yield fleet
    await fleet.close()


class Device(Agent):
    """A real device that stops in the middle of a round while the gate is shut."""

    def __init__(self, name, tasks, gate):
        super().__init__(Participant(name=name, regime="federated"), None, tasks=tasks)
        self.gate = gate

    async def work(self, request, model, progress):
        if request.WhichOneof("work") == "train_local":
            await self.gate.wait()
        return await super().work(request, model, progress)


@pytest.fixture
async def operated(fleet, make_job, monkeypatch):
    """A listening server with a queue, an operator, and devices for jobs of three."""
    # Jobs, devices and those that join share one event loop, which is late on a busy machine.
    monkeypatch.setattr(joining, "_TIMEOUT", 100.0)
    tasks = fleet.state / "tasks"
    tasks.mkdir()
    (tasks / "task.py").write_text(TABLE + "    pass\n")
    fleet.gate = asyncio.Event()
    await fleet.listen(queue=True)
    fleet.me = await fleet.member("me", kind="operator")
    usual = ("federated.cohort=3", "rounds=2", "strategy.policy=federated", "time.join_seconds=300")
    fleet.job = lambda *more: make_job(*usual, *more)

    async def dial_device(name):
        member = await fleet.member(name)
        fleet.dial(member, Device(name, tasks, fleet.gate))

    async def devices():
        for name in "abc":
            await dial_device(name)
        await wait_until(lambda: set("abc") <= fleet.link.peers.keys())

    async def ask(method, reply, asked, member=None):
        """Call a method as a command does, on another thread."""
        directory = (member or fleet.me).directory
        return await asyncio.to_thread(lambda: OperatorClient(directory).call(method, asked, reply))

    async def submit(job, key="one"):
        asked = pb.SubmitRequest(job=job.model_dump_json(), key=key)
        return (await ask("Submit", pb.SubmitReply, asked)).id

    async def states():
        reply = await ask("Jobs", pb.JobsReply, pb.JobsRequest())
        return {job.id: job.state for job in reply.jobs}

    async def ended(id_):
        async for event in fleet.runner.events(id_, follow=True):
            last = event
        return last.state

    fleet.devices, fleet.dial_device = devices, dial_device
    fleet.ask, fleet.submit = ask, submit
    fleet.states, fleet.ended = states, ended
    return fleet
