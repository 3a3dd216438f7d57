"""`isthmus privacy plan`: what a budget means, before anything runs."""

import json
import shlex

import pytest
from click.testing import CliRunner

from isthmus.errors import JobError
from isthmus_server.cli.privacy import plan

DEVICES = ("privacy.mechanism=distributed", "privacy.epsilon=8", "privacy.delta=1e-5")
EXAMPLES = (
    "datacenter.privacy.epsilon=4",
    "datacenter.privacy.noise=2",  # finding it takes seconds
    "datacenter.privacy.delta=1e-5",
    "datacenter.privacy.examples=1000",
    "datacenter.data_parallel=2",
    "datacenter.batch_size=5",
    "datacenter.steps=10",
    "datacenter.zero_stage=0",
)


@pytest.fixture
def invoke(tmp_path, write_task):
    write_task()
    job = tmp_path / "job.toml"
    job.write_text('name = "table"\nrounds = 20\n[task]\nsource = "task.py:Learn"')

    def invoke(*arguments, changes=()):
        sets = [word for change in changes for word in ("--set", change)]
        return CliRunner().invoke(plan, [str(job), *sets, *arguments])

    return invoke


def test_the_plan_has_both_units_apart(invoke):
    tables = json.loads(invoke("--json", changes=(*DEVICES, *EXAMPLES)).output)
    devices, datacenter = tables["devices"], tables["datacenter"]
    assert (devices["unit"], devices["adjacency"]) == ("device", "zero-out")
    assert devices["epsilon_after"]["20"] == pytest.approx(8, rel=0.01)
    assert len(devices["epsilon_after"]) == 10
    assert devices["update_bytes"] == 2 * devices["size"] == 30
    cohorts = list(devices["noise_to_signal"].values())
    # Of 8, 16 and 80 devices the noise of 5, 10 and 52 is counted on, and all of them add it.
    ratios = [(5 / 8) ** 0.5 * 8, (10 / 16) ** 0.5 * 16, (52 / 80) ** 0.5 * 80]
    assert cohorts == pytest.approx([cohorts[0] * ratios[0] / each for each in ratios])
    assert (datacenter["unit"], datacenter["adjacency"]) == ("example", "add-or-remove")
    assert datacenter["sampling_probability"] == pytest.approx(0.01)
    assert sorted(datacenter["epsilon_after"].values()) == list(
        datacenter["epsilon_after"].values()
    )
    assert 0 < datacenter["epsilon_after"]["200"] < 1


def test_the_plan_of_one_unit_is_a_few_lines(invoke):
    lines = invoke(changes=EXAMPLES).output.splitlines()
    assert lines[0].split(maxsplit=1) == ["mechanism", "DP-SGD in the datacenter"]
    assert "200, each with about 10 of 1000 examples" in lines[3]


def test_a_job_without_a_budget_has_no_plan(invoke):
    assert isinstance(error := invoke().exception, JobError)
    assert "has no differential privacy; add a table [privacy], " in str(error)


ON_DEVICES = ("federated.privacy.epsilon=4", "federated.privacy.delta=1e-6")


def test_the_plan_of_devices_examples_is_for_the_number_that_the_job_says(invoke):
    changes = (*ON_DEVICES, "federated.privacy.examples=320", "federated.local_steps=5")
    table = json.loads(invoke("--json", changes=changes).output)["device_examples"]
    assert (table["unit"], table["adjacency"]) == ("example", "zero-out")
    assert (table["budget"], table["participations"]) == (4.0, 20)
    (device,) = table["devices"]
    assert (device["examples"], device["steps"], device["sampling_probability"]) == (320, 5, 0.1)
    assert 3.99 < device["epsilon_after"]["20"] <= 4
    assert device["epsilon_after"]["2"] < 1.9


def test_without_a_number_it_is_for_devices_of_several_sizes(invoke):
    lines = invoke(changes=ON_DEVICES).output.splitlines()
    assert lines[0].split(maxsplit=1) == ["mechanism", "DP-SGD on each device"]
    assert "one example of one device (zero-out)" in lines[1]
    sizes = [line.split()[-2] for line in lines if line.startswith("noise")]
    assert sizes == ["320", "3200", "32000"]


