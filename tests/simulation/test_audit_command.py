"""The command `isthmus privacy audit`: what it prints, what it refuses, and what it leaves."""

import json
import re
import subprocess

import pytest
from click.testing import CliRunner
from tests.simulation import audit_faults as faults
from tests.simulation.test_audit import DEVICES, EXAMPLES, GAUSSIAN

from isthmus.errors import UserError
from isthmus_simulation import audit_command
from isthmus_simulation.virtual_time import VirtualTimeLoop

JOB = """
name = "table"

[task]
source = "task.py:Learn"

[strategy]
policy = "federated"

[federated]
clients = 4
cohort = 4
secure_aggregation = false

[simulation]
processes = 1
training = "one-by-one"
"""
MORE = """
def local_data(self, participant):
    return rows(100, seed=sum(participant.name.encode()))
"""
INTERRUPTED = """
def local_data(self, participant):
    import os, signal
    os.kill(os.getpid(), signal.SIGINT)
    return rows(100, seed=1)
"""
NO_FALSE_ALARM = ("--confidence", "0.999999999")
"""As at the usual confidence some of 10,000 audits of honest jobs raise an alarm."""
FIGURES = {
    *("job", "noise", "unit", "mechanism", "budget", "delta", "claimed_epsilon"),
    *("measured_epsilon_at_least", "confidence", "guesses", "right", "right_at_least"),
    *("right_allowed", "most_measurable_epsilon", "finds_noise_below", "runs", "over_budget"),
    *("undercharged", "repeated", "alarm", "whatever_the_fault_at_least"),
}


def changes(overrides):
    return [word for each in overrides for word in ("--set", each)]


@pytest.fixture
def job(write_task, tmp_path):
    """The file of a job of four simulated devices."""
    write_task(MORE)
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture
def audited(job, forked_commands, tmp_path):
    """Run the command as a process; returns what it prints. It leaves nothing."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = {each.name for each in tmp_path.iterdir()}

    def run(*arguments, code=0):
        environment = forked_commands.environment() | {"TMPDIR": str(temporary)}
        command = ["isthmus", "privacy", "audit", str(job), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        assert list(temporary.iterdir()) == []
        assert {each.name for each in tmp_path.iterdir()} - {"__pycache__"} == before
        return done.stdout if code == 0 else done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("overrides", "unit"), [(GAUSSIAN, "device"), (EXAMPLES, "example")], ids=["device", "example"]
)
def test_a_job_of_each_unit_is_one_json_document_with_all_figures(audited, overrides, unit):
    arguments = ("--json", "--canaries", "64", *NO_FALSE_ALARM)
    document = json.loads(audited(*arguments, *changes(overrides)))
    assert document.keys() == FIGURES
    assert document["unit"] == unit
    assert document["guesses"] >= 64
    assert document["measured_epsilon_at_least"] <= document["claimed_epsilon"]
    assert document["claimed_epsilon"] <= document["budget"]
    assert not document["alarm"]


def test_a_job_with_both_promises_needs_a_unit(audited):
    both = changes((*GAUSSIAN, *EXAMPLES))
    assert "say which to audit by --unit device or --unit example" in audited(*both, code=1)
    text = audited("--unit", "device", "--canaries", "64", *NO_FALSE_ALARM, *both)
    assert "one device, whose update is zeros" in text
    assert "which is a limit of the method and not what the job reveals" in text
    found = re.search(r"find noise below (\d+%) of what is promised", text)[1]
    verdict = text.partition("verdict")[2]
    assert "no alarm: nothing was measured that the claim excludes" in verdict
    assert f"; noise between {found} and 100% of what is promised may not have been" in verdict
    more = re.search(r"--canaries 1000 would find noise below (\d+)%", verdict)[1]
    assert int(more) > int(found.rstrip("%"))


def test_more_guesses_than_were_asked_for_are_explained(audited):
    text = audited("--canaries", "64", *NO_FALSE_ALARM, *changes(GAUSSIAN))
    made = int(re.search(r"of (\d+) right", text)[1])
    assert ("(64 were asked for, and a run counts as a whole)" in text) == (made > 64)


def test_a_job_without_noise_gets_a_report_of_membership(audited):
    # A coin for each of four devices in each round: not all of them fall on one side.
    document = json.loads(audited("--json", *changes(("rounds=8", "federated.local_steps=2"))))
    assert not document["noise"]
    assert document["device_in_a_sum"]["members"] + document["device_in_a_sum"]["others"] == 32
    assert 0 <= document["example_in_the_model"]["area"] <= 1


def test_an_interrupt_ends_it_and_leaves_nothing(audited, write_task):
    write_task(INTERRUPTED)
    assert "Traceback" not in audited(*changes(GAUSSIAN), code=130)


def simulated(work, *, loop_factory):
    import asyncio

    assert loop_factory is VirtualTimeLoop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


@pytest.fixture
def invoke(job, monkeypatch):
    """Run the command in this process."""
    monkeypatch.setattr(audit_command, "prepare", lambda: None)
    monkeypatch.setattr(audit_command, "run_until_stopped", simulated)

    def run(*arguments, file=job):
        return CliRunner().invoke(audit_command.audit, [str(file), *arguments])

    return run


def test_an_alarm_is_the_exit_status(invoke):
    with faults.long_updates():
        result = invoke("--canaries", "800", *changes((*DEVICES, "privacy.mechanism=gaussian")))
    assert result.exit_code == 1
    assert "verdict      ALARM: it is as if the noise was" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--confidence", "nan"), "--confidence nan is not in the range of 0.9 to 0.999999999"),
        (("--confidence", "1"), "--confidence 1.0 is not in the range"),
        (("--confidence", "0.5"), "--confidence 0.5 is not in the range"),
        (("--unit", "device"), "has no table [privacy], and it has no noise for what devices send"),
        (
            ("--unit", "example", *changes(GAUSSIAN)),
            "has no table [federated.privacy], and it has a table [privacy]: remove --unit",
        ),
        (("--canaries", "1", *changes(GAUSSIAN)), "1 canary can show an epsilon of at most"),
        (
            changes(("strategy.policy=datacenter", "datacenter.ranks=1")),
            "trains on no devices (strategy.policy = 'datacenter')",
        ),
        (changes((*EXAMPLES, "federated.batch_size=101")), "federated.batch_size=101 is more than"),
        (
            changes((*EXAMPLES, "federated.privacy.delta=0.5")),
            "delta=0.5 is not below 1 / examples",
        ),
        (changes((*GAUSSIAN, "privacy.delta=0.2")), "has no room for a canary device"),
    ],
)
def test_bad_input_is_one_sentence(invoke, arguments, sentence):
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


@pytest.mark.parametrize("canaries", ["0", "-1", "1000000000", "many"])
def test_a_number_of_canaries_out_of_its_range_is_a_usage_error(invoke, canaries):
    result = invoke("--canaries", canaries)
    assert result.exit_code == 2
    assert "'--canaries'" in result.output


def test_a_job_file_that_is_missing_or_broken_is_one_sentence(invoke, tmp_path):
    missing = invoke(file=tmp_path / "no.toml").exception
    assert isinstance(missing, UserError)
    assert "no.toml" in str(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    assert isinstance(invoke(file=broken).exception, UserError)
