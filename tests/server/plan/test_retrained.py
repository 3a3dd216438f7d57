"""`isthmus what-if --replay`: other policies are trained in simulation, and estimates corrected."""

import contextlib
import dataclasses
import functools
import json

import pytest
from click.testing import CliRunner
from tests.server.plan.trained_runs import log_of

from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus_server.cli.what_if import what_if as what_if_command
from isthmus_server.plan.retrained import retrained, simulated_job
from isthmus_server.plan.what_if import WhatIf
from isthmus_server.storage.store import Store


@pytest.fixture
def trained(trained):
    """Fewer rounds, which other policies train again."""
    return functools.partial(trained, rounds=9)


def replayed(directory, *policies):
    with contextlib.closing(Store.open(directory)) as store:
        return retrained(store, WhatIf.of(store), policies)


def command(*arguments):
    return CliRunner().invoke(what_if_command, arguments, catch_exceptions=False)


def test_what_is_said_is_what_runs_of_the_other_policies_reach(trained):
    found = replayed(trained("schedule"), "federated", "hybrid", "adaptive", "bandit")
    assert found.again.value == found.value
    by_policy = {each.policy: each for each in found.alternatives}
    for policy in ("federated", "hybrid", "adaptive"):
        last = log_of(trained(policy)).rounds[-1]
        assert by_policy[policy].trained.value == last.record.metrics["accuracy"]
        assert by_policy[policy].trained.rounds == last.record.round
    assert by_policy["hybrid"].reached is None
    assert "; there was no estimate" in by_policy["hybrid"].text
    assert by_policy["datacenter"].trained is None


def test_the_command_says_by_how_much_the_estimate_was_wrong(trained, monkeypatch):
    directory = str(trained("schedule", rounds=16))
    monkeypatch.setattr("isthmus_server.plan.what_if.OPEN", 0.0)
    assert (
        "; the log had left 0." in command(directory, "--replay", "--policies", "federated").stdout
    )
    monkeypatch.setattr("isthmus_server.plan.what_if.OPEN", 10.0)  # a small task is noisy
    done = command(directory, "--replay", "--policies", "federated,plateau")
    assert "trained again in simulation, it reaches" in done.stdout
    assert ": as the run, and so far may be off" in done.stdout
    assert "federated     " in done.stdout
    table = json.loads(command(directory, "--replay", "--policies", "federated", "--json").stdout)
    (found,) = (each for each in table["alternatives"] if each["policy"] == "federated")
    assert found["trained"]["rounds"] == 16
    median = found["reached"]["median"]
    assert found["error"] == pytest.approx(median - found["trained"]["value"])
    assert "the estimate " in done.stdout
    assert "the estimates were off by" in done.stdout


def test_policies_without_a_replay_or_of_no_such_name_are_refused(trained):
    directory = trained("schedule")
    with pytest.raises(UserError, match="add it, or leave them out"):
        command(str(directory), "--policies", "federated")
    with pytest.raises(UserError, match="names 'schedule', and other policies of this run are"):
        replayed(directory, "schedule")


def test_a_run_whose_task_is_gone_is_refused_with_its_path(trained, tmp_path):
    directory = trained("schedule")
    (tmp_path / "task.py").unlink()
    with pytest.raises(UserError, match=r"task\.py is not there; put it back"):
        replayed(directory, "federated")


def test_a_run_whose_data_are_gone_or_others_is_refused(trained, tmp_path, write_task):
    (tmp_path / "rows").touch()
    plain = {"federated.secure_aggregation": False}
    directory = trained("schedule", **{"task.data": "rows", **plain})
    (tmp_path / "rows").unlink()
    with pytest.raises(UserError, match="rows is not there; put it back"):
        replayed(directory, "federated")
    (tmp_path / "rows").touch()
    write_task("def local_data(self, participant):\n    return rows(21, seed=1)")
    with pytest.raises(UserError, match="has 21 examples here, and had 20 in the run"):
        replayed(directory, "federated")


def test_private_data_are_not_trained_on_again(trained):
    directory = trained("schedule")
    with contextlib.closing(Store.open(directory)) as store:
        found = WhatIf.of(store)
        privacy = {"mechanism": "distributed", "epsilon": 20, "delta": 1e-3}
        store.job = with_changes(store.job, {"strategy.policy": "federated", "privacy": privacy})
        with pytest.raises(UserError, match=r"--replay trains on the data, and \[privacy\]"):
            retrained(store, found)


def with_receipts(log, change):
    rounds = []
    for each in log.rounds:
        receipts = [change(receipt) for receipt in each.record.receipts]
        record = dataclasses.replace(each.record, receipts=receipts)
        rounds.append(dataclasses.replace(each, record=record))
    return dataclasses.replace(log, rounds=rounds)


def test_real_devices_are_simulated_at_the_speed_that_they_had(trained):
    log = log_of(trained("schedule", **{"federated.secure_aggregation": False}))

    def slow(receipt):
        is_lost = receipt.participant == "client-1"
        return dataclasses.replace(
            receipt, seconds=2.0 * receipt.steps, status="dropped" if is_lost else receipt.status
        )

    job = simulated_job(with_receipts(log, slow), simulated=False)
    assert job.simulation.clients == 4
    assert job.simulation.step_seconds == pytest.approx(2.0)
    assert job.simulation.speed_spread == 0
    assert job.simulation.datacenter_step_seconds == pytest.approx(2.0)
    assert job.simulation.dropout == pytest.approx(0.25)
    assert simulated_job(log, simulated=True) == log.job


def test_devices_with_data_of_their_own_are_not_simulated(trained):
    def elsewhere(receipt):
        return dataclasses.replace(receipt, participant=f"phone-{receipt.participant}")

    log = with_receipts(log_of(trained("schedule")), elsewhere)
    with pytest.raises(UserError, match="the data of phone-client-0 are not here"):
        simulated_job(log, simulated=False)
