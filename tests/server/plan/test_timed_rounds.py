"""The duration of federated rounds in a plan, from rounds that train nothing."""

import dataclasses
import json
import re
import statistics

import pytest
from click.testing import CliRunner

from isthmus.job import load_job
from isthmus_server.cli.plan import plan as plan_command
from isthmus_server.plan import timed_rounds
from isthmus_server.plan.changed_durations import within_noise
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import plan_of
from isthmus_server.plan.replayed_policy import RoundFacts
from isthmus_server.plan.seconds_of_rounds import SecondsOfRounds
from isthmus_server.plan.simulated_log import log_in
from isthmus_server.plan.timed_rounds import WHERE_SPEED
from isthmus_server.strategy.learning_curves import Interval
from isthmus_simulation.trial import train_trial

JOB = """
name = "table"
rounds = 40
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
cohort = 4
over_selection = 1.5
secure_aggregation = false
[datacenter]
steps = 5
batch_size = 4
[simulation]
clients = 20
training = "one-by-one"
step_seconds = 2.0
speed_spread = 0.3
dropout = 0.02
"""
ALTERNATE = ("strategy.policy=alternate", "datacenter.ranks=1")
UNTRAINABLE = """
def loss(self, output, target):
    raise RuntimeError("it was trained")
"""


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task()
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def many(monkeypatch):
    """Enough rounds for a mean."""
    monkeypatch.setattr(timed_rounds, "ROUNDS", 60)


@pytest.fixture
def some(monkeypatch):
    """Enough rounds for some failed attempts."""
    monkeypatch.setattr(timed_rounds, "ROUNDS", 16)


def planned(path, *overrides, **options):
    return plan_of(path, overrides, PlanOptions(**options))


def durations(plan):
    return {each.name: each for each in plan.timed.figures}


@pytest.mark.usefixtures("many")
def test_a_plan_says_how_long_rounds_take_and_trains_nothing(job_file, write_task):
    write_task(UNTRAINABLE)
    plan = planned(job_file)
    figures = durations(plan)
    middle = figures["nine of ten rounds"]
    low = middle.value
    high = middle.highest
    # One step of 2 s on the device in the middle, of which the slowest third is not waited for.
    assert 1.0 < low < figures["median of a round"].value < high < 6.0
    whole = figures["all 40 rounds, nine of ten runs"]
    assert whole.value < 40 * plan.timed.mean < whole.highest
    assert pytest.approx(figures["updates, nine of ten rounds"].highest, abs=0.2) == 4 / 6
    assert plan.trained == "nothing was trained or booked"


@pytest.mark.usefixtures("many")
def test_the_run_of_the_job_takes_as_long(job_file, tmp_path):
    plan = planned(job_file)
    train_trial(plan.job, tmp_path, tmp_path / "run", 40)
    real = log_in(tmp_path / "run").rounds[-1].record.elapsed
    assert 40 * plan.timed.mean == pytest.approx(real, rel=0.15)


def test_a_rare_long_round_is_in_the_range_of_runs_and_not_in_their_median():
    timed = timed_rounds.TimedRounds(
        rounds=30, seconds=[*[0.3] * 99, 23.0, *[0.3] * 99, 25.0], delivered=[1.0] * 200
    )
    assert timed.middle_of_runs == pytest.approx(30 * 0.3)
    assert 30 * timed.mean > 1.7 * timed.middle_of_runs
    (whole,) = (each for each in timed.figures if each.name.startswith("all 30 rounds, nine"))
    assert whole.value <= timed.middle_of_runs
    assert whole.highest > 30 * 0.3 + 25.0


