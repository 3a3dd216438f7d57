import os
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
import torch
from click.testing import CliRunner

from isthmus.errors import AdmissionRefused, UserError
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.commands import client
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import Guard, Policy, load, parse
from isthmus_clients.device.resource_limits import Pace
from isthmus_clients.device.systemd import unit

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC).timestamp()  # a Friday
HOUR = 3600.0


class Clock:
    def __init__(self):
        self.at = NOON

    def __call__(self):
        return self.at


@pytest.fixture
def guard(tmp_path):
    """`guard(text)`: what a policy file makes of a device; `guard.clock` is its time."""

    def make(text):
        power = tmp_path / "power"
        return Guard(
            parse(text, "policy.toml"), tmp_path / "usage.json", now=make.clock, power=power
        )

    make.clock = Clock()
    return make


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("jobs = 3", r"^policy.toml: jobs=3: a list is wanted$"),
        ("rounds_per_day = 0", r"^policy.toml: rounds_per_day=0: .*greater than or equal to 1"),
        ("charging = true", r"^policy.toml: unknown key charging; did you mean charging_only\?$"),
        ("hours = ['night']", r"^policy.toml: hours: .*the hours 'night' are not of the form"),
        ("[privacy]\nclients_min = 1", r"^policy.toml: privacy.clients_min=1: "),
        ("[privacy]\nnoise = true", r"^policy.toml: unknown key privacy.noise; known here: "),
        ("jobs = [", r"^policy.toml is not valid TOML"),
    ],
)
def test_a_policy_that_makes_no_sense_is_one_sentence(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(text, "policy.toml")


def test_a_policy_that_cannot_be_read_does_not_become_none(tmp_path):
    assert load(tmp_path / "policy.toml") == Policy()
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(UserError, match=r"policy.toml cannot be read"):
        load(tmp_path / "policy.toml")


def test_only_the_jobs_it_names_are_opened(guard, make_job):
    held = guard('jobs = ["keyboard-*", "table"]\n[privacy]\nsecure_aggregation = false')
    held.check_job(make_job())
    held.check_job(make_job("name=keyboard-en"))
    with pytest.raises(
        AdmissionRefused, match=r"does not allow the job 'camera'; allowed: keyboard-\*, t"
    ):
        held.check_job(make_job("name=camera"))


def test_an_update_in_plain_is_refused_unless_the_owner_says_otherwise(guard, make_job):
    with pytest.raises(AdmissionRefused, match="its owner insists on secure aggregation"):
        guard("").check_job(make_job())
    guard("").check_job(make_job("federated.secure_aggregation=true"))


@pytest.mark.parametrize(
    ("hours", "after", "open_"),
    [
        ("22:00-06:00", 0, False),
        ("22:00-06:00", 10, True),
        ("22:00-06:00", 17.9, True),
        ("22:00-06:00", 18, False),
        ("fri 22:00-06:00", 17.9, True),  # the night belongs to Friday
        ("sat 22:00-06:00", 17.9, False),
        ("sat,sun 00:00-00:00", 12, True),
        ("sat,sun 00:00-00:00", 60, False),
        ("11:00-13:00", 0, True),
    ],
)
def test_it_works_in_its_hours_only(guard, hours, after, open_):
    held = guard(f'hours = ["{hours}"]')
    guard.clock.at += after * HOUR
    if open_:
        held.check_work(10)
    else:
        with pytest.raises(AdmissionRefused, match=r"its owner's hours are "):
            held.check_work(10)


def supply(folder, name, **files):
    place = folder / "power" / name
    place.mkdir(parents=True)
    for file, text in files.items():
        (place / file).write_text(f"{text}\n")
    return place


def test_it_works_on_mains_power_only(guard, tmp_path):
    held = guard("charging_only = true")
    with pytest.raises(AdmissionRefused, match="on mains power only"):  # it cannot tell
        held.check_work(10)
    mains = supply(tmp_path, "AC", type="Mains", online=1)
    supply(tmp_path, "BAT0", type="Battery", status="Charging")
    held.check_work(10)
    (mains / "online").write_text("0\n")
    with pytest.raises(AdmissionRefused, match="on mains power only"):
        held.check_work(10)


def test_a_machine_without_a_battery_is_on_mains(guard, tmp_path):
    (tmp_path / "power").mkdir()
    guard("charging_only = true").check_work(10)


@pytest.mark.parametrize(
    ("said", "works"),
    [("u 2", True), ("u 4", True), ("u 1", False), ("u 3", False), ("u 0", False), ("", False)],
)
def test_it_works_on_unmetered_networks_only(guard, tmp_path, monkeypatch, said, works):
    """In the words of NetworkManager, which does not run everywhere tests do."""
    busctl = tmp_path / "busctl"
    busctl.write_text(f'#!/bin/sh\n[ "$5" = Metered ] && echo "{said}"\n')
    busctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    held = guard("unmetered_only = true")
    if works:
        held.check_work(10)
    else:
        with pytest.raises(AdmissionRefused, match="on unmetered networks only"):
            held.check_work(10)


def test_what_cannot_be_asked_counts_as_metered(guard, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AdmissionRefused, match="on unmetered networks only"):
        guard("unmetered_only = true").check_work(10)


def test_what_was_used_today_survives_the_process_and_not_the_day(guard):
    text = "rounds_per_day = 2\nbytes_per_day = 100"
    guard(text).check_work(10)
    guard(text).check_work(10)
    with pytest.raises(AdmissionRefused, match="its owner allows 2 rounds a day"):
        guard(text).check_work(10)
    guard.clock.at += 24 * HOUR
    guard(text).check_work(50)  # as many bytes go as come
    with pytest.raises(AdmissionRefused, match="its owner allows 100 bytes a day"):
        guard(text).check_work(1)


def test_a_count_that_cannot_be_read_or_written_stops_work(guard, tmp_path):
    (tmp_path / "usage.json").write_text("{")
    with pytest.raises(AdmissionRefused, match="what it used today cannot be read"):
        guard("rounds_per_day = 2").check_work(1)
    (tmp_path / "usage.json").unlink()
    held = Guard(Policy(rounds_per_day=2), tmp_path / "gone" / "usage.json")
    with pytest.raises(AdmissionRefused, match="cannot write down what it used"):
        held.check_work(1)


async def test_a_server_is_told_why(guard, write_task, make_job, tmp_path):
    write_task()
    held = guard("rounds_per_day = 1\n[privacy]\nsecure_aggregation = false")
    agent = Agent(Participant(name="a", regime="federated"), None, guard=held)
    job = make_job().model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    await agent.work(link_pb2.Request(open=work), None, lambda progress: None)
    request = link_pb2.Request(train_local=link_pb2.TrainLocal(run_id="run"))
    agent.buffer(request, LAYOUT.nbytes)
    with pytest.raises(AdmissionRefused, match="its owner allows 1 rounds a day"):
        agent.buffer(request, LAYOUT.nbytes)
    insisting = Agent(Participant(name="b", regime="federated"), None, guard=guard(""))
    with pytest.raises(AdmissionRefused, match="its owner insists on secure aggregation"):
        insisting.buffer(request, LAYOUT.nbytes)
    flower = link_pb2.Request(flower=link_pb2.FlowerMessage(run_id="run"))
    with pytest.raises(AdmissionRefused, match="its owner insists on secure aggregation"):
        insisting.buffer(flower, 0)
    with pytest.raises(AdmissionRefused, match="its owner insists on secure aggregation"):
        await insisting.work(link_pb2.Request(open=work), None, lambda progress: None)


def test_the_unit_holds_the_device_to_its_caps():
    policy = Policy(cpu_percent=50, memory_mb=900)
    lines = unit(["isthmus", "client", "start", "--data", "my 100% $data"], "/s", policy).split(
        "\n"
    )
    assert "ExecStart=isthmus client start --data 'my 100%% $$data'" in lines
    assert {"CPUQuota=50%", "MemoryMax=900M", "WorkingDirectory=/s"} <= set(lines)
    assert "RestartPreventExitStatus=1" in lines


class Worker:
    """Uses as much CPU time as it takes, unless it rests."""

    def __init__(self, cores):
        self.cores = cores
        self.time = self.cpu = 0.0

    def work(self, seconds):
        self.time += seconds
        self.cpu += seconds * self.cores

    def sleep(self, seconds):
        self.time += seconds

    def pace(self, percent):
        return Pace(percent, used=lambda: self.cpu, now=lambda: self.time, sleep=self.sleep)


@pytest.mark.parametrize(
    ("percent", "cores", "takes"), [(50, 1, 20.0), (50, 2, 40.0), (150, 2, 13.3), (100, 1, 10.0)]
)
def test_training_rests_so_that_the_cap_on_cpu_holds_on_average(percent, cores, takes):
    worker = Worker(cores)
    pace = worker.pace(percent)
    for _ in range(10):
        worker.work(1.0)
        pace.rest()
    assert worker.time == pytest.approx(takes, rel=0.01)
    worker.time += 1000.0  # idle time is not saved up
    pace.begin()
    began = worker.time
    worker.work(1.0)
    pace.rest()
    assert worker.time - began == pytest.approx(max(takes / 10, 1.0), rel=0.01)


async def test_the_cap_on_cpu_holds_in_a_round(guard, write_task, make_job, tmp_path):
    write_task()
    held = guard("cpu_percent = 60\n[privacy]\nsecure_aggregation = false")
    agent = Agent(Participant(name="a", regime="federated"), None, guard=held)
    job = make_job("federated.local_steps=20").model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    await agent.work(link_pb2.Request(open=work), None, lambda progress: None)
    request = link_pb2.Request(train_local=link_pb2.TrainLocal(run_id="run"))
    began, used = time.monotonic(), time.process_time()
    model = bytearray(LAYOUT.encode(torch.zeros(LAYOUT.size)))
    await agent.work(request, model, lambda progress: None)
    took, used = time.monotonic() - began, time.process_time() - used
    assert used < 0.7 * took  # with what this test itself used meanwhile


def test_the_cap_on_memory_is_the_kernel_s(tmp_path):
    """In a process of its own: there is no way back."""
    code = """
import os
from isthmus_clients.device import resource_limits
from isthmus_clients.device.owner_limits import Policy
resource_limits.hold(Policy(cpu_percent=50, memory_mb=256))
print(os.nice(0))
try:
    bytearray(300 << 20)
except MemoryError:
    print("refused")
bytearray(100 << 20)
"""
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    niceness = max(10, os.nice(0))  # it is never taken back
    assert found == f"{niceness}\nrefused\n"


def test_a_device_that_has_not_joined_has_no_policy(tmp_path):
    (tmp_path / "policy.toml").write_text("")
    arguments = ["start", "--server", "127.0.0.1:1", "--name", "a", "--policy"]
    result = CliRunner().invoke(client, [*arguments, str(tmp_path / "policy.toml")])
    assert isinstance(result.exception, UserError)
