"""`isthmus what-if`: what other policies would have reached, and what the log cannot say."""

import contextlib
import dataclasses
import json

import pytest
from click.testing import CliRunner
from tests.server.plan.trained_runs import log_of

from isthmus.errors import UserError
from isthmus.job import load_job, with_changes
from isthmus_server.cli.run import why
from isthmus_server.cli.what_if import what_if as what_if_command
from isthmus_server.plan.what_if import WhatIf, alternative, curves_of, facts_of
from isthmus_server.storage.store import Store
from isthmus_simulation.trial import train_trial


def output_of(command, *arguments):
    return CliRunner().invoke(command, arguments, catch_exceptions=False).output


def what_if(directory):
    with contextlib.closing(Store.open(directory)) as store:
        return WhatIf.of(store)


def reached(directory):
    return log_of(directory).rounds[-1].record.metrics["accuracy"]


def test_regimes_that_were_trained_have_a_forecast_that_a_run_meets(trained):
    found = {each.policy: each for each in what_if(trained("schedule")).alternatives}
    for policy in ("federated", "datacenter"):
        interval = found[policy].reached or found[policy].open
        assert interval.low <= reached(trained(policy)) <= interval.high
        assert interval.high - interval.low < 0.6
    assert found["federated"].rounds == (16, 16)
    assert found["federated"].price == (64.0, 64.0)
    assert found["datacenter"].price == (32.0, 32.0)


def test_what_no_round_says_is_not_guessed(trained):
    found = {each.policy: each for each in what_if(trained("schedule")).alternatives}
    assert found["hybrid"].reached is None
    assert "hybrid by weighted rounds, and none was trained" in found["hybrid"].unknown
    assert "which only a run has" in found["adaptive"].unknown
    assert "datacenter rounds follow federated ones, which never" in found["alternate"].unknown
    alone = {each.policy: each for each in what_if(trained("federated")).alternatives}
    assert "datacenter rounds, and none was trained" in alone["datacenter"].unknown
    in_turn = {each.policy: each for each in what_if(trained("alternate")).alternatives}
    assert "federated rounds follow federated ones, which never" in in_turn["federated"].unknown


def test_policies_that_follow_a_metric_decide_on_its_forecast(trained):
    found = {each.policy: each for each in what_if(trained("bandit")).alternatives}
    assert found["alternate"].reached or found["alternate"].open, found["alternate"].unknown
    found = {each.policy: each for each in what_if(trained("schedule")).alternatives}
    assert "datacenter rounds follow federated ones" in found["bandit"].unknown


def test_the_budget_ends_other_policies_too(trained):
    directory = trained("schedule", budget=40)
    found = {each.policy: each for each in what_if(directory).alternatives}
    assert found["federated"].rounds == (10, 10)
    assert found["federated"].price == (40.0, 40.0)


def forecast_parts(log):
    curves = curves_of([log], "accuracy")
    return facts_of([log], "accuracy"), curves, "accuracy"


def test_the_limit_of_bytes_ends_other_policies_too(trained):
    log = log_of(trained("schedule"))
    (each_round,) = {each.device_bytes for each in log.rounds if each.kind == "federated"}
    limited = with_changes(log.job, {"device_bytes": 5 * each_round + 1})
    found = alternative(limited, "federated", *forecast_parts(log))
    assert found.rounds == (5, 5)


def test_rounds_cost_without_the_gradients_that_another_policy_had_measured(trained):
    log = log_of(trained("schedule"))
    dear = []
    for each in log.rounds:
        if each.kind == "federated" and len(dear) < 10:
            cost = dataclasses.replace(each.record.cost, price=each.price + 1)
            record = dataclasses.replace(each.record, cost=cost)
            plan = dataclasses.replace(each.plan, measure_gradients=True)
            each = dataclasses.replace(each, record=record, plan=plan)
        dear.append(each)
    log = dataclasses.replace(log, rounds=dear)
    found = alternative(log.job, "federated", *forecast_parts(log))
    assert found.price == (64.0, 64.0)


def test_rounds_that_only_began_with_kept_models_are_not_learnt(trained):
    log = log_of(trained("schedule"))
    kept = [
        dataclasses.replace(each, plan=dataclasses.replace(each.plan, start="kept"))
        if each.kind == "federated"
        else each
        for each in log.rounds
    ]
    log = dataclasses.replace(log, rounds=kept)
    found = alternative(log.job, "federated", *forecast_parts(log))
    assert "federated rounds, and none was trained and evaluated" in found.unknown


def test_the_command_says_it_and_why_links_to_it(trained):
    directory = trained("schedule")
    text = output_of(what_if_command, str(directory))
    assert "policy schedule reached accuracy" in text
    assert "hybrid        cannot be known: it trains hybrid by weighted rounds" in text
    table = json.loads(output_of(what_if_command, str(directory), "--json"))
    assert {each["policy"] for each in table["alternatives"]} >= {"federated", "adaptive"}
    assert f"isthmus what-if {directory}" in output_of(why, str(directory))


def test_the_command_says_which_rounds_would_tell_more(trained):
    directory = trained("federated", rounds=6)
    lines = output_of(what_if_command, str(directory)).splitlines()
    assert lines[-1].startswith("a log tells more with at least 4 datacenter rounds (for dat")
    assert "; at least 4 hybrid by weighted rounds (for hybrid" in lines[-1]
    assert f"isthmus what-if {directory} --replay" in lines[-2]
    found = {each.policy: each for each in what_if(directory).alternatives}
    assert found["adaptive"].missing == ""
    both = {each.policy: each for each in what_if(trained("schedule")).alternatives}
    assert both["alternate"].missing == "datacenter rounds right after federated ones"


def test_a_job_without_phases_has_none_to_follow(trained):
    directory = trained("federated", rounds=4, **{"strategy.schedule": ()})
    (found,) = (a for a in what_if(directory).alternatives if a.policy == "schedule")
    assert found.text == (
        "cannot be known: there are no phases to follow: the job has no strategy.schedule"
    )


def test_what_the_rounds_leave_open_is_no_forecast(trained, monkeypatch):
    monkeypatch.setattr("isthmus_server.plan.what_if.OPEN", 0.0)
    (found,) = (a for a in what_if(trained("schedule")).alternatives if a.policy == "federated")
    assert found.reached is None
    assert found.open.low < found.open.high
    assert found.missing == "more rounds like those it has"
    assert "cannot be known: the run's rounds leave " in found.text


def test_a_run_without_metrics_is_refused(trained, tmp_path, write_task):
    write_task("def eval_data(self):\n    return None")
    job = with_changes(load_job(tmp_path / "job.toml"), {"rounds": 2})
    train_trial(job, tmp_path, tmp_path / "silent", 2)
    with pytest.raises(UserError, match="no round with held-out metrics"):
        what_if(tmp_path / "silent")