@pytest.mark.parametrize("rounds", [4, 7, 12])
def test_runs_of_more_rounds_than_were_timed_have_each_of_them_as_often(rounds):
    timed = timed_rounds.TimedRounds(rounds=rounds, seconds=[1.0, 2.0, 3.0, 4.0])
    rests = {4: 0.0, 7: 7.5, 12: 0.0}  # of three rounds: 6, 7, 8 and 9 seconds
    assert timed.middle_of_runs == 10.0 * (rounds // 4) + rests[rounds]


def test_lines_json_and_page_have_the_same_figures(job_file):
    done = CliRunner().invoke(plan_command, [str(job_file), "--json"])
    assert done.exit_code == 0, done.output
    devices = json.loads(done.output)["devices"]
    plan = planned(job_file)  # with the same draws
    assert devices["duration"] == [each.to_json() for each in plan.timed.figures]
    assert devices["duration_note"] == (
        "durations of rounds are at the speeds of [simulation], of the one fleet that seed=0 draws "
        "from them: another seed has other devices; 6 rounds were timed"
    )
    median = durations(plan)["median of a round"].text
    assert f"  duration   median of a round: {median}" in plan.lines()
    assert median in plan.html()
    assert "Durations of rounds are at the speeds of [simulation], of the one fleet" in plan.html()


def test_how_many_rounds_were_timed_is_said(job_file, monkeypatch):
    monkeypatch.setattr(timed_rounds, "REAL_SECONDS", 0.0)
    note = planned(job_file).timed.note
    assert note.endswith("; one round was timed, as many as began within 0 seconds on this machine")


@pytest.mark.usefixtures("many")
def test_what_would_change_durations_is_said(job_file):
    plan = planned(job_file)
    rows = {each.name: {f.name: f for f in each.figures} for each in plan.changes}
    took = {
        name: row["a federated round"].value
        for name, row in rows.items()
        if "a federated round" in row
    }
    assert took["as it is"] == plan.timed.mean
    for row in rows.values():
        if "a federated round" in row:
            within = row["its mean is within"]
            assert within.value < row["a federated round"].value < within.highest
    assert took["cohort x 2"] != took["as it is"]
    # Without devices to spare, the slowest has to come.
    assert took["over-selection 1"] > took["as it is"]
    # Without rates of links, the bytes of updates take no time.
    assert took["updates of 4 bits"] == took["as it is"]
    assert "a federated round" not in rows["adapters of rank 8, frozen base"]


def timed_of(seconds, failed=()):
    return timed_rounds.TimedRounds(
        rounds=30, seconds=seconds, delivered=[1.0] * len(seconds), failed=failed
    )


def test_a_difference_that_timed_rounds_do_not_tell_is_said():
    now = timed_of([1.0, 3.0] * 100)
    (said,) = within_noise(timed_of([1.1, 3.0] * 25), now)
    assert said.startswith("a federated round differs from that of the job as it is by less than")
    assert said.endswith("the noise of the timed rounds")
    assert not within_noise(timed_of([5.0, 8.0] * 25), now)
    assert not within_noise(now, now)
    (one,) = within_noise(timed_of([9.0]), now)
    assert one.startswith("one timed round does not say how")
    assert within_noise(timed_rounds.TimedRounds(unknown="why"), now) == ["why"]


def test_a_difference_of_failed_attempts_that_timed_rounds_do_not_tell_is_said():
    now = timed_of([1.0, 3.0] * 100)
    (said,) = within_noise(timed_of([1.0, 3.0] * 25, failed=[4.0]), now)
    assert said.startswith("the cost of failed attempts differs from that of the job as it is by")
    assert not within_noise(timed_of([1.0, 3.0] * 25, failed=[4.0] * 9), now)


@pytest.mark.usefixtures("some")
def test_cost_has_the_mean_of_failed_attempts(job_file):
    plan = planned(job_file, "simulation.dropout=0.3", "federated.over_selection=1", "budget=1")
    failed = plan.timed.failed
    assert failed
    assert set(failed) <= {1.0, 2.0, 3.0, 4.0}  # of devices that had begun
    (cost,) = plan.sides.cost
    assert cost.value == pytest.approx(40 * (4 + sum(failed) / 16))
    attempts = 16 + len(failed)
    assert f"{len(failed)} of {attempts} timed attempts failed" in cost.how
    assert " a round is for failed attempts; beyond budget=1, where" in cost.how
    assert "failed attempts are in it with their mean: " in plan.html()
    assert plan.changes[0].figures[-1].value == cost.value
    rows = {each.name: each.figures[-1].value for each in plan.changes if each.figures}
    assert rows["over-selection 1.25"] >= 40 * 5


@pytest.mark.usefixtures("some")
def test_the_price_of_a_forecast_has_the_mean_of_failed_attempts(job_file):
    often = ("simulation.dropout=0.3", "federated.over_selection=1")
    plan = planned(job_file, *often, trial=3, policies=("federated",))
    (tried,) = plan.trials.policies
    (cost,) = plan.sides.cost
    assert tried.forecast.price == pytest.approx((cost.value,) * 2)
    assert cost.value > 40 * 4
    # What failed in the trials themselves is in their prices.
    assert max(points[-1].price for points in tried.seeds) > 3 * 4


def test_cost_without_failed_attempts_says_so(job_file):
    (none,) = planned(job_file, "simulation.dropout=0").sides.cost
    assert none.how == "exact; none of 6 timed attempts failed"


@pytest.mark.parametrize(
    ("overrides", "price"),
    [
        # Two of four are needed: an attempt fails if three or four are lost.
        (("federated.quorum=2", "simulation.dropout=0.5"), 4 * 5 / 11),
        (("federated.quorum=4", "simulation.dropout=0.1"), 4 * (1 / 0.9**4 - 1)),
        # Most attempts fail, so that a run may end by it.
        (("federated.quorum=4", "simulation.dropout=0.5"), None),
        # Devices that were lost are missing in later rounds.
        (("federated.quorum=2", "simulation.dropout=0.5", "simulation.clients=20"), None),
        # Each group has a quorum of its own.
        (
            (
                "federated={cohort=16, secure_aggregation=true, robust='median', robust_groups=4, "
                "robust_minimum=3}",
                "simulation.dropout=0.1",
            ),
            None,
        ),
        (("federated.quorum=1", "simulation.dropout=0"), None),
        (("federated.quorum=1", "simulation.dropout=1"), None),
        (("federated.mode=buffered", "simulation.dropout=0.5"), None),
    ],
)
def test_without_timed_rounds_failed_attempts_follow_from_dropout(overrides, price, job_file):
    instant = ("simulation.step_seconds=0", "simulation.clients=200", "federated.over_selection=1")
    plan = planned(job_file, *instant, *overrides)
    (cost,) = plan.sides.cost
    if price is None:
        assert plan.failed is None
        assert "what failed attempts cost is not in it" in plan.html()
        return
    assert cost.value == pytest.approx(40 * (4 + price))
    assert "by simulation.dropout=0.5, 0.31 of attempts fail" in cost.how or price > 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("simulation.step_seconds=0",), WHERE_SPEED),
        (("simulation.dropout=1",), "round 1 failed"),
        (("federated.control_variates=20",), "simulated devices keep no control variates"),
    ],
)
def test_why_there_is_no_duration(overrides, said, job_file):
    plan = planned(job_file, *overrides)
    assert said in plan.timed.unknown
    assert not plan.timed.figures
    assert f"  duration   {plan.timed.unknown}" in plan.lines()
    assert said in plan.html()


