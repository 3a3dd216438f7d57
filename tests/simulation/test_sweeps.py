"""Simulations of several values and seeds by one command."""

import json
import subprocess

import pytest
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus_clients.training.local_run import DeviceRun
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_simulation.commands import simulate

JOB = """
name = "table"
rounds = 2

[task]
source = "task.py:Learn"

[strategy]
policy = "federated"

[federated]
local_steps = 2
batch_size = 4

[simulation]
processes = 1
training = "one-by-one"
"""

COMMON = ("--clients", "6", "--cohort", "4")


@pytest.fixture
def job(write_task, tmp_path):
    """The file of a job of six simulated devices."""
    write_task()
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return str(file)


@pytest.fixture
def sweep(job, forked_commands):
    """Run `isthmus simulate` as a process."""

    def run(*arguments, code=0):
        command = ["isthmus", "simulate", job, *COMMON, *arguments]
        environment = forked_commands.environment()
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


def test_policies_without_a_budget_train_all_rounds_and_a_line_compares_them(sweep, tmp_path):
    """A federated round costs 4, and one of the datacenter 2 times 0.5."""
    prices = ("--set", "prices={client_update=1,datacenter_step=0.5}")
    ranks = ("--set", "datacenter={ranks=1,steps=2}")
    policies = ("--vary", "strategy.policy=federated,datacenter")
    results = tmp_path / "results.json"
    told = sweep(
        *policies, *prices, *ranks, "--json", str(results), "--run-dir", str(tmp_path / "a")
    )
    assert (
        "the policies end at unequal cost (2 to 8): to compare them at one price, let all spend "
        "the same: --set budget=8 --set rounds=8, as many as the cheapest can pay"
    ) in told
    runs = [each["runs"][0] for each in json.loads(results.read_text())["variants"]]
    assert [(each["rounds"], each["cost"]) for each in runs] == [(2, 8.0), (2, 2.0)]
    one_price = ("--set", "budget=8", "--set", "rounds=8")
    again = sweep(*policies, *prices, *ranks, *one_price, "--run-dir", str(tmp_path / "b"))
    assert "unequal" not in again


def test_every_combination_and_seed_is_a_run_with_the_bits_of_a_single_one(sweep, tmp_path):
    directory, results = tmp_path / "sweep", tmp_path / "results.json"
    arguments = (
        *("--run-dir", str(directory), "--json", str(results)),
        *("--vary", "federated.proximal=0,0.5", "--seeds", "2"),
    )
    told = sweep(*arguments)
    assert "run 4 of 4: federated.proximal=0.5, seed 2: " in told
    assert "mean of 2 seeds" in told
    found = json.loads(results.read_text())
    assert [each["changes"] for each in found["variants"]] == [
        {"federated.proximal": 0},
        {"federated.proximal": 0.5},
    ]
    assert [len(each["runs"]) for each in found["variants"]] == [2, 2]
    assert "MB of devices" in told
    assert "seconds" not in told  # of devices without profiles
    assert "federated.proximal=0.5" in (directory / "comparison.html").read_text()
    models = {file: file.read_bytes() for file in directory.glob("*/model.safetensors")}
    assert len(set(models.values())) == len(models) == 4
    single = tmp_path / "single"
    sweep("--run-dir", str(single), "--set", "federated.proximal=0.5", "--set", "seed=2")
    assert (single / "model.safetensors").read_bytes() in models.values()
    sweep(*arguments)  # continues, and has nothing left to do
    assert json.loads(results.read_text()) == found
    assert {file: file.read_bytes() for file in models} == models


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--vary", "rounds=1,2", "--resume"), "--resume is for one run"),
        (("--seeds", "2", "--track", "tensorboard"), "--track is for one run"),
        (("--seeds", "2", "--quiet"), "--quiet is for one run"),
        (("--seeds", "2", "--log-format", "json"), "--log-format is for one run"),
        (("--json", "results.json"), "--json has the results of --vary or --seeds"),
        (("--vary", "seed=1,2"), "--vary seed has no effect"),
        (("--seeds", "2", "--set", "seed=3"), "--set seed has no effect"),
        (("--vary", "rounds"), "is not of the form"),
        (("--vary", "federated.cohort=4,9"), "9"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(job, tmp_path, arguments, sentence):
    given = [job, *COMMON, "--run-dir", str(tmp_path / "sweep"), *arguments]
    result = CliRunner().invoke(simulate, given)
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)
    assert not list(tmp_path.glob("sweep/*/job.json"))


