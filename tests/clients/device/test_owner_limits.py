"""The owner's limits: parsing, conditions, daily usage, and refused requests."""

import contextlib
import os
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from isthmus.errors import AdmissionRefused, IsthmusError, UserError
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.commands import client
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, OwnerLimits, load, parse

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC).timestamp()  # a Friday
HOUR = 3600.0


class Clock:
    def __init__(self):
        self.seconds = NOON

    def __call__(self):
        return self.seconds


@pytest.fixture
def guard(tmp_path):
    """`guard(text)` makes a guard for the text of a policy file; `guard.clock` is its time."""

    def make(text):
        power = tmp_path / "power"
        return LimitsGuard(
            parse(text, "policy.toml"), tmp_path / "usage.json", now=make.clock, power=power
        )

    make.clock = Clock()
    return make


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("jobs = 3", r"^policy.toml: jobs=3: must be a list$"),
        ("rounds_per_day = 0", r"^policy.toml: rounds_per_day=0: .*greater than or equal to 1"),
        ("charging = true", r"^policy.toml: unknown key charging; did you mean charging_only\?$"),
        ("hours = ['night']", r"^policy.toml: hours: .*the hours 'night' are not of the form"),
        ("[privacy]\nclients_min = 1", r"^policy.toml: privacy.clients_min=1: "),
        ("[privacy]\nnoises = 1", r"^policy.toml: unknown key privacy.noises; did you mean noise"),
        ("jobs = [", r"^policy.toml is not valid TOML"),
    ],
)
def test_an_invalid_file_is_reported_in_one_sentence(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(text, "policy.toml")


def test_an_unreadable_file_is_an_error_and_not_the_absence_of_limits(tmp_path):
    assert load(tmp_path / "policy.toml") == OwnerLimits()
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(UserError, match=r"policy.toml cannot be read: Is a directory$"):
        load(tmp_path / "policy.toml")


def test_only_jobs_that_match_are_opened(guard, make_job):
    checks = guard('jobs = ["keyboard-*", "table"]\n[privacy]\nsecure_aggregation = false')
    checks.check_job(make_job())
    checks.check_job(make_job("name=keyboard-en"))
    with pytest.raises(
        AdmissionRefused, match=r"does not allow the job 'camera'; allowed: keyboard-\*, t"
    ):
        checks.check_job(make_job("name=camera"))


def test_a_job_keeps_a_state_only_if_the_owner_allows_it(guard, make_job):
    secure = "federated.secure_aggregation=true"
    compression = "federated.compression.bits=3"
    for keeps in ("exchange.personal=['bias']", "exchange.buffers='local'", compression):
        with pytest.raises(AdmissionRefused, match=r"\(personal_mb in policy\.toml\)"):
            guard("").check_job(make_job(secure, keeps))
        guard("personal_mb = 1").check_job(make_job(secure, keeps))


def test_a_plain_update_is_refused_unless_the_owner_allows_it(guard, make_job):
    with pytest.raises(AdmissionRefused, match="its owner requires secure aggregation"):
        guard("").check_job(make_job())
    guard("").check_job(make_job("federated.secure_aggregation=true"))
    guard("[privacy]\nsecure_aggregation = false").check_job(make_job())


@pytest.mark.parametrize("limit", ["noise = true", "epsilon = 8.0"])
def test_a_plain_update_is_refused_if_the_owner_limits_what_it_reveals(guard, make_job, limit):
    """It has no noise, and no record of this device counts it."""
    checks = guard(f"[privacy]\nsecure_aggregation = false\n{limit}")
    private = ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5")
    for job in (make_job(), make_job(*private)):
        with pytest.raises(AdmissionRefused, match="only sums with secure aggregation can meet"):
            checks.check_job(job)
    checks.check_job(make_job("federated.secure_aggregation=true"))


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
def test_work_is_refused_outside_the_hours(guard, hours, after, open_):
    checks = guard(f'hours = ["{hours}"]')
    guard.clock.seconds += after * HOUR
    if open_:
        checks.check_work(10)
    else:
        with pytest.raises(AdmissionRefused, match=r"its owner's hours are "):
            checks.check_work(10)


def supply(folder, name, **files):
    directory = folder / "power" / name
    directory.mkdir(parents=True)
    for file, text in files.items():
        (directory / file).write_text(f"{text}\n")
    return directory


@pytest.mark.parametrize(
    ("mechanism", "refused"),
    [("gaussian", True), ("correlated", True), ("distributed", False)],
)
def test_counts_are_not_refused_where_the_device_adds_noise_to_what_it_measures(
    guard, make_job, mechanism, refused
):
    """Where the server adds it, a device sends exact means, such as the share of a label."""
    job = make_job(
        "federated.secure_aggregation=true",
        f"privacy.mechanism={mechanism}",
        "privacy.epsilon=8",
        "privacy.delta=1e-5",
        "privacy.clip=1",
        "evaluation.devices=20",
    )
    for counts in ("none", "same-devices"):
        checks = guard(f'[privacy]\ncounts = "{counts}"')
        with pytest.raises(AdmissionRefused) if refused else contextlib.nullcontext():
            checks.check_evaluation(job)


def test_work_is_refused_on_battery_power(guard, tmp_path):
    checks = guard("charging_only = true")
    with pytest.raises(AdmissionRefused, match="on mains power only"):  # unknown
        checks.check_work(10)
    mains = supply(tmp_path, "AC", type="Mains", online=1)
    supply(tmp_path, "BAT0", type="Battery", status="Charging")
    checks.check_work(10)
    (mains / "online").write_text("0\n")
    with pytest.raises(AdmissionRefused, match="on mains power only"):
        checks.check_work(10)


def test_a_machine_without_a_battery_is_on_mains(guard, tmp_path):
    (tmp_path / "power").mkdir()
    guard("charging_only = true").check_work(10)


@pytest.mark.parametrize(
    ("reply", "works"),
    [("u 2", True), ("u 4", True), ("u 1", False), ("u 3", False), ("u 0", False), ("", False)],
)
def test_work_is_refused_on_metered_networks(guard, tmp_path, monkeypatch, reply, works):
    """A fake busctl replaces NetworkManager, which is not available on every test machine."""
    busctl = tmp_path / "busctl"
    busctl.write_text(f'#!/bin/sh\n[ "$5" = Metered ] && echo "{reply}"\n')
    busctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    checks = guard("unmetered_only = true")
    if works:
        checks.check_work(10)
    else:
        with pytest.raises(AdmissionRefused, match="on unmetered networks only"):
            checks.check_work(10)


def test_a_network_of_unknown_kind_counts_as_metered(guard, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AdmissionRefused, match="on unmetered networks only"):
        guard("unmetered_only = true").check_work(10)


def test_the_usage_of_a_day_survives_the_process_and_ends_with_the_day(guard):
    text = "rounds_per_day = 2\nbytes_per_day = 100"
    guard(text).check_work(10)
    guard(text).check_work(10)
    with pytest.raises(AdmissionRefused, match="its owner allows 2 rounds a day"):
        guard(text).check_work(10)
    guard.clock.seconds += 24 * HOUR
    guard(text).check_work(50)  # as many bytes are sent as received
    with pytest.raises(AdmissionRefused, match="its owner allows 100 bytes a day"):
        guard(text).check_work(1)


def test_a_clock_that_is_set_back_gives_no_usage_back(guard):
    text = "rounds_per_day = 2"
    guard(text).check_work(1)
    guard(text).check_work(1)
    for hours in (-24, 24):
        guard.clock.seconds += hours * HOUR
        with pytest.raises(AdmissionRefused, match="its owner allows 2 rounds a day"):
            guard(text).check_work(1)
    # One that was further ahead is not waited for.
    guard.clock.seconds += 1000 * HOUR
    guard(text).check_work(1)
    guard.clock.seconds -= 1000 * HOUR
    guard(text).check_work(1)


def test_usage_that_cannot_be_read_or_written_stops_work(guard, tmp_path):
    (tmp_path / "usage.json").write_text("{")
    with pytest.raises(AdmissionRefused, match="its recorded usage cannot be read"):
        guard("rounds_per_day = 2").check_work(1)
    (tmp_path / "usage.json").unlink()
    checks = LimitsGuard(OwnerLimits(rounds_per_day=2), tmp_path / "missing" / "usage.json")
    with pytest.raises(AdmissionRefused, match="cannot record its usage"):
        checks.check_work(1)


async def test_the_agent_refuses_requests_that_exceed_the_limits(
    guard, write_task, make_job, tmp_path
):
    write_task()
    checks = guard("rounds_per_day = 1\n[privacy]\nsecure_aggregation = false")
    agent = Agent(Participant(name="a", regime="federated"), None, guard=checks)
    job = make_job().model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    await agent.work(link_pb2.Request(open=work), None, lambda progress: None)
    request = link_pb2.Request(train_local=link_pb2.TrainLocal(run_id="run"))
    agent.buffer(request, LAYOUT.nbytes)
    with pytest.raises(AdmissionRefused, match="its owner allows 1 rounds a day"):
        agent.buffer(request, LAYOUT.nbytes)
    strict = Agent(Participant(name="b", regime="federated"), None, guard=guard(""))
    with pytest.raises(AdmissionRefused, match="its owner requires secure aggregation"):
        strict.buffer(request, LAYOUT.nbytes)
    flower = link_pb2.Request(app=link_pb2.AppMessage(run_id="run"))
    with pytest.raises(AdmissionRefused, match="its owner requires secure aggregation"):
        strict.buffer(flower, 0)
    with pytest.raises(AdmissionRefused, match="its owner requires secure aggregation"):
        await strict.work(link_pb2.Request(open=work), None, lambda progress: None)


def test_a_device_that_has_not_joined_has_no_limits(tmp_path):
    (tmp_path / "policy.toml").write_text("")
    arguments = ["start", "--server", "127.0.0.1:1", "--name", "a", "--policy"]
    result = CliRunner().invoke(client, [*arguments, str(tmp_path / "policy.toml")])
    assert isinstance(result.exception, UserError)


def test_an_owner_can_require_noise_for_the_examples(guard, make_job):
    limits = guard("[privacy]\nsecure_aggregation = false\nexamples_epsilon = 4.0")
    with pytest.raises(
        AdmissionRefused, match=r"examples_epsilon .*'table' has no table \[federated"
    ):
        limits.check_job(make_job())
    limits.check_job(make_job("federated.privacy.epsilon=9", "federated.privacy.delta=1e-5"))


MEMORY = link_pb2.Memory(
    frozen={"float32": 4000 << 20, "bfloat16": 2000 << 20, "int8": (1100 << 20) + 1},
    trained=100 << 20,
)


@pytest.mark.parametrize(
    ("allowed", "chosen", "sentence"),
    [
        (4200, "float32", None),
        (4199, "float32", "2200 MB with federated.frozen_dtype = 'bfloat16' or 1301 MB with"),
        (2199, "bfloat16", "the job would need 1301 MB with federated.frozen_dtype = 'int8'"),
        (1300, "int8", "its owner would have to allow memory_mb = 1301 and more"),
        (1301, "int8", None),
    ],
)
async def test_a_job_that_memory_cannot_hold_is_declined_before_it_is_opened(
    guard, make_job, tmp_path, allowed, chosen, sentence
):
    """Neither the task nor the files of the base are there: nothing of them is needed for it."""
    text = f"memory_mb = {allowed}\n[privacy]\nsecure_aggregation = false"
    agent = Agent(Participant(name="a", regime="federated"), None, guard=guard(text))
    job = make_job(
        f"federated.frozen_dtype='{chosen}'", "model.start='base'", f"model.sha256='{'ab' * 32}'"
    )
    work = link_pb2.OpenRun(
        run_id="run", job=job.model_dump_json(), base=str(tmp_path / "no"), memory=MEMORY
    )
    with pytest.raises(IsthmusError) as raised:
        await agent.work(link_pb2.Request(open=work), None, lambda progress: None)
    assert isinstance(raised.value, AdmissionRefused) == (sentence is not None)
    if sentence is not None:
        assert sentence in str(raised.value)
        frozen = {"float32": 4000, "bfloat16": 2000, "int8": 1101}[chosen]
        said = f"{frozen} for what is frozen, in {chosen}, and 200 for what is trained and its gra"
        assert said in str(raised.value)


def test_a_server_that_does_not_say_what_a_model_needs_is_not_refused(guard, make_job):
    guard("memory_mb = 128").check_memory(make_job(), link_pb2.Memory())
    guard("").check_memory(make_job(), MEMORY)