def test_rounds_of_a_large_model_are_not_timed(job_file, monkeypatch):
    monkeypatch.setattr(timed_rounds, "MOST_BYTES", 10)
    assert "the model has 60 bytes" in planned(job_file).timed.unknown


def test_without_the_simulation_there_is_a_plan(job_file, monkeypatch):
    monkeypatch.setattr(timed_rounds, "provided", lambda group: {})
    assert planned(job_file).timed.unknown.endswith("install isthmus again")


@pytest.mark.parametrize(
    "overrides",
    [
        ("federated.secure_aggregation=true", "simulation.offline_seconds=1"),
        ("federated.mode=buffered", "federated.over_selection=1"),
        (
            "privacy={mechanism='distributed', epsilon=20, delta=1e-3}",
            "federated.secure_aggregation=true",
            "rounds=5",
        ),
        ("evaluation={devices=4, keep_best={name='devices_loss', mode='min'}, patience=1}",),
        ("budget=3", "seconds=1", "device_bytes=10"),
    ],
    ids=" ".join,
)
def test_jobs_that_are_timed(overrides, job_file, write_task):
    write_task("def validation_data(self, participant):\n    return rows(4, seed=1)")
    plan = planned(job_file, *overrides)
    assert not plan.timed.unknown
    assert len(plan.timed.seconds) == 6  # with lost devices of two runs, if one is shorter
    assert ("without the evaluation" in plan.timed.note) == (overrides[0].startswith("eval"))