def test_with_a_large_delta_it_is_for_the_largest_device_that_it_allows(invoke):
    lines = invoke(changes=(*ON_DEVICES[:1], "federated.privacy.delta=0.01")).output.splitlines()
    assert [line.split()[-2] for line in lines if line.startswith("noise")] == ["99"]
    assert lines[-1].split(maxsplit=1) == ["refused", "by devices with 100 or more examples"]


def test_a_delta_that_leaves_no_device_is_refused(invoke):
    error = invoke(changes=(*ON_DEVICES[:1], "federated.privacy.delta=0.1")).exception
    assert isinstance(error, JobError)
    assert "of at most 9 examples, and federated.batch_size=32 for devices of at" in str(error)


def test_a_small_epsilon_is_not_shown_as_zero(invoke):
    changes = (*ON_DEVICES, "federated.privacy.examples=320", "federated.privacy.epsilon=0.01")
    lines = invoke(changes=changes).output.splitlines()
    (line,) = [each for each in lines if each.startswith("epsilon")]
    assert "0.00 " not in line


def test_a_budget_that_no_noise_meets_is_refused_before_anything_runs(invoke):
    changes = (*ON_DEVICES, "federated.privacy.examples=320", "federated.privacy.epsilon=1e-3")
    assert isinstance(error := invoke(changes=changes).exception, JobError)
    assert "would need noise of more than 10000 times" in str(error)


def test_the_printed_options_give_the_plan_that_was_found(invoke):
    wanted = ("--find", "rounds", "--noise", "6.5")
    lines = invoke(*wanted, changes=DEVICES).output.splitlines()
    assert lines[0].split(maxsplit=1) == [
        "found",
        "rounds = 103, the most with noise of 6.5 times the clipping bound",
    ]
    name, *options = shlex.split(lines[1])
    assert name == "options"
    assert invoke(*options, changes=DEVICES).output.splitlines() == lines[2:]
    found = json.loads(invoke(*wanted, "--json", changes=DEVICES).output)["found"]
    assert found["changes"] == {"rounds": 103, "privacy.noise": 6.5}


def test_a_cohort_is_found_for_the_size_of_the_tasks_model(invoke):
    wanted = ("--find", "cohort", "--signal-to-noise", "3", "--json")
    tables = json.loads(invoke(*wanted, changes=DEVICES).output)
    cohort = tables["found"]["changes"]["federated.cohort"]
    assert tables["devices"]["cohort"] == cohort
    assert 0.9 * 3 < 1 / tables["devices"]["noise_to_signal"][str(cohort)] * 0.97 <= 3.1


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        (["--noise", "3"], DEVICES, "are for --find"),
        (["--find", "rounds", "--noise", "3"], (*DEVICES, *EXAMPLES), "say with --unit"),
        (["--find", "rounds", "--unit", "example"], DEVICES, "which the job does not have"),
        (
            ["--find", "rounds", "--signal-to-noise", "3"],
            EXAMPLES,
            "is about the updates of devices",
        ),
        (["--find", "rounds", "--noise", "3"], (), "has no differential privacy"),
    ],
)
def test_options_that_do_not_go_together_are_refused(invoke, options, changes, sentence):
    assert sentence in str(invoke(*options, changes=changes).exception)


def test_the_plan_says_what_evaluations_spend_and_how_exact_they_are(tmp_path, write_task):
    write_task(
        "def validation_data(self, participant):\n    return rows(5, seed=1)\n"
        "def device_metrics(self):\n    return {'accuracy': isthmus.Mean()}\n"
    )
    job = tmp_path / "job.toml"
    job.write_text('name = "table"\nrounds = 20\n[task]\nsource = "task.py:Learn"')
    changes = (*DEVICES, "evaluation.devices=8", "evaluation.every=6")
    sets = [word for change in changes for word in ("--set", change)]
    tables = json.loads(CliRunner().invoke(plan, [str(job), *sets, "--json"]).output)["devices"]
    assert tables["measurements"] == 4  # rounds 6, 12, 18 and 20
    assert tables["epsilon_after"]["20"] == pytest.approx(8, rel=0.01)
    assert 0 < tables["metric_noise"] < 1
    lines = CliRunner().invoke(plan, [str(job), *sets]).output
    assert "at most 4 evaluations and comparisons of one device; the noise of a metric is" in lines
