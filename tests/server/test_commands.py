"""The commands of the server that start, compare and report runs."""

import contextlib

import pytest
from click.testing import CliRunner
from tests.server.storage.records import failed_attempt, planned_attempt

from isthmus.errors import UserError
from isthmus_server.cli import compare as comparison_commands
from isthmus_server.cli import run as commands
from isthmus_server.read.report.report import read_report
from isthmus_server.runs.local.processes import participant_commands
from isthmus_server.storage.store import Store


@pytest.fixture
def table_job(write_task, tmp_path):
    """The file of a job with the table task."""
    write_task()
    job = tmp_path / "job.toml"
    job.write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
    return job


def invoke(command, *arguments):
    """The exit code and output of a command; its `UserError` is for `isthmus.cli` to show."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], r"^give a job file, or --resume --run-dir DIR$"),
        (["--resume"], r"^--resume needs --run-dir"),
        (
            ["--resume", "--run-dir", "x", "--set", "a=1"],
            r"^x contains no run to resume",
        ),
        (
            ["job.toml", "--resume", "--run-dir", "x"],
            r"^JOB cannot be combined with --resume: a run keeps",
        ),
        (["--resume", "--run-dir", "nowhere"], r"^nowhere contains no run"),
        (["nowhere.toml"], r"^there is no job file nowhere\.toml$"),
    ],
)
def test_a_run_that_cannot_start_is_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        invoke(commands.run, *arguments)


@pytest.mark.parametrize("address", ["8080", "127.0.0.1:port", "127.0.0.1:70000", "127.0.0.1:"])
def test_an_address_of_another_form_is_refused(tmp_path, table_job, address):
    with pytest.raises(UserError, match=r"is not of the form HOST:PORT$"):
        invoke(commands.run, table_job, "--run-dir", tmp_path / "run", "--address", address)


def test_a_comparison_leaves_out_baselines_without_participants(make_job, capsys):
    assert comparison_commands._baselines(make_job("federated.clients=4")) == ["federated"]
    assert capsys.readouterr().out == (
        "the policy datacenter is not compared: datacenter.ranks=0 starts no participant for it\n"
    )
    both = make_job("federated.clients=4", "datacenter.ranks=1")
    assert comparison_commands._baselines(both) == ["datacenter", "federated"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        ("rounds", r"^--vary 'rounds' is not of the form key\.sub=value,value$"),
        ("rounds=1,2,1", r"^--vary 'rounds=1,2,1' has a value twice$"),
        ("rounds=2,0", r"^with rounds=0: job: rounds=0: |^with rounds=0: rounds=0"),
        ("federated.chort=2", r"^with federated\.chort=2: .*did you mean .*cohort"),
        ("rounds.x=2", r"^with rounds\.x=2: rounds\.x: 'rounds' is a value, not a table$"),
        ("seed=1,2", r"^--vary seed has no effect"),
    ],
)
def test_variants_that_are_no_jobs_are_refused_before_any_runs(tmp_path, table_job, vary, sentence):
    with pytest.raises(UserError, match=sentence):
        invoke(
            comparison_commands.compare, table_job, "--run-dir", tmp_path / "runs", "--vary", vary
        )


def test_a_seed_that_a_comparison_would_replace_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^--set seed has no effect: every variant is run with"):
        invoke(comparison_commands.compare, tmp_path / "job.toml", "--set", "seed=3")


@pytest.mark.parametrize("option", ["--run-dir", "--json"])
def test_a_comparison_does_not_start_if_its_results_cannot_be_written(tmp_path, table_job, option):
    place = table_job / "below" if option == "--run-dir" else tmp_path / "nowhere" / "figures.json"
    more = () if option == "--run-dir" else ("--run-dir", tmp_path / "runs")
    with pytest.raises(UserError, match=rf"^{place} cannot be written: "):
        invoke(comparison_commands.compare, table_job, option, place, *more)


def test_a_directory_in_place_of_the_results_is_refused_before_any_runs(tmp_path, table_job):
    with pytest.raises(UserError, match=rf"^{tmp_path} cannot be written: Is a directory$"):
        invoke(
            comparison_commands.compare,
            table_job,
            "--run-dir",
            tmp_path / "runs",
            "--json",
            tmp_path,
        )


def test_a_comparison_that_starts_no_participants_is_refused(tmp_path, write_task):
    write_task()
    job = tmp_path / "job.toml"
    job.write_text(
        'name = "table"\n[task]\nsource = "task.py:Learn"\n[federated]\nclients = 0\n'
        '[datacenter]\nranks = 0\n[simulation]\nclients = 6\n[strategy]\npolicy = "federated"\n'
    )
    place = ("--run-dir", tmp_path / "runs", "--vary", "rounds=1,2")
    with pytest.raises(UserError, match=r"^federated\.clients=0 and datacenter\.ranks=0 start no"):
        invoke(comparison_commands.compare, job, *place)


def test_a_comparison_of_no_seeds_is_refused(tmp_path):
    result = invoke(comparison_commands.compare, tmp_path / "job.toml", "--seeds", 0)
    assert result.exit_code == 2
    assert "0 is not in the range" in result.output


def test_a_truncated_log_is_one_sentence(make_job, tmp_path):
    Store.create(tmp_path / "run", make_job(), tmp_path).close()
    log = tmp_path / "run" / "run.sqlite"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 4096)
    with pytest.raises(UserError, match=r"^the run in .* is damaged \(database disk image"):
        invoke(commands.report, tmp_path / "run")


def test_the_report_of_a_run_that_just_began(make_job, tmp_path):
    Store.create(tmp_path / "run", make_job(), tmp_path).close()
    result = invoke(commands.report, tmp_path / "run")
    assert result.exit_code == 0
    assert "running" in result.output
    result = invoke(commands.report, tmp_path / "run", "--json")
    assert '"rounds": []' in result.output
    with pytest.raises(UserError, match="contains no run"):
        invoke(commands.report, tmp_path)


def test_the_report_of_a_run_that_was_stopped(make_job, tmp_path):
    with contextlib.closing(Store.create(tmp_path / "run", make_job(), tmp_path)) as store:
        with store.locked():
            store.plan(planned_attempt(1))
            store.fail(failed_attempt(1))
            assert read_report(store).status == "running"
        assert read_report(store).status == "stopped"


def test_local_participants_run_the_documented_commands(make_job, tmp_path):
    job = make_job("federated.clients=2", "datacenter.ranks=4")
    found = participant_commands(job, "127.0.0.1:1234", tmp_path)
    assert list(found) == ["datacenter-0", "client-0", "client-1"]
    assert " ".join(found["client-1"]) == (
        "client start --name client-1 --shard 1/2 --server 127.0.0.1:1234 --die-with-parent "
        f"--log-file {tmp_path}/logs/client-1.log"
    )
    assert " ".join(found["datacenter-0"]).startswith("datacenter launch --scheduler local")
    assert "--ranks 4" in " ".join(found["datacenter-0"])