def test_a_trial_has_the_durations_of_timed_rounds(job_file):
    plan = planned(job_file, trial=3, policies=("federated",))
    (tried,) = plan.trials.policies
    whole = durations(plan)["all 40 rounds, nine of ten runs"]
    assert tried.forecast.seconds == pytest.approx((whole.value, whole.highest))
    assert tried.forecast.middle_seconds == pytest.approx(plan.timed.middle_of_runs)
    said = tried.forecast.time
    assert re.fullmatch(r"[\d.]+ (\w+) \([\d.]+ to [\d.]+ \1\)", said)
    assert f", {said}" in tried.text
    assert f"<td>{said}</td>" in plan.html()
    limited = planned(job_file, "seconds=50", trial=3, policies=("federated",))
    low, high = limited.trials.policies[0].forecast.seconds
    assert low == 50
    assert 50 < high <= 50 + max(plan.timed.seconds)
    assert limited.limits[0].endswith("it ends before a round that would begin after seconds=50")


def test_rounds_that_a_trial_alone_has_trained_give_a_long_interval():
    few, many = SecondsOfRounds([1.0, 2.0, 3.0]), SecondsOfRounds([1.0, 2.0, 3.0] * 40)
    constant = SecondsOfRounds([5.0] * 3)
    facts = RoundFacts(
        price={},
        seconds={"federated": 2.0, "datacenter": 5.0},
        device_bytes={},
        evaluated={},
        successions={},
        devices=0,
        datacenters=(),
        model_bytes=0,
        bytes_each=0,
        began=0.0,
        times={"federated": few, "datacenter": constant},
    )
    kinds = ["federated", "datacenter"] * 6
    found = facts.took(kinds, 42.0 + 8.0, None)  # 8 s are waits
    assert found.median == pytest.approx(50.0)
    assert 50.0 - found.low == pytest.approx(found.high - 50.0)
    long = dataclasses.replace(facts, times={"federated": many, "datacenter": constant})
    assert found.high - found.low > 2 * (
        long.took(kinds, 50.0, None).high - long.took(kinds, 50.0, None).low
    )
    # The last round begins before the limit, and may take 5 s. A run that it cuts takes as long.
    assert facts.took(kinds, 50.0, 51.0).high == 56.0
    cut = facts.took(kinds, 50.0, 49.0, is_cut=True)
    assert (cut.low, cut.median, cut.high) == (49.0, pytest.approx(50.0), 54.0)
    # Rounds without a spread, or of which one is known, have no interval.
    same = Interval(30.0, 30.0, 30.0)
    assert facts.took(["datacenter"] * 6, 30.0, None) == same
    one = dataclasses.replace(facts, times={"federated": SecondsOfRounds([5.0])})
    assert one.took(["federated"] * 6, 30.0, None) == same


def timed_alone(path, *overrides):
    """What is timed of a job, without the plans of changed ones."""
    return timed_rounds.TimedRounds.of(load_job(path, overrides), path.parent, 60, mixed=False)


