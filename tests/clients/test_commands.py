import asyncio
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.conftest import TABLE
from tests.server.loopback import LoopbackNetwork
from tests.server.rounds.results import LAYOUT
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, ParticipantLost, UserError
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.commands import client
from isthmus_clients.device.agent import Agent, serve
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan


@pytest.mark.parametrize(
    ("shard", "sentence"),
    [
        ("1", r"^--shard '1' is not of the form I/N, such as 0/8$"),
        ("a/b", r"is not of the form I/N"),
        ("1/2/3", r"is not of the form I/N"),
        ("2/2", r"^--shard '2/2': I must be at least 0 and below N$"),
        ("-1/2", r"I must be at least 0 and below N$"),
    ],
)
def test_a_shard_of_another_form_is_one_sentence(shard, sentence):
    arguments = ["start", "--server", "127.0.0.1:1", "--name", "a", "--shard", shard]
    result = CliRunner().invoke(client, arguments)
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=sentence):
        raise result.exception


def test_limits_are_refused_for_a_device_that_has_not_joined(tmp_path):
    arguments = ["start", "--server", "127.0.0.1:1", "--name", "a", "--tasks", str(tmp_path)]
    error = CliRunner().invoke(client, arguments).exception
    assert isinstance(error, UserError)
    assert str(error).startswith(
        "--policy, --tasks, --weights and --print-systemd need a device that has joined"
    )


def test_a_remote_server_is_not_told_where_this_machine_logs(tmp_path):
    arguments = ["start", "--state", str(tmp_path), "--log-file", str(tmp_path / "log")]
    error = CliRunner().invoke(client, arguments).exception
    assert isinstance(error, UserError)
    assert str(error) == "--log-file would tell a remote server about this machine; remove it"


async def test_the_log_of_a_device_has_the_reasons_sent_to_the_server(caplog):
    network = LoopbackNetwork()
    link = await network.listen()
    network.dial(Agent(Participant(name="phone", regime="federated"), None), "phone")
    await wait_until(lambda: "phone" in link.peers)
    work = link_pb2.OpenRun(run_id="run", job='{"name": "later"}')
    reply = await link.ask("phone", link_pb2.Request(id=link.new_id(), open=work))
    await network.close()
    assert f"phone could not execute a request: {reply.failure.reason}" in caplog.text


async def test_a_server_that_refuses_ends_the_client():
    from isthmus_server.transport.link import Link

    link = Link(10.0)
    port = await link.start()
    try:
        agent = Agent(Participant(name="x" * 200, regime="federated"), None)
        with pytest.raises(
            AdmissionRefused, match=r"a hello needs a name and an instance of 1 to 128 pr"
        ):
            await serve(agent.uplink(f"127.0.0.1:{port}"), agent)
    finally:
        await link.stop()


def resident(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


async def test_an_idle_device_is_small():
    """PyTorch is not loaded before a run is opened."""
    network = LoopbackNetwork()
    link = await network.listen()
    start = ["-m", "isthmus.cli", "client", "start", "--name", "phone"]
    device = await asyncio.create_subprocess_exec(
        sys.executable, *start, "--server", f"127.0.0.1:{network.port}"
    )
    try:
        await wait_until(lambda: "phone" in link.peers)
        assert resident(device.pid) < 120e6
    finally:
        device.kill()
        await device.wait()
        await network.close()


HELD = """
    def local_data(self, participant):
        open("gate").read()  # until the test closes the other end
        return super().local_data(participant)
"""


async def test_a_stopped_device_ends_its_request_and_tells_the_server(tmp_path, make_job):
    """The server does not wait for its lease, and the device begins nothing new."""
    (tmp_path / "task.py").write_text(TABLE + HELD)
    os.mkfifo(tmp_path / "gate")
    network = LoopbackNetwork()
    link = await network.listen(lease_seconds=600.0)
    start = ["-m", "isthmus.cli", "client", "start", "--name", "phone"]
    device = await asyncio.create_subprocess_exec(
        sys.executable,
        *start,
        *("--server", f"127.0.0.1:{network.port}"),
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    assert device.stderr is not None
    try:
        await wait_until(lambda: "phone" in link.peers)
        work = link_pb2.OpenRun(run_id="run", job=make_job().model_dump_json())
        work.base, work.layout = str(tmp_path), LAYOUT.header
        first = link_pb2.Request(id=link.new_id(), open=work)
        opened = asyncio.create_task(link.ask("phone", first))
        gate = await asyncio.to_thread((tmp_path / "gate").open, "w")
        device.terminate()
        await device.stderr.readuntil(b"phone leaves")
        second = link_pb2.Request(id=link.new_id(), open=work)
        refused = asyncio.create_task(link.ask("phone", second))
        gate.close()
        assert (await opened).opened.examples == 20
        link.acknowledge("phone", first.id, True)
        with pytest.raises(ParticipantLost, match=r"^lost: it has left$"):
            await refused
        assert link.peers == {}
        assert await device.wait() == 0
    finally:
        if device.returncode is None:
            device.kill()
            await device.communicate()
        await network.close()


def test_a_device_needs_less_than_60_mb_of_packages_besides_pytorch():
    needed, wanted = set(), ["isthmus"]
    while wanted:
        found = importlib.metadata.distribution(wanted.pop())
        for line in found.requires or ():
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            marker = requirement.marker is None or requirement.marker.evaluate({"extra": "client"})
            if marker and name != "torch" and name not in needed:
                needed.add(name)
                wanted.append(name)
    assert needed >= {"click", "cryptography", "grpcio", "protobuf", "pydantic"}
    size = sum(
        Path(str(found.locate_file(file))).stat().st_size
        for found in map(importlib.metadata.distribution, needed)
        for file in found.files or ()
        if file.suffix != ".pyc" and Path(str(found.locate_file(file))).is_file()
    )
    assert size < 60e6


def test_the_owner_sees_what_the_examples_have_spent(tmp_path):
    privacy = FederatedPrivacy(epsilon=5, delta=1e-3, participations=2)
    settings = FederatedSection(batch_size=16, local_steps=10, privacy=privacy)
    plan = DeviceExamplesPlan.of(settings, rounds=9, examples=64)
    account = ExamplesAccount(tmp_path / "examples" / "a")
    for round_ in (1, 2):
        account.charge(plan, "demo", round_, 1)
    arguments = ["spent", "--state", str(tmp_path), "--delta", "1e-3"]
    shown = CliRunner().invoke(client, arguments, catch_exceptions=False).output
    assert shown.startswith("demo: 2 participations, epsilon 4.99")
    assert "for one example of this device (zero-out); the chain of" in shown


def test_an_epsilon_at_a_delta_that_is_no_number_is_refused(tmp_path):
    """It would be shown as 0."""
    result = CliRunner().invoke(client, ["spent", "--state", str(tmp_path), "--delta", "nan"])
    assert "--delta nan is no number" in str(result.exception)


def test_a_device_without_an_account_says_so(tmp_path):
    result = CliRunner().invoke(client, ["spent", "--state", str(tmp_path)])
    assert "has no account: this device was in no run with" in str(result.exception)
