"""`isthmus plan --calibrate RUN`: a plan with what a run of the same task measured."""

import json

import pytest
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus_server.cli.plan import plan as plan_command
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import plan_of
from isthmus_simulation.trial import train_trial

JOB = """
name = "table"
rounds = 10
[task]
source = "task.py:Learn"
[strategy]
policy = "alternate"
[federated]
clients = 4
cohort = 4
secure_aggregation = false
[datacenter]
ranks = 1
steps = 5
batch_size = 4
[simulation]
training = "one-by-one"
step_seconds = 2.0
datacenter_step_seconds = 0.5
"""


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task()
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(job_file, tmp_path):
    """A simulated run of the first four rounds."""
    plan = plan_of(job_file, (), PlanOptions())
    train_trial(plan.job, tmp_path, tmp_path / "run", 4)
    return tmp_path / "run"


def test_what_the_ranks_of_the_run_were_is_asked(job_file, run):
    said = "does not say whether its ranks were GPUs"
    plan = plan_of(job_file, (), PlanOptions(calibrate=run))
    assert any(said in each for each in plan.lines())
    assert said in plan.html()
    told = plan_of(job_file, (), PlanOptions(calibrate=run, device="cpu"))
    assert not any(said in each for each in told.lines())
    assert said not in told.html()


def test_times_are_those_that_the_run_measured(job_file, run):
    plan = plan_of(job_file, ("rounds=20", "datacenter.steps=50"), PlanOptions(calibrate=run))
    step = {each.name: each for each in plan.step(plan.sides.datacenter)}
    assert step["time of a step"].value == pytest.approx(0.5)
    assert step["time of a round"].value == pytest.approx(25.0)
    assert "measured in the simulated run table-" in step["time of a step"].how
    figures = {each.name: each for each in plan.measured}
    of_round = plan.calibration.measured["federated round"]
    assert figures["time, all rounds federated"].value == pytest.approx(20 * of_round.low)
    assert figures["step of a device"].value == pytest.approx(2.0, rel=0.1)
    assert figures["devices dropped"].value == 0


def test_bytes_of_the_run_are_the_planned_ones(job_file, run):
    plan = plan_of(job_file, (), PlanOptions(calibrate=run))
    errors = {each.name: each.error for each in plan.errors}
    assert errors["to a device in a round"] == errors["from a device in a round"] == 0.0
    smaller = ("federated.codec=rounded", "federated.codec_settings={bits=4}")
    changed = plan_of(job_file, smaller, PlanOptions(calibrate=run))
    by_name = {each.name: each for each in changed.errors}
    assert by_name["from a device in a round"].error > 0.1
    assert "off by +" in by_name["from a device in a round"].text


def test_a_step_of_another_size_is_not_taken_from_the_run(job_file, run):
    plan = plan_of(job_file, ("datacenter.batch_size=8",), PlanOptions(calibrate=run))
    assert [each.name for each in plan.step(plan.sides.datacenter)] == ["operations of a step"]
    other = plan_of(job_file, (), PlanOptions(calibrate=run, ranks=2))
    assert [each.name for each in other.step(other.sides.datacenter)] == ["operations of a step"]


def test_the_time_of_rounds_with_other_settings_is_not_taken_from_the_run(job_file, run):
    plan = plan_of(job_file, ("datacenter.steps=50",), PlanOptions(calibrate=run))
    names = [each.name for each in plan.measured]
    assert "time, all rounds federated" in names
    assert "time, all rounds datacenter" not in names
    assert "the run had other settings (datacenter.steps)" in "\n".join(plan.lines())
    assert "The run had other settings (datacenter.steps)" in plan.html()
    other = plan_of(job_file, (), PlanOptions(calibrate=run, ranks=8))
    assert "time, all rounds datacenter" not in [each.name for each in other.measured]
    longer = plan_of(job_file, ("federated.local_epochs=9",), PlanOptions(calibrate=run))
    names = [each.name for each in longer.measured]
    assert "time, all rounds federated" not in names
    assert "time, all rounds datacenter" in names


def test_a_rate_that_was_given_counts_more_than_the_run(job_file, run):
    plan = plan_of(job_file, (), PlanOptions(calibrate=run, tflops=2.0))
    step = {each.name: each for each in plan.step(plan.sides.datacenter)}
    assert step["rate"].value == 2e12
    assert "given by --tflops" in step["time of a step"].how


def test_the_command_says_what_was_measured(job_file, run):
    arguments = [str(job_file), "--calibrate", str(run)]
    text = CliRunner().invoke(plan_command, arguments, catch_exceptions=False).output
    assert "calibration: measured in the simulated run table-" in text
    assert "as planned" in text
    table = json.loads(
        CliRunner().invoke(plan_command, [*arguments, "--json"], catch_exceptions=False).output
    )
    assert {each["error"] for each in table["calibration"]["errors"]} == {0.0}


def test_the_run_of_another_task_is_refused(job_file, run):
    with pytest.raises(UserError, match=r"has a run of another task, task\.py:Learn"):
        plan_of(job_file, ("task.settings.lr=0.5",), PlanOptions(calibrate=run))


def test_the_run_of_a_file_of_the_same_name_elsewhere_is_refused(job_file, run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.toml").write_text(JOB)
    (other / "task.py").write_text((tmp_path / "task.py").read_text() + "# other code\n")
    with pytest.raises(UserError, match=r"a run of another task: task\.py:Learn has other code in"):
        plan_of(other / "job.toml", (), PlanOptions(calibrate=run))


def test_a_folder_without_a_run_is_refused(job_file, tmp_path):
    with pytest.raises(UserError, match="no run"):
        plan_of(job_file, (), PlanOptions(calibrate=tmp_path / "nothing"))
