"""`isthmus why`: explained decisions, as text and as JSON."""

import json

import pytest
from click.testing import CliRunner
from tests.server.storage.records import planned_attempt
from tests.server.strategy.observations import comparison_of, observe

from isthmus.errors import UserError
from isthmus_server.cli.run import why
from isthmus_server.read.report.explain import explain
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_server.strategy import Plan
from isthmus_server.strategy.decision import DecidedWait, RequestedComparison
from isthmus_server.strategy.policy import Forecast

CURIOUS = """
from isthmus_server.strategy import Compare, Plan

class Mine:
    def __init__(self, strategy):
        pass

    def plan(self, seen):
        if seen.round == 1 and not seen.refused:
            return Compare(("initial", "served"), 40, "it wants to know more")
        return Plan("federated", f"round {seen.round} is for devices", {"phase": "edge"}, cohort=1)
"""


def why_output(*arguments):
    """What the command prints, on one line: where a terminal breaks lines does not matter."""
    result = CliRunner().invoke(why, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture
async def curious_run(deployment, tmp_path):
    """A run with a refused comparison, a cohort that was raised, a failed attempt and an end."""
    (tmp_path / "curious.py").write_text(CURIOUS)
    await deployment.start()
    deployment.faults["b"][2, 1] = "no power"
    store = deployment.create_run("run", "strategy.policy=curious:Mine", "budget=10", "rounds=8")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    return store


async def test_a_decision_is_explained_in_full(curious_run):
    second = why_output(curious_run.directory, 2)
    for sentence in (
        "round 2: federated, because round 2 is for devices",
        "rounds: 1 federated",
        "round 1, federated: held-out accuracy",
        "3 devices and 0 datacenters; a federated round invites 3 and needs 3",
        "devices: always within a window",
        "a round costs datacenter 0.5, federated 3",
        "7 of the budget of 10",
        "none was requested",
        "phase=edge",
        "a cohort of 1 became 3, which is the quorum",
        "3 devices are invited for 3 updates",
        "forecast: ",
        "cost 3, ",
        "loss is not known before a round like it",
        "compared with the forecast: ",
        "try 1 failed after",
        "no power",
        "3 of 3 took part",
        "; the loss fell by",
    ):
        assert sentence in second
    first = why_output(curious_run.directory, 1)
    assert "this was the first round" in first
    assert "initial against served on 40 devices, because it wants to know more" in first
    assert "what the job's limits changed a cohort of 1 became 3" in first
    assert "not made: 40 devices are to be asked and 3 are ready" in first


async def test_all_decisions_and_the_early_end_are_listed(curious_run):
    page = why_output(curious_run.directory)
    assert page.index("round 1: federated") < page.index("round 2: federated")
    # The third round would be the tenth update paid for: the failed attempt cost as many.
    assert "before round 3: the end, because the budget of 10 is used up" in page
    assert "it ended because: the budget of 10 is used up" in page
    found = json.loads(CliRunner().invoke(why, [str(curious_run.directory), "--json"]).output)
    assert found == explain(curious_run).to_json()
    assert [one["round"] for one in found["decisions"]] == [1, 2, 3]
    assert found["decisions"][2]["stop"].startswith("the budget of 10 is used up")
    assert "1 of the budget of 10" in why_output(curious_run.directory, 3)


async def test_a_round_without_a_decision_is_one_sentence(curious_run, make_job, tmp_path):
    with pytest.raises(UserError, match=r"no decision on round 9; the last decided round is 3$"):
        why_output(curious_run.directory, 9)
    with pytest.raises(UserError, match="contains no run"):
        why_output(tmp_path)
    Store.create(tmp_path / "new", make_job(), tmp_path).close()
    assert "no round has been decided on so far" in why_output(tmp_path / "new")
    with pytest.raises(UserError, match="no round is decided yet"):
        why_output(tmp_path / "new", 1)


def test_comparisons_windows_waits_and_the_parts_of_a_plan_are_shown(make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    seen = observe(
        3,
        forecast={
            "federated": Forecast(ready=False, changes_in=9000.0, share=0.25),
            "datacenter": Forecast(),
        },
        comparisons=[
            comparison_of(("served", "warm"), (-0.05,)),
            comparison_of(("served", "cold"), (0.005,)),
        ],
        seconds_left=7200.0,
        bytes_left=3e6,
        models=("current", "served", "initial", "warm", "cold"),
        groups={"north": 6, "*": 2},
    )
    plan = Plan(
        "hybrid",
        "the target is mixed",
        merge="projected",
        start="warm",
        reset_optimizer=True,
        step_scale=0.5,
        datacenter_weights={"dc": 0.25, "east": 0.0},
        by_group=True,
        group_weights={"north": 2.0, "*": 0.5},
        keep={"best": "served", "warm": ""},
    )
    planned = planned_attempt(
        3,
        plan=plan,
        observation=seen,
        # The other comparison was made before a crash.
        requested=[RequestedComparison(models=("served", "cold"), devices=8, reason="a gate")],
        waits=[
            DecidedWait(seconds=600.0, reason="the devices sleep", by_limit=False),
            DecidedWait(seconds=7200.0, reason="the window is closed", by_limit=True),
        ],
    )
    store.plan(planned)
    store.close()
    page = why_output(tmp_path / "run", 3)
    for sentence in (
        "devices: outside of their hours for another 2 h 30 min; 25% of the time that is left",
        "2 h of the run's time 3 MB to and from devices",
        "8 devices found warm better than served by 0.0500 (+-0.0100), for 0.5",
        "served against cold on 8 devices, because a gate",
        "found cold worse than served by 0.0050 (+-0.0100), which may be chance",
        "waited 10 min: the devices sleep",
        "kept models warm, cold",
        "what the job's limits changed waited 2 h: the window is closed",
        "groups group north: 6, the other devices: 2",
        "merged by merge='projected' the weight of dc is 0.25 east is left out each group of "
        "devices is summed by itself, if it is large enough the weight of the other devices is 0.5 "
        "times its examples the weight of group north is 2 times its examples",
        "from the model 'warm' the server optimizer begins anew "
        "the step is scaled by 0.5 'served' is kept as 'best' 'warm' is not kept on",
        "what came of it it was not finished",
    ):
        assert sentence in page


@pytest.mark.parametrize(
    ("merge", "steps", "sentence"),
    [
        ("transfer", 8, "the datacenter's gradient is the mean of 8 batches"),
        ("weighted", 8, "8 steps in the datacenter"),
        ("weighted", 1, "1 step in the datacenter"),
    ],
)
def test_the_work_of_the_datacenter_is_named(make_job, tmp_path, merge, steps, sentence):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    plan = Plan("hybrid", "both", merge=merge, datacenter_steps=steps)
    store.plan(planned_attempt(1, plan=plan, observation=observe(1)))
    store.close()
    assert sentence in why_output(tmp_path / "run", 1)