def test_devices_with_profiles_have_their_simulated_time_in_the_table(sweep, tmp_path):
    results = tmp_path / "results.json"
    arguments = ("--run-dir", str(tmp_path / "sweep"), "--json", str(results))
    told = sweep("--vary", "simulation.step_seconds=50,5", *arguments)
    assert "seconds" in told
    slow, fast = (each["runs"][0] for each in json.loads(results.read_text())["variants"])
    assert slow["seconds"] == pytest.approx(200)  # two rounds of two steps
    assert fast["seconds"] == pytest.approx(20)
    assert slow["device_bytes"] == fast["device_bytes"] > 0


def test_without_seeds_the_runs_have_that_of_the_job(sweep, tmp_path):
    directory, results = tmp_path / "sweep", tmp_path / "results.json"
    arguments = ("--set", "seed=7", "--vary", "federated.proximal=0.5")
    sweep(*arguments, "--run-dir", str(directory), "--json", str(results))
    assert [path.parent.name for path in directory.glob("*/job.json")] == [
        "federated.proximal=0.5-7"
    ]
    ((run,),) = (each["runs"] for each in json.loads(results.read_text())["variants"])
    assert run["seed"] == 7


def test_a_variant_that_fails_is_repeated_by_the_same_command(sweep, tmp_path, write_task):
    directory, results, task = tmp_path / "a sweep", tmp_path / "results.json", tmp_path / "task.py"
    whole = task.read_text()
    fails = 'if self.settings["fails"]: raise ValueError("not yet")'
    write_task(f"""
        def model(self):
            {fails}
            return super().model()
        """)
    arguments = (
        *("--run-dir", str(directory), "--json", str(results)),
        *("--vary", "task.settings.fails=true,false"),
    )
    told = sweep(*arguments, code=1)
    assert "run 1 of 2: task.settings.fails=true, seed 0 failed: " in told
    assert "run 2 of 2: task.settings.fails=false, seed 0: accuracy" in told
    again = f"the same command with  --run-dir '{directory}'  repeats them"
    assert f"1 of 2 runs failed; {again}" in told
    failed, done = (each["runs"] for each in json.loads(results.read_text())["variants"])
    assert "not yet" in failed[0]["failed"]
    assert done[0]["accuracy"] > 0
    assert "task.settings.fails=false" in (directory / "comparison.html").read_text()
    task.write_text(whole)
    assert "failed" not in sweep(*arguments)


@pytest.mark.parametrize("training", ["one-by-one", "auto"])
def test_a_simulation_says_which_parameter_the_optimizer_freezes(
    sweep, write_task, tmp_path, training
):
    write_task("""
        def optimizer(self, parameters, participant):
            parameters.named["weight"].requires_grad_(False)
            return super().optimizer(parameters, participant)
        """)
    told = sweep(
        "--set", f"simulation.training={training}", "--run-dir", str(tmp_path / "run"), code=1
    )
    assert "optimizer() froze 'weight', which would stay so in later rounds" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("where", ["device", "server"])
def test_a_variant_that_meets_a_defect_leaves_the_results_of_the_others(
    job, tmp_path, monkeypatch, where
):
    owner, name = (DeviceRun, "train") if where == "device" else (Coordinator, "_run")
    whole = getattr(owner, name)

    def defective(self, *arguments, **options):
        job = self.job if where == "device" else self.parts.job
        if job.task.settings["fails"]:
            raise KeyError("0.weight")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(owner, name, defective)
    directory, results = tmp_path / "sweep", tmp_path / "results.json"
    arguments = (
        *(job, *COMMON, "--run-dir", str(directory), "--json", str(results)),
        *("--set", "federated.secure_aggregation=false", "--set", "attempts=1"),
        *("--vary", "task.settings.fails=true,false"),
    )
    ended = CliRunner().invoke(simulate, arguments)
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit)  # and no traceback
    assert "1 of 2 runs failed" in ended.output
    failed, done = (each["runs"] for each in json.loads(results.read_text())["variants"])
    assert "internal error: KeyError: '0.weight'" in failed[0]["failed"]
    assert done[0]["accuracy"] > 0
    assert "task.settings.fails=false" in (directory / "comparison.html").read_text()
