"""`isthmus plan --trial` and `--html`: quality by policy, forecast from simulated rounds."""

import dataclasses
import json
import re
import statistics
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner
from tests.machine import CHROMIUM, CHROMIUM_OPTIONS, needs_chromium
from tests.server.plan.trained_runs import log_of
from tests.server.read.report.test_html_report import Page

import isthmus
from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus_server.cli.plan import plan as plan_command
from isthmus_server.plan import trials
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import plan_of
from isthmus_server.plan.replayed_policy import delivered_of
from isthmus_server.plan.trial_sentences import unequal_of
from isthmus_server.plan.what_if import Trained, curves_of, facts_of
from isthmus_server.strategy.learning_curves import Interval
from isthmus_simulation.trial import train_trial

JOB = """
name = "table"
rounds = 12
budget = 40
[task]
source = "task.py:Learn"
[strategy]
policy = "alternate"
[federated]
clients = 4
cohort = 4
[datacenter]
ranks = 1
steps = 5
batch_size = 4
[prices]
client_update = 1.0
datacenter_step = 0.4
"""


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task()
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The page and the figures of one plan with trials."""
    folder = tmp_path_factory.mktemp("planned")
    from tests.conftest import TABLE

    (folder / "task.py").write_text(TABLE + "    pass\n")
    (folder / "job.toml").write_text(JOB)
    options = PlanOptions(trial=6, ranks=2, layouts=True, memory_gib=1.0)
    plan = plan_of(folder / "job.toml", (), options)
    return plan, plan.html(now=0.0)


def test_each_policy_has_a_forecast_of_the_end_with_its_cost(planned):
    plan, _ = planned
    tried = {each.policy: each for each in plan.trials.policies}
    assert list(tried) == ["alternate", "federated", "datacenter", "hybrid"]
    assert plan.trials.metric == "accuracy"
    for each in tried.values():
        assert [len(points) for points in each.seeds] == [6, 6]
        reached = each.forecast.reached
        assert 0 <= reached.low <= reached.median <= reached.high <= 1
    # The budget of 40 pays for ten federated rounds of 4, or for 6 hybrid ones of 6.
    assert tried["federated"].forecast.rounds == (10, 10)
    assert tried["federated"].forecast.price == (40.0, 40.0)
    assert tried["hybrid"].forecast.rounds == (6, 6)
    assert tried["datacenter"].forecast.price == (24.0, 24.0)


def test_a_mixture_has_a_longer_interval_than_its_curves(monkeypatch, trained):
    logs = [log_of(trained("alternate", rounds=12))]
    cut = [dataclasses.replace(logs[0], rounds=logs[0].rounds[:8])]
    parts = ("alternate", cut, facts_of(cut, "accuracy"), curves_of(cut, "accuracy"))
    found = trials._forecast(logs[0].job, *parts, "accuracy", 8).forecast.reached
    monkeypatch.setattr(trials, "MIXED", 1)
    before = trials._forecast(logs[0].job, *parts, "accuracy", 8).forecast.reached
    assert found.median == before.median
    assert found.median - found.low == pytest.approx(2 * (before.median - before.low))
    assert found.high == min(1.0, found.median + 2 * (before.high - before.median))


def test_the_page_has_one_chart_one_table_of_policies_and_the_assumptions(planned):
    plan, page = planned
    parsed = Page(page)
    assert parsed.tags.count("svg") == 1
    assert "accuracy against cost" in parsed.text
    rows = re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", page)
    by_policy = {name: cells for name, cells in rows if name in ("federated", "hybrid")}
    reached = {each.policy: each.forecast for each in plan.trials.policies}
    assert f"{reached['federated'].reached.median:.4g}" in by_policy["federated"]
    assert "<td>10 rounds</td><td>40 units</td><td>not known</td>" in by_policy["federated"]
    assert "after round 6</td>" in by_policy["federated"]
    assert by_policy["federated"].endswith(", after round 10</td>")
    assert "peak of a rank" in parsed.text
    assert "Layouts of the ranks" in parsed.text
    assert "<details open><summary>Layouts of the ranks" in page
    assert page.index("Quality and cost by policy") < page.index("Layouts of the ranks")
    assert "What would change it" in parsed.text
    assert "forecast from 6 simulated rounds of each policy with 2 seeds" in parsed.text
    assert "90% intervals" in parsed.text
    titles = re.findall(r"<circle[^>]*><title>([^<]*)</title>", page)
    assert any("federated, forecast of the end: accuracy" in each for each in titles)
    assert sum("simulated" in each for each in titles) == 4 * 2 * 6
    assert not re.search(r"(src|href)=", page)


def test_a_forecast_is_drawn_at_its_cost(planned):
    plan, page = planned
    places = {}
    for place, words in re.findall(r"<circle[^>]*cx=\"([\d.]+)\"[^>]*><title>([^<]*)<", page):
        cost = float(re.search(r"at cost ([\d.]+)|$", words)[1] or -1)
        places.setdefault(cost, set()).add(place)
    ends = [statistics.fmean(each.forecast.price) for each in plan.trials.policies]
    for cost in ends:
        assert len(places[cost]) == 1


def test_policies_that_the_intervals_do_not_tell_apart_are_named(planned):
    plan, page = planned
    assert plan.trials.overlap.startswith("the forecasts do not tell ")
    assert f"  {plan.trials.overlap}" in plan.lines()
    assert plan.trials.overlap.capitalize() in page
    best, *others = plan.trials.policies
    apart = [
        dataclasses.replace(
            each,
            forecast=dataclasses.replace(
                each.forecast, reached=Interval(number - 0.1, number, number + 0.1)
            ),
        )
        for number, each in enumerate((best, *others))
    ]
    assert dataclasses.replace(plan.trials, policies=apart).overlap == ""


def test_what_trials_of_all_rounds_would_take_is_said_where_forecasts_say_little(planned):
    plan, page = planned
    said = plan.trials.longer
    begin, _, end = said.partition(" here, and would need no forecast: ")
    assert re.fullmatch(
        r"simulating all 12 rounds of these policies would take about [\d.]+ \w+", begin
    )
    assert end == "--trial 12"
    assert f"  {said}" in plan.lines()
    assert f"S{said[1:]}." in Page(page).text
    table = plan.to_json()["quality"]
    assert table["longer"] == said
    assert table["whole_seconds"] == plan.trials.whole_seconds > 0
    assert dataclasses.replace(plan.trials, whole_seconds=240.0).longer.startswith(
        "simulating all 12 rounds of these policies would take about 4 min here"
    )
    # Of a hybrid round the budget pays as many as were trained.
    hybrid = [each for each in plan.trials.policies if each.to_the_end]
    assert dataclasses.replace(plan.trials, policies=hybrid).longer == ""


def test_trials_of_all_rounds_take_as_much_longer_as_they_have_rounds(planned):
    plan, _ = planned
    tried = {each.policy: each for each in plan.trials.policies}
    took = {"federated": 3.0, "hybrid": 2.0}

    class Log:
        rounds = range(6)

    def seconds(*names):
        logs = {name: [Log, Log] for name in names}
        return trials._whole_seconds(plan.job, [tried[name] for name in names], logs, took)

    # The budget pays for ten federated rounds, and for the six hybrid ones that were trained.
    assert seconds("federated") == pytest.approx(3.0 * 10 / 6)
    assert seconds("federated", "hybrid") == pytest.approx(3.0 * 10 / 6 + 2.0)
    assert seconds("hybrid") is None


def test_a_page_with_whole_runs_and_forecasts_says_which_is_which(planned):
    plan, page = planned
    first = plan.trials.policies[0]
    assert plan.trained == "the first rounds were simulated here, of hybrid all of them"
    assert "a dashed one leads to the forecast" in page
    assert "All rounds of hybrid were simulated with 2 seeds, and its range is that of" in page
    assert "Quality of alternate, federated, datacenter is forecast from 6 simulated" in page
    heading = "forecast from 6 simulated rounds of each policy, or simulated to the end:"
    assert any(each.endswith(heading) for each in plan.lines())
    alone = dataclasses.replace(plan.trials, policies=[first])
    assert alone.origin.startswith("Quality is forecast from 6 simulated rounds of each policy")
    assert alone.trained == "the first rounds were simulated here"


def test_a_forecast_follows_from_its_own_trials_alone(job_file):
    alone = plan_of(job_file, ("rounds=6",), PlanOptions(trial=3, policies=("federated",)))
    among = PlanOptions(trial=3, policies=("datacenter", "federated"))
    both = plan_of(job_file, ("rounds=6",), among)
    assert both.trials.policies[1] == alone.trials.policies[0]


def test_a_job_without_a_first_round_is_refused_by_its_limits(job_file):
    options = PlanOptions(trial=3, policies=("federated",))
    with pytest.raises(UserError, match="the job's limits end each policy before its first round"):
        plan_of(job_file, ("budget=1",), options)


def test_a_mixture_of_few_rounds_has_no_forecast(job_file):
    options = PlanOptions(trial=4, policies=("alternate", "federated"))
    plan = plan_of(job_file, (), options)
    mixed, alone = plan.trials.policies
    assert mixed.forecast is None
    assert [len(points) for points in mixed.seeds] == [4, 4]
    assert "too few rounds of each regime (2 datacenter and 2 federated ones" in mixed.note
    assert mixed.note.endswith("try --trial 6 or more")
    assert mixed.note in plan.html()
    assert alone.forecast.reached is not None
    seldom = plan_of(job_file, ("rounds=30", "budget=100", "evaluation.every=3"), options)
    assert seldom.trials.policies[0].note.endswith("try --trial 18 or more")
    # Its last rounds are no better known: they are of both regimes.
    short = plan_of(job_file, (), dataclasses.replace(options, trial=3)).trials.policies[0]
    assert short.forecast is None
    assert "too few rounds of each regime" in short.note
    # If the trial is the whole job, nothing is left to forecast.
    whole = plan_of(job_file, ("rounds=4",), options)
    for each in whole.trials.policies:
        assert each.to_the_end
        ends = [points[-1].value for points in each.seeds]
        assert (each.forecast.reached.low, each.forecast.reached.high) == (min(ends), max(ends))
        assert "simulated to the end with 2 seeds" in each.reached
        assert f"    {each.policy:<13} {each.reached}, 4 rounds, cost " in "\n".join(whole.lines())
        assert each.reached in whole.html()
    assert whole.lines()[0].endswith("; all rounds were simulated here")
    page = Page(whole.html()).text
    assert "were simulated with 2 seeds, and the ranges are those of the seeds" in page
    assert "All lines were simulated" in page
    for text in ("\n".join(whole.lines()), page):
        assert "first rounds" not in text
        assert "forecast from" not in text
        assert "interval" not in text
        assert "dashed" not in text
    assert whole.trials.whole_seconds is None
    assert whole.trials.longer == ""


def test_steps_of_the_one_rank_of_a_trial_are_said(planned, job_file):
    plan, page = planned
    assert "one rank, have 4 examples, and those of 2 ranks 8: with datacenter.global_batch=8" in (
        plan.trials.steps
    )
    assert f"  {plan.trials.steps}" in plan.lines()
    assert plan.trials.steps.capitalize() in Page(page).text
    options = PlanOptions(trial=3, ranks=2, policies=("datacenter",))
    assert plan_of(job_file, ("datacenter.global_batch=8",), options).trials.steps == ""


def test_a_time_of_nothing_is_not_known(job_file):
    plan = plan_of(job_file, (), PlanOptions(trial=3, policies=("federated",)))
    (tried,) = plan.trials.policies
    assert tried.forecast.seconds is None
    assert tried.to_json()["forecast"]["seconds"] is None
    assert tried.forecast.text.endswith(", time not known")
    assert Trained(value=0.5, rounds=3, price=1.0, seconds=0.0).text.endswith(", time not known")


def test_a_page_without_a_trial_says_what_its_chart_needs(job_file, tmp_path):
    file = tmp_path / "plan.html"
    found = CliRunner().invoke(
        plan_command, [str(job_file), "--html", str(file)], catch_exceptions=False
    )
    assert found.output == f"the plan is in {file}\n"
    parsed = Page(file.read_text())
    assert "svg" not in parsed.tags
    assert "simulate the first rounds by --trial" in parsed.text
    assert "Nothing was trained or booked." in parsed.text


def test_a_policy_that_cannot_be_used_is_named_and_the_others_are_tried(job_file):
    options = PlanOptions(trial=3, policies=("federated", "schedule"))
    plan = plan_of(job_file, ("rounds=4",), options)
    by_policy = {each.policy: each for each in plan.trials.policies}
    assert by_policy["schedule"].forecast is None
    assert "there are no phases to follow" in by_policy["schedule"].note
    assert by_policy["federated"].forecast.reached is not None
    assert "there are no phases to follow" in plan.html()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("federate", "--policies names 'federate', which is no policy; did you mean federated"),
        ("xyz", "--policies names 'xyz', which is no policy; there are adaptive, alternate"),
    ],
)
def test_a_name_that_no_policy_has_is_refused_with_the_nearest(name, sentence, job_file):
    with pytest.raises(UserError, match=sentence):
        plan_of(job_file, (), PlanOptions(trial=3, policies=("datacenter", name)))


def test_a_policy_that_asks_devices_goes_on_as_in_its_last_rounds(job_file):
    options = PlanOptions(trial=3, policies=("adaptive",))
    plan = plan_of(job_file, ("rounds=6",), options)
    (tried,) = plan.trials.policies
    assert "its forecast goes on with rounds like its last ones" in tried.note
    assert tried.forecast.rounds == (6, 6)


def test_a_target_that_the_task_does_not_have_is_refused_after_one_round(job_file, monkeypatch):
    begun = []

    def counted(job, base, directory, rounds):
        begun.append(job.strategy.policy)
        train_trial(job, base, directory, rounds)

    monkeypatch.setattr("isthmus_server.plan.trials.train_trial", lambda what: counted)
    target = "strategy.target_metric={name='acuracy', at_least=0.9}"
    with pytest.raises(UserError, match=r"'acuracy' is not a held-out metric.*accuracy, loss"):
        plan_of(job_file, (target,), PlanOptions(trial=3))
    assert len(begun) == 1


def test_a_trial_that_ends_early_is_not_continued(job_file):
    options = PlanOptions(trial=3, policies=("adaptive",))
    # The first rounds of adaptive pay for gradients and comparisons.
    plan = plan_of(job_file, ("rounds=6", "budget=8"), options)
    (tried,) = plan.trials.policies
    assert len(tried.seeds[0]) < 3
    assert tried.to_the_end
    assert tried.forecast.rounds[1] < 3
    assert tried.note == ""


KEPT = "evaluation={keep_best={name='accuracy',mode='max'},deliver='best'}"


def test_a_forecast_of_what_a_run_keeps_is_no_worse_than_the_trial(job_file):
    options = PlanOptions(trial=3, policies=("federated",))
    kept = plan_of(job_file, ("rounds=6", KEPT), options)
    (tried,) = kept.trials.policies
    had = min(max(point.value for point in points) for points in tried.seeds)
    assert tried.forecast.reached.low >= had
    assert kept.trials.lower == ""
    last = plan_of(job_file, ("rounds=6",), options)
    assert last.trials.policies[0].forecast.reached.low < had
    assert last.trials.lower.startswith("federated: the intervals have worse values than")
    assert f"  {last.trials.lower}" in last.lines()
    assert "Federated: the intervals have worse values than" in last.html()


@pytest.mark.parametrize(("rounds", "end"), [(3, "simulated to the end"), (6, "")])
def test_a_trial_of_a_run_that_keeps_its_best_model_shows_the_best_values(rounds, end, job_file):
    options = PlanOptions(trial=3, policies=("federated",))
    kept = plan_of(job_file, (f"rounds={rounds}", KEPT), options)
    (tried,) = kept.trials.policies
    best = [f"{max(point.value for point in points):.4g}" for points in tried.seeds]
    page = kept.html()
    assert f"<td>{' and '.join(best)}, best of 3 rounds</td>" in page
    assert f"{tried.reached}, best of {rounds} rounds</td>" in page
    assert end in tried.reached
    assert "after round" not in Page(page).text


def test_what_a_run_delivers_is_its_last_model_or_its_best(trained):
    log = log_of(trained("federated", rounds=4))
    values = (0.2, 0.8, 0.5, 0.6)
    rounds = []
    for each, value in zip(log.rounds, values, strict=True):
        metrics = {"accuracy": value, "loss": 2 - value}
        record = dataclasses.replace(each.record, metrics=metrics)
        rounds.append(dataclasses.replace(each, record=record))
    log = dataclasses.replace(log, rounds=rounds)
    assert log.delivered("accuracy") == 0.6
    assert log.delivered("nothing") is None
    kept = {"keep_best": {"name": "loss", "mode": "min"}, "deliver": "best"}
    best = dataclasses.replace(log, job=with_changes(log.job, {"evaluation": kept}))
    assert best.delivered("accuracy") == 0.8
    assert delivered_of(log.job, "accuracy", np.array([values])) == [0.6]
    assert delivered_of(best.job, "accuracy", np.array([values])) == [0.6]
    assert delivered_of(best.job, "loss", np.array([values])) == [0.2]


def test_a_duration_is_never_nothing_for_a_side_without_one(job_file):
    names = ("alternate", "datacenter")
    speeds = ("rounds=6", "simulation.step_seconds=1")
    plan = plan_of(job_file, speeds, PlanOptions(trial=6, policies=names))
    for each in plan.trials.policies:
        assert each.forecast.seconds is None
        assert each.text.endswith("time not known")
    assert plan.trials.untimed.startswith("durations of alternate, datacenter are not known: give")
    assert plan.trials.untimed.endswith("by --gpu or simulation.datacenter_step_seconds")
    step = PlanOptions(trial=6, policies=names, tflops=1e-6)
    known = plan_of(job_file, speeds, step)
    mixed, alone = known.trials.policies
    assert alone.forecast.seconds == pytest.approx((30 * known.time_of_step,) * 2, rel=1e-4)
    federated = 3 * known.timed.mean
    assert mixed.forecast.seconds[0] == pytest.approx(federated + 15 * known.time_of_step)
    assert known.trials.untimed == ""


def test_unequal_prices_and_rounds_are_said(planned):
    plan, page = planned
    said = plan.trials.unequal
    assert said.startswith("the policies end at unequal cost (24 to 40) and after unequal rounds")
    # A datacenter round costs 2: the cheapest.
    assert "let all spend budget=40: --set rounds=20, as many as the cheapest can pay" in said
    assert f"  {said}" in plan.lines()
    assert f"T{said[1:]}" in Page(page).text
    only = dataclasses.replace(plan.trials.policies[1], policy="alike")
    assert unequal_of((plan.trials.policies[1], only)) == ""


def test_a_budget_that_the_job_has_is_not_advised(planned):
    plan, _ = planned
    _, first, second, _ = plan.trials.policies
    ends = [((36.0, 36.0), (6, 6)), ((40.0, 40.0), (20, 20))]
    spent = [
        dataclasses.replace(
            each, forecast=dataclasses.replace(each.forecast, price=price, rounds=rounds)
        )
        for each, (price, rounds) in zip((first, second), ends, strict=True)
    ]
    said = unequal_of(spent, budget=40.0)
    assert said.startswith("the policies end at unequal cost (36 to 40) and after unequal rounds")
    assert said.endswith("budget=40 has less left than its next round costs: that is one price")
    assert "--set budget=40 --set rounds=20" in unequal_of(spent, budget=400.0)
    assert "--set budget=40 --set rounds=20" in unequal_of(spent)
    # A limit of seconds has ended one with half of the budget; the job has the rounds already.
    half = dataclasses.replace(spent[1].forecast, price=(20.0, 20.0), rounds=(10, 10))
    ended = [spent[0], dataclasses.replace(spent[1], forecast=half)]
    said = unequal_of(ended, budget=40.0, most_rounds=20)
    assert said.endswith(
        "another limit ends some before budget=40 does, so that they are not at one price"
    )
    assert said.startswith("the policies end at unequal cost (20 to 36)")


def test_forecasts_far_beyond_their_trials_are_said_to_know_no_fall(job_file):
    options = PlanOptions(trial=3, policies=("datacenter",))
    plan = plan_of(job_file, (), options)
    assert plan.trials.beyond.startswith(
        "datacenter: the forecasts go far beyond the 3 rounds that were tried, and assume that "
    )
    assert plan.trials.beyond in plan.trials.sentences
    near = plan_of(job_file, ("rounds=6",), options)
    assert near.trials.beyond == ""
    best = ("evaluation.keep_best={name='accuracy', mode='max'}", "evaluation.deliver=best")
    assert plan_of(job_file, best, options).trials.beyond == ""


def test_a_budget_that_is_said_pays_for_the_dearest_policy(planned):
    plan, _ = planned
    _, first, second, _ = plan.trials.policies
    forecast = dataclasses.replace(first.forecast, price=(12344.4, 12344.4))
    said = unequal_of((dataclasses.replace(first, forecast=forecast), second))
    assert "--set budget=12350 " in said


def test_a_policy_that_the_budget_ends_before_its_first_round_is_named(job_file):
    """A federated round costs 4, and one of the datacenter 2."""
    options = PlanOptions(trial=3, policies=("federated", "datacenter"))
    plan = plan_of(job_file, ("budget=3",), options)
    federated, datacenter = plan.trials.policies
    assert federated.text == "no forecast: the job's limits end it before its first round"
    assert federated.text in Page(plan.html()).text
    assert datacenter.to_the_end
    assert plan.trials.trained == "all rounds were simulated here"
    assert plan.trials.whole_seconds is None


@pytest.mark.parametrize("rounds", [3, 6])
def test_a_metric_that_is_no_number_in_any_round_is_named(rounds, write_task, job_file):
    write_task(
        """
        def metrics(self, output, target):
            return {"score": torch.full((len(target),), float("nan"))}
        """
    )
    options = PlanOptions(trial=3, policies=("federated",))
    plan = plan_of(job_file, (f"rounds={rounds}",), options)
    assert plan.trials.policies[0].text == "no forecast: no round of its trials has a finite score"
    assert plan.trials.policies[0].text in plan.html()


def test_a_notebook_can_have_trials(job_file):
    async def asks():
        return isthmus.plan(job_file, trial=3, policies=("federated",), rounds=4)

    import asyncio

    plan = asyncio.run(asks())
    assert json.loads(json.dumps(plan.to_json()))["quality"]["metric"] == "accuracy"


PRIVATE = "privacy={mechanism='distributed', epsilon=20, delta=1e-3}"


def test_data_that_may_be_used_only_so_often_are_not_tried(job_file):
    with pytest.raises(UserError, match=r"\[privacy\] accounts for each training of them"):
        plan_of(job_file, ("strategy.policy=federated", PRIVATE), PlanOptions(trial=3))


def test_policies_without_a_trial_are_refused(job_file):
    with pytest.raises(UserError, match="give its rounds by --trial"):
        plan_of(job_file, (), PlanOptions(policies=("federated",)))


@needs_chromium
def test_chromium_shows_the_page(planned, tmp_path):
    file = tmp_path / "plan.html"
    file.write_text(planned[1])
    found = subprocess.run(
        [CHROMIUM, "--headless", *CHROMIUM_OPTIONS, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert "accuracy against cost" in found.stdout
    assert found.stdout.count("<polyline") >= 12


@needs_chromium
def test_closed_parts_of_a_page_are_printed(planned, tmp_path):
    def printed(rows):
        file = tmp_path / "plan.html"
        row = "<tr><td>row</td></tr>"
        file.write_text(planned[1].replace(row_of_changes, row_of_changes + rows * row))
        subprocess.run(
            [
                CHROMIUM,
                "--headless",
                *CHROMIUM_OPTIONS,
                f"--print-to-pdf={tmp_path / 'plan.pdf'}",
                file.as_uri(),
            ],
            check=True,
            timeout=50,
        )
        return len(re.findall(rb"/Type ?/Page\b", (tmp_path / "plan.pdf").read_bytes()))

    row_of_changes = "<th>figures</th></tr></thead><tbody>"
    assert row_of_changes in planned[1]
    assert printed(300) > printed(0) + 3