@pytest.mark.usefixtures("many")
def test_a_short_run_with_lost_devices_is_timed_from_its_first_round(job_file):
    # In the first rounds of a run no device is away yet, and in later ones most of the fleet is.
    lossy = ("federated.mode=buffered", "federated.over_selection=1", "simulation.dropout=0.15")
    short = timed_alone(job_file, *lossy, "rounds=10")
    assert len(short.seconds) == 60
    assert short.note.endswith("; 60 rounds were timed in 6 runs")
    assert timed_alone(job_file, *lossy, "rounds=60").mean > 1.4 * short.mean


@pytest.mark.usefixtures("some")
def test_a_run_that_may_end_by_its_rounds_is_said_to(job_file):
    all_needed = ("federated.over_selection=1", "federated.quorum=4", "simulation.clients=4")
    some = timed_alone(job_file, *all_needed, "simulation.dropout=0.45", "rounds=3")
    assert some.seconds
    said = r"; \d+ of these runs ended before the last round, as one of the job may: round \d "
    assert re.search(said, some.note)
    none = timed_alone(job_file, *all_needed, "simulation.dropout=0.9")
    assert none.fails
    assert none.unknown.startswith("duration of a round is not known: round 1 failed ")


def test_a_run_that_ends_by_its_rounds_has_no_price_of_failed_attempts(job_file, monkeypatch):
    fails = timed_rounds.TimedRounds(unknown="round 1 failed", fails=True)
    monkeypatch.setattr(timed_rounds.TimedRounds, "of", lambda *args, **options: fails)
    plan = planned(job_file, "simulation.dropout=0.1", "simulation.clients=200")
    assert plan.failed is None
    assert plan.sides.cost[0].how == "exact, without failed attempts"


def test_a_policy_that_goes_on_as_before_takes_what_the_same_rounds_take(job_file):
    slow = ("datacenter.ranks=1", "strategy.policy=adaptive", "simulation.speed_spread=1")
    plan = planned(job_file, *slow, trial=3, policies=("adaptive", "federated"))
    adaptive, federated = (each.forecast for each in plan.trials.policies)
    assert "so its forecast goes on with rounds like its last ones" in plan.trials.policies[0].note
    assert adaptive.seconds == pytest.approx(federated.seconds)
    assert adaptive.middle_seconds == pytest.approx(federated.middle_seconds)


def test_no_run_is_faster_than_its_fastest_rounds():
    rare = SecondsOfRounds([1.0] * 30 + [300.0])
    assert rare.run(20).low == 20.0


def test_a_hybrid_round_takes_as_long_as_its_slower_side(job_file):
    slow = ("simulation.datacenter_step_seconds=2",)
    plan = planned(job_file, *ALTERNATE, *slow, trial=3, policies=("hybrid", "datacenter"))
    hybrid, datacenter = (each.forecast for each in plan.trials.policies)
    assert datacenter.seconds == pytest.approx((40 * 5 * 2,) * 2)
    mean = 40 * statistics.fmean(max(x, 10) for x in plan.timed.seconds)
    assert statistics.fmean(hybrid.seconds) == pytest.approx(mean)
    assert "if each round is federated" in durations(plan)["all 40 rounds, nine of ten runs"].how


@pytest.mark.usefixtures("many")
def test_a_calibrating_run_says_how_far_durations_were_off(job_file, tmp_path):
    plan = planned(job_file)
    train_trial(plan.job, tmp_path, tmp_path / "run", 30)
    errors = {each.name: each for each in planned(job_file, calibrate=tmp_path / "run").errors}
    assert abs(errors["federated round"].error) < 0.15
    twice = planned(job_file, "simulation.step_seconds=4", calibrate=tmp_path / "run")
    error = {each.name: each for each in twice.errors}["federated round"]
    assert error.error == pytest.approx(-0.5, abs=0.1)
    assert " s planned, " in error.text
