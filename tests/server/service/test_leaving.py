"""SIGTERM at a server: the first lets the running round end, the second gives it up."""

import asyncio
import contextlib
import json
import os
import re
import time
from urllib.request import urlopen

from tests import forked
from tests.conftest import TABLE
from tests.server.service.conftest import Device
from tests.server.waiting import wait_until

from isthmus.identity import joining, tls
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage.store import Store


class Phone(Device):
    """A device that counts the rounds for which it was asked to train."""

    asked = 0

    async def work(self, request, model, progress):
        self.asked += request.WhichOneof("work") == "train_local"
        return await super().work(request, model, progress)


class ServerProcess:
    """`isthmus server start`, and what it has printed."""

    def __init__(self, process, output):
        self.terminate = process.terminate
        self._process = process
        self._output = output

    async def line(self, pattern):
        """Wait for a line of the output; returns the match."""
        output = ""
        while line := (await self._output.readline()).decode():
            output += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the output ended without {pattern!r}:\n{output}")

    async def wait(self):
        """Wait for its end; returns the exit status."""
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode


@contextlib.asynccontextmanager
async def started(state, *options):
    words = ["server", "start", str(state), "--address", "127.0.0.1:0", "--grace", "600", *options]
    process, pipe = forked.start(words, state, {**os.environ, "COLUMNS": "200"})
    output = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(os.dup(pipe.fileno()), "rb")
    )
    pipe.close()
    try:
        server = ServerProcess(process, output)
        found = await server.line(
            r"link (?:at 127.0.0.1:(?P<own>\d+), |and )joining at 127.0.0.1:(?P<joining>\d+)"
        )
        server.joining = f"localhost:{found['joining']}"
        server.link = f"localhost:{found['own'] or found['joining']}"
        yield server
    finally:
        process.kill()
        await server.wait()
        transport.close()


async def join(server, state, name, kind):
    fingerprint = tls.fingerprint(CertificateAuthority(state).certificate)
    token = joining.Token(os.urandom(joining.SECRET_BYTES), fingerprint)
    with contextlib.closing(Registry(state)) as registry:
        registry.add_token(token.digest, name=name, kind=kind, expires=time.time() + 600)
    return await joining.join(server.joining, token, state.parent / name, kind)


@contextlib.asynccontextmanager
async def connected(phone, address, member):
    running = asyncio.create_task(phone.uplink(address, member).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def read(url):
    with urlopen(url, timeout=100.0) as answer:
        return answer.read()


def committed(state):
    """The state of the job in the queue, and its number of committed rounds."""
    run = Store.open(state / "runs/table-1")
    with contextlib.closing(JobQueue(state)) as queue, contextlib.closing(run) as store:
        return queue.get("table-1").state, store.last_round()


async def test_sigterm_lets_the_round_end_and_a_second_one_does_not(tmp_path, make_job):
    state = tmp_path / "server"
    initialise(state, ["localhost", "127.0.0.1"])
    (state / "tasks").mkdir()
    (state / "tasks/task.py").write_text(TABLE + "    pass\n")
    gate = asyncio.Event()
    phone = Phone("phone", state / "tasks", gate)
    one = ("federated.cohort=1", "federated.quorum=1", "strategy.policy=federated")
    job = make_job(*one, "rounds=3", "time.join_seconds=300")

    async with started(state) as server:
        me = await join(server, state, "me", "operator")
        member = await join(server, state, "phone", "client")
        asked = pb.SubmitRequest(job=job.model_dump_json(), key="one")
        await asyncio.to_thread(
            lambda: OperatorClient(me.directory).call("Submit", asked, pb.SubmitReply)
        )
        async with connected(phone, server.link, member):
            await wait_until(lambda: phone.asked == 1)
            server.terminate()
            await server.line("stopping: a running round has 600 s to end")
            gate.set()
            await server.line("table-1 continues when the server is started again")
            assert await server.wait() == 0
    assert committed(state) == ("running", 1)

    gate.clear()
    async with started(state) as server, connected(phone, server.link, member):
        await wait_until(lambda: phone.asked == 2)
        server.terminate()
        await server.line("stopping")
        server.terminate()
        assert await server.wait() == 0
    assert committed(state) == ("running", 1)

    gate.set()
    observed = ("--log-format", "json", "--metrics", "127.0.0.1:0")
    async with started(state, *observed) as server, connected(phone, server.link, member):
        address = (await server.line(r"metrics at (\S+)/metrics"))[1]
        finished = await server.line('"event": "finished"')
        assert json.loads(finished.string)["job"] == "table-1"
        rounds = b'isthmus_rounds_total{job="table-1",regime="federated"} 3.0'
        async with asyncio.timeout(100.0):  # metrics have a thread of their own
            while rounds not in await asyncio.to_thread(read, f"{address}/metrics"):
                pass
        assert await asyncio.to_thread(read, f"{address}/readyz") == b"ready\n"
        server.terminate()
        assert await server.wait() == 0
    assert committed(state) == ("finished", 3)
    assert phone.asked == 4  # the second round was repeated
