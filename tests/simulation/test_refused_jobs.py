"""A job that is refused once its task is loaded does not keep its run directory."""

import subprocess

import pytest

from isthmus import JobError
from isthmus_server.runs.local.session import LocalRun
from isthmus_server.storage.run_description import is_simulated
from isthmus_simulation.run import Simulation

JOB = """
name = "table"
rounds = 1

[task]
source = "task.py:Learn"

[strategy]
policy = "federated"

[federated]
clients = 4
cohort = 4
local_steps = 1
batch_size = 4

[simulation]
clients = 4
processes = 1
"""
REFUSED = 'federated.compression={bits=3,one_in=4,one_in_of={"nothing.*"=1}}'
SIMULATED = "simulation.clients=8"


@pytest.fixture
def isthmus(write_task, forked_commands, tmp_path):
    """Run a command with a job and the directory `run`; returns what it prints."""
    write_task()
    (tmp_path / "job.toml").write_text(JOB)

    def command(name, *arguments, code=0):
        words = [name, tmp_path / "job.toml", "--run-dir", tmp_path / "run", *arguments]
        environment = forked_commands.environment()
        done = subprocess.run(["isthmus", *words], capture_output=True, text=True, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return command


def test_the_corrected_command_trains(isthmus, tmp_path):
    assert "matches no exchanged tensor" in isthmus("simulate", "--set", REFUSED, code=1)
    assert "round   1" in isthmus("simulate")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_robust_rule_that_cannot_be_used_is_refused_before_there_is_a_run(
    write_task, make_job, tmp_path
):
    write_task()
    robust = (
        "strategy.policy=federated",
        "simulation.clients=64",
        "federated.cohort=64",
        "federated.robust=trimmed-mean",
        "federated.secure_aggregation=true",
        "federated.robust_settings={share=0.1}",
        "federated.robust_groups=8",
        "federated.robust_minimum=8",
    )
    sentence = (
        r"only 6 of 8 random groups .* raise the share to 0\.17 or more, or federated\.robust_gr"
    )
    with pytest.raises(JobError, match=sentence):
        Simulation.new(make_job(*robust), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_simulation_can_have_the_directory_of_a_refused_run(isthmus, make_job, tmp_path):
    assert "matches no exchanged tensor" in isthmus("run", "--set", REFUSED, code=1)
    assert not is_simulated(tmp_path / "run")
    Simulation.new(make_job(SIMULATED), tmp_path, tmp_path / "run").store.close()
    assert is_simulated(tmp_path / "run")


def test_stacked_training_that_the_job_cannot_have_is_refused_before_there_is_a_run(
    make_job, tmp_path
):
    compressed = "federated.compression={}", "federated.secure_aggregation=true"
    job = make_job(SIMULATED, "simulation.training=stacked", *compressed)
    with pytest.raises(JobError, match="set its key step_ahead = 0, or train one by one"):
        Simulation.new(job, tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_stacked_models_are_in_float32(make_job, tmp_path):
    small = "model.start='base'", f"model.sha256='{'ab' * 32}'", "federated.frozen_dtype='int8'"
    job = make_job(SIMULATED, "simulation.training=stacked", *small)
    with pytest.raises(JobError, match=r"without federated\.frozen_dtype; remove it, or train one"):
        Simulation.new(job, tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_simulated_devices_keep_no_control_variates(make_job, tmp_path):
    job = make_job(SIMULATED, "federated.control_variates=8", "federated.secure_aggregation=false")
    with pytest.raises(JobError, match=r"remove federated\.control_variates, or use"):
        Simulation.new(job, tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def refused_simulation(make_job, tmp_path):
    """The directory of a simulation that was refused."""
    store = Simulation.new(make_job(SIMULATED), tmp_path, tmp_path / "run").store
    store.finish("failed", "'nothing.*' matches no exchanged tensor", None)
    store.close()
    return store.directory


def test_a_run_can_have_the_directory_of_a_refused_simulation(
    refused_simulation, make_job, tmp_path
):
    LocalRun.new(make_job(), tmp_path, refused_simulation).store.close()
    assert not is_simulated(refused_simulation)


def test_nodes_begin_the_corrected_job_in_the_same_directory(
    refused_simulation, make_job, tmp_path
):
    job = make_job(SIMULATED, "rounds=3")
    simulation = Simulation.new_or_resumed(job, tmp_path, refused_simulation)
    assert simulation.store.job.rounds == 3
    assert simulation.store.status()[0] == "running"
    simulation.store.close()
