"""A simulated run, compared with real devices and with closed forms."""

import asyncio
import contextlib
import gc
import io
import re
import subprocess

import pytest
import torch
from rich.console import Console

from isthmus.errors import CannotContinue, JobError, UserError
from isthmus_clients.training.local_run import DeviceRun
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_server.observability.observers import Observers
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.report.report import read_report
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.storage.store import Store
from isthmus_simulation.devices.messages import Measured
from isthmus_simulation.devices.piece_trainer import PieceTrainer
from isthmus_simulation.devices.profiles import DeviceProfile
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

ONE_BY_ONE = "simulation.training=one-by-one"


@pytest.fixture
def simulate(write_task, make_job, tmp_path):
    """Simulate a job of the table task; returns its report."""
    write_task()

    def run(*overrides, name="simulated", devices=6, cohort=4, leave_after=None, observers=None):
        usual = (
            f"simulation.clients={devices}",
            f"federated.cohort={cohort}",
            "federated.local_steps=2",
            "federated.batch_size=4",
            "rounds=2",
            "strategy.policy=federated",
            "simulation.processes=1",  # gRPC of other tests would not survive a fork
        )
        job = make_job(*usual, *overrides)
        simulation = Simulation.new(job, tmp_path, tmp_path / name)
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            if leave_after is not None:
                runner.get_loop().call_later(leave_after, simulation.leave)
            runner.run(simulation.run(observers))
        return report_of(tmp_path / name)

    return run


def report_of(directory):
    with contextlib.closing(Store.open(directory)) as store:
        return read_report(store)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_devices_one_by_one_give_the_bits_of_real_devices(simulate, deployment, secure):
    same = (
        "federated.local_steps=2",
        "federated.batch_size=4",
        "federated.cohort=4",
        "rounds=2",
        "strategy.policy=federated",
        f"federated.secure_aggregation={secure}",
    )
    deployment.of_one_machine = True
    await deployment.start(names=[f"client-{index}" for index in range(6)])
    real, _ = await deployment.run("real", *same)  # six agents, which mask their updates
    virtual = await asyncio.to_thread(simulate, *same, ONE_BY_ONE)
    assert virtual.final.model_sha256 == real["final"]["model_sha256"]


def test_a_simulation_says_when_devices_begin_to_train_one_by_one(
    simulate, write_task, monkeypatch
):
    write_task("""
        def optimizer(self, parameters, participant):
            late = participant.round > 1 and participant.name == "client-3"
            return torch.optim.SGD(parameters, lr=0.2 if late else 0.1)
        """)
    monkeypatch.setattr(PieceTrainer, "measure", lambda *given: Measured(0.0, 1.0))
    console = Console(file=io.StringIO())
    simulate("simulation.training=auto", devices=4, observers=Observers(console))
    told = re.findall(r"devices train (in stacked models|one by one)", console.file.getvalue())
    assert told == ["in stacked models", "one by one"]


FACTORS = """
def adapter_rank(self, participant):
    return 1 + int(participant.name[-1]) % 3
"""


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_factors_of_different_ranks_give_the_bits_of_real_devices(
    simulate, deployment, secure
):
    same = (
        "federated.local_steps=3",
        "federated.batch_size=4",
        "federated.cohort=4",
        "rounds=2",
        "strategy.policy=federated",
        "exchange.low_rank={include=['weight'],rank=2,alpha=4}",
        f"federated.secure_aggregation={secure}",
    )
    deployment.of_one_machine = True
    await deployment.start(FACTORS, names=[f"client-{index}" for index in range(6)])
    real, _ = await deployment.run("real", *same)
    virtual = await asyncio.to_thread(simulate, *same)  # stacked models cannot, and so fall back
    assert virtual.final.model_sha256 == real["final"]["model_sha256"]
    with pytest.raises(UserError, match=r"exchange\.low_rank has factors"):
        await asyncio.to_thread(simulate, *same, "simulation.training=stacked", name="stacked")


def test_what_a_caller_keeps_out_of_garbage_collections_stays_so(simulate):
    assert gc.get_freeze_count()  # all that these tests have imported
    simulate(devices=4)
    assert gc.get_freeze_count()


