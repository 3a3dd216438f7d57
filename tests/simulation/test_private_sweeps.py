"""The runs of a sweep have the same devices, so they share one privacy budget."""

import json
import shutil
import subprocess

import pytest

from isthmus_privacy.dp.ledger import Ledger
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store

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

[privacy]
mechanism = "gaussian"
epsilon = 8
delta = 0.01
"""
VALIDATES = """
def validation_data(self, participant):
    return rows(15, seed=3)

def device_metrics(self):
    return {"accuracy": isthmus.Mean()}
"""


@pytest.fixture
def sweep(write_task, tmp_path, forked_commands):
    """Simulate four devices as a process, with values of one key; returns results and output."""

    def run(*arguments, code=0, values="0,0.5,1", task="pass"):
        write_task(task)
        file = tmp_path / "job.toml"
        file.write_text(JOB)
        results = tmp_path / "results.json"
        results.unlink(missing_ok=True)
        command = [
            *("isthmus", "simulate", str(file), "--clients", "4", "--cohort", "4"),
            *("--run-dir", str(tmp_path / "sweep"), "--json", str(results)),
            *("--vary", f"federated.proximal={values}"),
            *arguments,
        ]
        environment = forked_commands.environment()
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        told = done.stdout + done.stderr
        assert done.returncode == code, told
        assert "Traceback" not in told
        text = results.read_text() if results.exists() else ""
        return json.loads(text) if text else None, told

    return run


def settings(*keys):
    return [word for key in keys for word in ("--set", key)]


def rounds_of(found):
    return [run.get("rounds") for variant in found["variants"] for run in variant["runs"]]


@pytest.mark.parametrize(
    ("mechanism", "advice"),
    [
        ("gaussian", "made for all of them with privacy.participations=6"),
        ("distributed", "made for all of them with privacy.participations=6"),
        ("correlated", "or raise privacy.noise, which is "),
    ],
)
def test_runs_that_exceed_the_budget_together_are_refused_before_the_first(
    sweep, tmp_path, mechanism, advice
):
    way = settings(f"privacy.mechanism={mechanism}", "federated.secure_aggregation=true")
    found, told = sweep(*way, code=1)
    assert found is None
    assert "these 3 runs have the same data, and would spend epsilon 1" in told
    assert "the budget (privacy.epsilon) is 8, so only the first 1 fits: train fewer runs" in told
    assert advice in told
    assert not list((tmp_path / "sweep").glob("*/job.json"))


def test_the_noise_is_made_for_all_runs_and_the_total_is_shown(sweep, tmp_path):
    enough = settings("privacy.participations=6")
    found, told = sweep(*enough)
    assert rounds_of(found) == [2, 2, 2]
    (total,) = found["privacy"]
    ledger = Ledger.read(tmp_path / "sweep/privacy/devices.ledger")
    assert len(ledger.entries) == 6
    assert total["epsilon"] == ledger.epsilon("devices", 0.01)
    assert 0.98 * 8 < total["epsilon"] <= 8
    assert (total["unit"], total["budget"], total["delta"]) == ("device", 8, 0.01)
    assert total["runs"] == 3
    sentence = (
        f"privacy: epsilon {total['epsilon']:.4g} of 8 at delta 0.01 for one device (zero-out), "
        "spent by all 3 runs together"
    )
    assert sentence in told
    assert sentence in (tmp_path / "sweep/comparison.html").read_text()
    again, _ = sweep(*enough)  # has nothing left to do, and spends nothing
    assert again == found


def test_the_noise_of_evaluations_is_made_for_all_runs_too(sweep):
    evaluates = settings("evaluation.devices=4", "evaluation.quorum=3")
    _, told = sweep(*evaluates, code=1, task=VALIDATES)
    assert "privacy.participations=6 and privacy.measurements=6" in told
    enough = settings("privacy.participations=6", "privacy.measurements=6")
    found, _ = sweep(*evaluates, *enough, task=VALIDATES)
    assert rounds_of(found) == [2, 2, 2]
    assert all("devices_accuracy" in variant["runs"][0] for variant in found["variants"])
    (total,) = found["privacy"]
    assert 0.98 * 8 < total["epsilon"] <= 8


def test_runs_whose_rounds_are_not_known_before_end_when_the_common_budget_is_spent(
    sweep, tmp_path
):
    """Nobody knows when the first run ends: here it has spent half of what the noise is for."""
    unknown = settings("seconds=1e9", "privacy.participations=3")
    found, told = sweep(*unknown, code=1)
    assert rounds_of(found) == [2, 1, None]
    assert "have no privacy budget left" in found["variants"][2]["runs"][0]["failed"]
    assert "federated.proximal=0.5, seed 0 ended after 1 of 2 rounds: " in told
    (total,) = found["privacy"]
    assert 0.98 * 8 < total["epsilon"] <= 8
    records = []
    for name in ("0", "0.5"):
        store = Store.open(tmp_path / f"sweep/federated.proximal={name}-0")
        records.append(read_report(store).privacy.epsilon)
        store.close()
    assert records[1] == total["epsilon"]
    assert records[0] < records[1]


def test_data_that_are_nobodys_have_a_budget_for_each_run(sweep, tmp_path):
    found, told = sweep("--public-data")
    assert rounds_of(found) == [2, 2, 2]
    assert found["privacy"] == []
    assert "privacy:" not in told
    assert not (tmp_path / "sweep/privacy").exists()
    # Their charges are in no ledger of all runs.
    _, told = sweep(*settings("privacy.participations=6"), code=1)
    assert "has a run of another job" in told


@pytest.mark.parametrize("attack", ["remove", "remove files", "roll back"])
def test_the_ledger_of_a_sweep_cannot_be_set_back(sweep, tmp_path, attack):
    """The same command with further seeds would begin with nothing spent."""
    enough = settings("privacy.participations=8")
    sweep(*enough, values="0,1")
    ledgers = tmp_path / "sweep/privacy"
    older = shutil.copytree(ledgers, tmp_path / "older")
    sweep(*enough, "--seeds", "1", values="0,1")
    match attack:
        case "remove":
            shutil.rmtree(ledgers)
        case "remove files":
            for path in ledgers.iterdir():
                path.unlink()
        case "roll back":
            shutil.copytree(older, ledgers, dirs_exist_ok=True)
    found, told = sweep(*enough, "--seeds", "1", code=1, values="0,1")
    assert found is None
    assert "2 of 2 charges of the run in " in told


def test_a_population_cannot_be_varied(sweep):
    _, told = sweep("--vary", "privacy.population=one,two", code=1)
    assert "privacy.population is 'one' and 'two', and all runs have the same data" in told


def test_the_budgets_of_the_examples_of_devices_add_up(sweep):
    keys = settings(
        "federated.privacy.epsilon=4",
        "federated.privacy.delta=1e-3",
        "federated.privacy.noise=2",
        "privacy.participations=4",
    )
    found, told = sweep(*keys, values="0,1")
    of_devices, of_examples = found["privacy"]
    assert of_devices["epsilon"] <= 8
    assert (of_examples["epsilon"], of_examples["delta"]) == (8, 0.002)
    assert "epsilon at most 8 at delta 0.002 for one example of a device (zero-out)" in told