def model_of(directory):
    return torch.cat([part.flatten() for part in load_model(directory).parameters()])


@pytest.mark.parametrize("secure", ["true", "false"])
def test_stacked_devices_differ_by_rounding_only(simulate, tmp_path, secure):
    secure = f"federated.secure_aggregation={secure}"
    simulate(secure, ONE_BY_ONE, name="one")
    simulate(secure, "simulation.training=stacked", name="stacked")
    torch.testing.assert_close(
        model_of(tmp_path / "one"), model_of(tmp_path / "stacked"), rtol=0, atol=1e-6
    )


JOB = """
name = "table"
rounds = 2
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
cohort = 5
local_steps = 3
batch_size = 4
[simulation]
clients = 7
"""


@pytest.mark.parametrize("training", ["one-by-one", "stacked"])
def test_the_number_of_processes_changes_no_result(write_task, forked_commands, tmp_path, training):
    """By the command: what this process has open would not survive a fork."""
    write_task()
    (tmp_path / "job.toml").write_text(JOB)
    for processes in (1, 3):
        command = ["isthmus", "simulate", "job.toml"]
        command += ["--run-dir", str(processes), "--set", f"simulation.processes={processes}"]
        command += ["--set", f"simulation.training={training}"]
        environment = forked_commands.environment()
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    one, three = tmp_path / "1", tmp_path / "3"
    if training == "one-by-one":
        assert report_of(one).final.model_sha256 == report_of(three).final.model_sha256
    torch.testing.assert_close(model_of(one), model_of(three), rtol=0, atol=1e-6)


def test_the_configuration_of_a_sum_is_read_once_for_all_devices(simulate, monkeypatch):
    read = []
    from_bytes = RoundConfig.from_bytes

    def count(data):
        read.append(data)
        return from_bytes(data)

    monkeypatch.setattr(RoundConfig, "from_bytes", count)
    report = simulate("federated.secure_aggregation=true")
    statuses = [receipt.status for each in report.rounds for receipt in each.receipts]
    assert statuses == ["accepted"] * 8
    assert len(read) == len(set(read)) == 4  # of ranges and of updates, in each of two rounds


def test_only_the_same_kind_of_run_is_resumed(simulate, tmp_path):
    simulate()
    with pytest.raises(UserError, match="has a simulated run; continue it with `isthmus simulate"):
        LocalRun.resumed(tmp_path / "simulated")
    (tmp_path / "simulated" / "simulated").unlink()
    with pytest.raises(UserError, match="has a run with real participants"):
        Simulation.resumed(tmp_path / "simulated")


SLOW = ("simulation.step_seconds=3", "simulation.speed_spread=1", "simulation.down_mbit=0.001")


def durations(job, received=0):
    """Closed form: what each of six devices takes for two steps and the model that it receives."""
    return {
        f"client-{index}": DeviceProfile.drawn(job.simulation, job.seed, index).seconds(
            received=received, steps=2, sent=0
        )
        for index in range(6)
    }


def test_the_fastest_of_an_over_selected_cohort_are_taken_and_the_round_ends_with_them(
    simulate, make_job
):
    over = ("federated.over_selection=3", "federated.quorum=2")
    report = simulate(*SLOW, *over, "rounds=1", cohort=2, devices=6)
    receipts = report.rounds[0].receipts
    received = max(receipt.bytes_out for receipt in receipts)
    seconds = durations(make_job(*SLOW), received)
    accepted = [receipt.participant for receipt in receipts if receipt.status == "accepted"]
    fastest = sorted(seconds, key=seconds.__getitem__)[:2]
    assert sorted(accepted) == sorted(fastest)
    assert report.rounds[0].seconds == pytest.approx(seconds[fastest[1]], abs=1e-3)
    for receipt in receipts:
        if receipt.status == "accepted":
            assert receipt.seconds == pytest.approx(seconds[receipt.participant], rel=1e-6)


def test_devices_slower_than_the_deadline_are_dropped(simulate, make_job):
    seconds = sorted(durations(make_job(*SLOW[:2])).values())
    limit = (seconds[3] + seconds[4]) / 2
    report = simulate(
        *SLOW[:2],
        f"time.round_seconds={limit}",
        "time.lease_seconds=0.1",
        "federated.quorum=4",
        "rounds=1",
        cohort=6,
    )
    receipts = report.rounds[0].receipts
    assert sum(receipt.status == "accepted" for receipt in receipts) == 4
    assert report.rounds[0].seconds == pytest.approx(limit, abs=1e-3)


@pytest.mark.parametrize("secure", ["true", "false"])
def test_lost_devices_have_receipts_and_come_back(simulate, secure):
    report = simulate(
        f"federated.secure_aggregation={secure}",
        "simulation.dropout=0.2",
        "federated.quorum=5",
        "attempts=20",
        "rounds=6",
        devices=8,
        cohort=8,
    )
    lost = [
        receipt
        for record in report.rounds
        for receipt in record.receipts
        if receipt.status == "dropped"
    ]
    assert lost
    assert {receipt.reason for receipt in lost} == {"client-0"} or all(
        "the connection was lost" in receipt.reason for receipt in lost
    )
    assert report.status == "finished"


@pytest.mark.parametrize("mode", ["rounds", "buffered"])
def test_the_same_devices_are_lost_in_every_run_with_a_seed(simulate, mode):
    def lost(name, seed):
        report = simulate(
            "federated.secure_aggregation=false",
            f"federated.mode={mode}",
            "simulation.dropout=0.4",
            "simulation.training=one-by-one",
            "federated.quorum=2",
            "attempts=20",
            "rounds=5",
            f"seed={seed}",
            name=name,
            devices=8,
        )
        return report.final.model_sha256, [
            (record.round, receipt.participant)
            for record in report.rounds
            for receipt in record.receipts
            if receipt.status == "dropped"
        ]

    first = lost("first", 1)
    assert first[1]
    assert lost("second", 1) == first
    assert lost("third", 2)[1] != first[1]


def test_a_large_population_has_other_devices_in_each_round(simulate):
    report = simulate("simulation.connected=8", devices=1_000_000, cohort=6)
    first, second = (
        {receipt.participant for receipt in record.receipts} for record in report.rounds
    )
    assert len(first) == len(second) == 6
    assert not first & second


@pytest.mark.parametrize("secure", ["true", "false"])
def test_a_buffer_is_filled_by_the_fast_devices_first(simulate, secure):
    report = simulate(
        f"federated.secure_aggregation={secure}",
        "federated.mode=buffered",
        "federated.buffer.concurrency=6",
        "simulation.step_seconds=1",
        "simulation.speed_spread=0.7",
        "rounds=8",
        cohort=3,
        devices=6,
    )
    assert report.status == "finished"
    assert len(report.rounds) == 8
    stale = [receipt.staleness for record in report.rounds for receipt in record.receipts]
    assert max(stale) > 0


COMPRESSED = (
    "federated.secure_aggregation=true",
    "federated.compression.bits=2",
    "federated.compression.one_in=2",
)


@pytest.mark.parametrize(("connected", "more"), [(9, ()), (6, ()), (9, COMPRESSED)])
def test_a_simulation_goes_on_after_an_interruption_with_the_same_bits(
    simulate, tmp_path, connected, more
):
    """Also in a population of which others are connected in each round."""
    timed = (
        "rounds=3",
        "simulation.step_seconds=2",
        f"simulation.connected={connected}",
        # Which way is faster differs between two moments, and the ways differ by rounding.
        "simulation.training=one-by-one",
        *more,
    )
    whole = simulate(*timed, devices=9, name="whole")
    with pytest.raises(asyncio.CancelledError):
        simulate(*timed, devices=9, name="stopped", leave_after=1.0)
    assert len(report_of(tmp_path / "stopped").rounds) == 1
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(Simulation.resumed(tmp_path / "stopped").run())
    resumed = report_of(tmp_path / "stopped")
    assert resumed.final.model_sha256 == whole.final.model_sha256
    assert [record.seconds for record in resumed.rounds] == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["simulation.clients=3", "federated.cohort=4"], "a population of 3 devices"),
        (["federated.cohort=4"], "names no number of devices to simulate"),
        (
            ["simulation.clients=50", "simulation.connected=3", "federated.cohort=4"],
            "simulation.connected=3 is below the 4 devices that a round invites",
        ),
        (
            ["simulation.clients=9", "federated.flower.app=client_app:app"],
            "federated.flower names an app",
        ),
        (
            [
                "simulation.clients=9",
                "privacy={mechanism='gaussian',epsilon=8,delta=1e-5,noise=0.1}",
            ],
            "privacy.noise=0.1 is too little",
        ),
    ],
)
def test_a_job_that_cannot_be_simulated_is_refused(make_job, tmp_path, overrides, sentence):
    with pytest.raises(JobError, match=sentence):
        Simulation.new(make_job(*overrides), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_population_may_be_larger_than_the_fleet_of_a_run(simulate):
    """`federated.clients` is for `isthmus run`."""
    report = simulate("federated.clients=2", devices=9, cohort=8)
    assert len(report.rounds) == 2


def test_a_directory_with_a_simulated_run_names_the_command_that_continues_it(
    simulate, make_job, tmp_path
):
    simulate()
    command = f"`isthmus simulate --resume --run-dir {tmp_path / 'simulated'}`"
    for create in (Simulation.new, LocalRun.new):
        with pytest.raises(UserError, match=re.escape(command)):
            create(make_job("simulation.clients=9"), tmp_path, tmp_path / "simulated")


def test_a_directory_with_a_real_run_stays_one(make_job, write_task, tmp_path):
    write_task()
    job = make_job("simulation.clients=9")
    LocalRun.new(job, tmp_path, tmp_path / "real").store.close()
    with pytest.raises(UserError, match=r"continue it with `isthmus run --resume "):
        Simulation.new(job, tmp_path, tmp_path / "real")
    LocalRun.resumed(tmp_path / "real").store.close()


FAILS = """
def optimizer(self, parameters, participant):
    raise ValueError("too warm")
"""


@pytest.mark.parametrize("training", ["one-by-one", "auto"])
def test_a_defect_that_a_device_meets_fails_its_requests_and_not_the_command(
    simulate, monkeypatch, training
):
    def train(*arguments, **options):
        raise KeyError("0.weight")

    monkeypatch.setattr(DeviceRun, "train", train)
    with pytest.raises(CannotContinue, match=r"internal error: KeyError: '0\.weight'"):
        simulate(f"simulation.training={training}", "attempts=1")


def test_what_fails_alike_on_all_devices_is_logged_once(simulate, write_task, caplog):
    write_task(methods=FAILS)
    with pytest.raises(CannotContinue, match="no device had a usable update"):
        simulate("attempts=1", "federated.secure_aggregation=true", ONE_BY_ONE)
    assert caplog.text.count("because of its task") == 1


@pytest.mark.parametrize("rule", ["median", "norm-bound"])
def test_stacked_devices_and_single_ones_have_updates_for_a_rule(simulate, tmp_path, rule):
    settings = "{norm=0.05}" if rule == "norm-bound" else "{}"
    overrides = (f"federated.aggregation={rule}", f"federated.aggregation_settings={settings}")
    simulate(*overrides, name="stacked")
    simulate(*overrides, ONE_BY_ONE, name="single")
    simulate(name="mean")
    stacked, single, mean = (
        torch.cat([each.flatten() for each in load_model(tmp_path / name).parameters()])
        for name in ("stacked", "single", "mean")
    )
    torch.testing.assert_close(stacked, single, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(stacked, mean, atol=1e-4)


def test_simulated_devices_encode_their_updates(simulate):
    report = simulate("federated.codec=rounded", "federated.codec_settings={bits=4}")
    plain = simulate(name="plain")
    sent, whole = (
        {each.bytes_in for row in one.rounds for each in row.receipts} for one in (report, plain)
    )
    assert max(sent) < min(whole)
    assert [row.participants.accepted for row in report.rounds] == [4, 4]
