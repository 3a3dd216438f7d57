"""What a comparison makes of its runs, which are not trained here."""

import asyncio
import contextlib
import io
import json
import math
import re
from types import SimpleNamespace

import click
import pytest
from rich.console import Console

from isthmus.errors import RoundFailed, TaskError, UserError
from isthmus_server.cli.compare import run_comparison
from isthmus_server.runs.local.compare import JobComparison
from isthmus_server.runs.local.comparison_table import comparison_table
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.store import Store


class Runs:
    """Runs that end at once, with given metrics; an error in their place is raised."""

    simulated = False
    spent = 2.0

    def __init__(self, *ends):
        self.ends, self.trained = list(ends), []

    def needs(self, job):
        return ""

    @contextlib.asynccontextmanager
    async def participants(self, job):
        yield

    def create(self, directory, job, base):
        return Store.create(directory, job, base)

    def devices(self, job):
        return job.federated.clients

    async def train(self, store, populations):
        self.trained.append(store.directory.name)
        with contextlib.closing(store):
            end = self.ends.pop(0) if self.ends else {"accuracy": 0.5}
        if isinstance(end, BaseException):
            raise end
        state = SimpleNamespace(round=3, spent=self.spent)
        return state, FinalModel(metrics=end, model_sha256="", model_path="", round=3)

    def leave(self):
        raise AssertionError


@pytest.fixture
def compare(make_job, tmp_path):
    """Compare variants of a job; returns the results and what was printed."""

    def run(variants, runs, seeds=(1,), job=None, base=tmp_path, width=300):
        comparison = JobComparison(
            job or make_job(), base, tmp_path / "sweep", variants, seeds, runs
        )
        console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
        found = asyncio.run(comparison.run(console))
        return found, console.export_text()

    return run


def test_a_metric_of_the_task_does_not_replace_the_cost(compare):
    found, printed = compare([{"rounds": 2}], Runs({"cost": 7.0, "rounds": 9.0}))
    assert found["variants"][0]["runs"] == [
        {
            "seed": 1,
            "rounds": 3,
            "cost": 2.0,
            "seconds": 0.0,
            "device_bytes": 0,
            "metric cost": 7.0,
            "metric rounds": 9.0,
        }
    ]
    assert "metric cost 7 metric rounds 9" in printed


def test_a_run_that_fails_leaves_the_results_of_the_others(compare, tmp_path):
    runs = Runs({"loss": 0.25}, TaskError("the task\nfailed"), {"loss": 0.75})
    variants = [{"federated.cohort": 4}, {"federated.cohort": 5}]
    found, printed = compare(variants, runs, seeds=(1, 2))
    first, second = (variant["runs"] for variant in found["variants"])
    assert [run["loss"] for run in first] == [0.25, 0.75]
    assert second[0] == {"seed": 1, "failed": "the task\nfailed"}
    assert second[1]["accuracy"] == 0.5
    assert "run 2 of 4: federated.cohort=5, seed 1 failed: the task\\nfailed" in printed
    assert re.search(r"federated.cohort .* rounds .* cost .* loss .* accuracy .* failed", printed)
    assert re.search(r"4 .* 3 .* 2.0 .* 0.5 .* - .* 0 of 2", printed)
    assert re.search(r"5 .* 3 .* 2.0 .* - .* 0.5 .* 1 of 2", printed)
    page = (tmp_path / "sweep" / "comparison.html").read_text()
    assert "federated.cohort=4" in page


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (KeyError("0.weight"), "internal error: KeyError: '0.weight'"),
        (
            ExceptionGroup("in a TaskGroup", [ExceptionGroup("inner", [ValueError("no")])]),
            "internal error: ValueError: no",
        ),
        (ExceptionGroup("in a TaskGroup", [TaskError("loss() failed")]), "loss() failed"),
        (RoundFailed("nobody came"), "nobody came"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_defect_that_one_run_meets_leaves_the_results_of_the_others(
    compare, tmp_path, error, sentence
):
    found, printed = compare([{"rounds": 2}, {"rounds": 3}], Runs(error))
    failed, done = (variant["runs"] for variant in found["variants"])
    assert failed == [{"seed": 1, "failed": sentence}]
    assert done[0]["accuracy"] == 0.5
    assert f"run 1 of 2: rounds=2, seed 1 failed: {sentence}" in printed
    assert "rounds=3" in (tmp_path / "sweep" / "comparison.html").read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_a_comparison_that_is_stopped_trains_no_other_run(compare, error):
    runs = Runs(error())
    with pytest.raises(error):
        compare([{"rounds": 2}, {"rounds": 3}], runs)
    assert runs.trained == ["rounds=2-1"]


def test_a_comparison_of_which_all_runs_fail_has_a_table_and_a_page(compare, tmp_path):
    _, printed = compare([{"rounds": 2}], Runs(TaskError("no")))
    assert re.search(r"2 .* - .* - .* 1 of 1", printed)
    assert (tmp_path / "sweep" / "comparison.html").exists()


def test_a_mistake_of_the_task_ends_a_comparison_with_one_sentence(compare, tmp_path):
    def failure(name):
        log = tmp_path / "sweep" / name / "logs" / "client-0.log"
        return TaskError(f"local_data() failed at task.py:3: OSError: no file; see {log}")

    runs = Runs(failure("rounds=1-1"), failure("rounds=2-1"))
    with pytest.raises(UserError, match=r"^the first 2 of 3 runs failed in the same way, so the "):
        compare([{"rounds": 1}, {"rounds": 2}, {"rounds": 3}], runs)
    assert len(runs.trained) == 2


def test_other_failures_do_not_end_a_comparison(compare):
    runs = Runs(TaskError("one"), TaskError("another"), {"accuracy": 0.5})
    found, _ = compare([{"rounds": 1}, {"rounds": 2}, {"rounds": 3}], runs)
    assert [variant["runs"][0].get("failed") for variant in found["variants"]] == [
        "one",
        "another",
        None,
    ]


def test_the_same_comparison_repeats_a_failed_run(compare):
    compare([{"rounds": 2}], Runs(TaskError("no")))
    runs = Runs()
    found, printed = compare([{"rounds": 2}], runs)
    assert runs.trained == ["rounds=2-1"]
    assert found["variants"][0]["runs"][0]["accuracy"] == 0.5
    assert "failed" not in printed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("job", r"has a run of another job; give another directory with --run-dir$"),
        ("base", r"has a run of a job in another folder, /\S+; give another directory"),
        ("simulated", r"has a run with real participants; give another directory"),
    ],
)
def test_runs_that_are_not_those_of_the_comparison_are_refused_before_any_is_trained(
    compare, make_job, tmp_path, change, sentence
):
    compare([{"rounds": 2}], Runs())
    runs = Runs()
    runs.simulated = change == "simulated"
    job = make_job("name='other'") if change == "job" else make_job()
    base = tmp_path / "other" if change == "base" else tmp_path
    with pytest.raises(UserError, match=sentence):
        compare([{"rounds": 3}, {"rounds": 2}], runs, job=job, base=base)
    assert not runs.trained


POLICIES = """
class Mine:
    def __init__(self, strategy):
        strategy.settings["level"]

    def plan(self, observation):
        raise AssertionError
"""


@pytest.mark.parametrize(
    ("varied", "sentence"),
    [
        (
            ("strategy.policy", "federated", "adaptiv"),
            "^with adaptiv: strategy.policy='adaptiv' is unknown; choose one of adaptive, ",
        ),
        (
            ("strategy.settings", {"error": 0.1}, {"eror": 0.1}),
            "^with .*eror.*: unknown key strategy.settings.eror; did you mean error",
        ),
        (
            ("strategy.policy", "federated", "own_policies:Mein"),
            "^with own_policies:Mein: .* has no attribute 'Mein'",
        ),
        (
            ("strategy.policy", "federated", "own_policies:Mine"),
            "^with own_policies:Mine: .* cannot be constructed: KeyError: 'level'",
        ),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_refused_before_any_run(
    compare, make_job, write_task, tmp_path, varied, sentence
):
    key, *values = varied
    write_task()
    (tmp_path / "own_policies.py").write_text(POLICIES)
    runs, job = Runs(), make_job("budget=8", "strategy.policy=adaptive")
    with pytest.raises(UserError, match=sentence):
        compare([{key: value} for value in values], runs, job=job)
    assert not runs.trained


def test_a_policy_that_follows_a_metric_which_no_round_has_is_refused_before_any_run(
    compare, make_job, write_task
):
    write_task("eval_data = isthmus.Task.eval_data")
    runs, variants = Runs(), [{"strategy.policy": name} for name in ("federated", "plateau")]
    with pytest.raises(UserError, match=r"^with plateau: strategy.settings.metric='loss' follows "):
        compare(variants, runs, job=make_job("budget=8", "strategy.policy=federated"))
    assert not runs.trained


def test_a_policy_of_the_job_in_the_folder_of_its_task_can_be_compared(
    compare, make_job, write_task, tmp_path
):
    write_task()
    (tmp_path / "own_policies.py").write_text(POLICIES)
    runs, job = Runs(), make_job("strategy.policy=own_policies:Mine")
    compare([{"strategy.settings.level": 1}, {"strategy.settings.level": 2}], runs, job=job)
    assert len(runs.trained) == 2


def test_names_and_values_are_shown_as_they_are(compare):
    values = ["[/x]", [True, False], "f1[macro]", ":smile:"]
    metrics = {"f1[macro]": 0.5, "[/y]": 0.25}
    _, printed = compare([{"task.settings.x": value} for value in values], Runs(*[metrics] * 4))
    for text in ('"[/x]"', "[true, false]", "f1[macro]", ":smile:"):
        assert f": task.settings.x={text}, seed 1: [/y] 0.25 f1[macro] 0.5" in printed
    assert re.search(r"┃ +f1\[macro\] +┃ +\[/y\] +┃", printed)
    assert re.search(r"│ f1\[macro\] +│", printed)


def test_figures_are_not_cut_in_a_narrow_terminal(compare):
    metrics = {f"metric_{number}": 0.1234 for number in range(9)}
    _, printed = compare([{"rounds": 2}], Runs(metrics), width=60)
    assert "…" not in printed
    assert printed.count("0.1234") >= 18  # in the line of the run, and in the table


def test_a_budget_that_is_varied_is_not_in_the_title(compare, make_job):
    _, printed = compare([{"rounds": 2}], Runs(), job=make_job("budget=8"))
    assert "table: delivered models for a budget of 8, one seed" in printed
    _, printed = compare([{"budget": 7}, {"budget": 9}], Runs(), job=make_job("budget=8"))
    assert "table: delivered models, one seed" in printed


def test_rounds_limit_every_policy_and_it_is_said_whose_budget_is_not_used_up(
    compare, make_job, tmp_path
):
    """The job's own policy and the others: every run ends after 3 rounds, at a cost of 2."""
    job, policies = make_job("budget=4", "rounds=3"), ("federated", "datacenter")
    variants = [{"strategy.policy": policy} for policy in policies]
    _, printed = compare(variants, Runs(), job=job)
    for policy in policies:
        with contextlib.closing(Store.open(tmp_path / "sweep" / f"{policy}-1")) as store:
            assert store.description.job.rounds == 3
        line = f"{policy}: rounds=3 ended it at a cost of 2; raise rounds to compare at the whole"
        assert f"{line} budget of 4" in printed


@pytest.mark.parametrize(
    ("change", "cost"), [("budget=2.5", 2.0), ("rounds=4", 2.0), ("seed=1", 0.0)]
)
def test_rounds_did_not_end_a_policy_that_ended_before_or_has_no_price(
    compare, make_job, change, cost
):
    runs, job = Runs(), make_job("budget=4", "rounds=3", change)
    runs.spent = cost
    _, printed = compare([{"strategy.policy": "federated"}], runs, job=job)
    assert "ended it" not in printed


def test_each_variant_has_directories_of_its_own(compare, tmp_path):
    values = ["a b", "a?b", "A?B", "c", "?", "\N{GREEK SMALL LETTER LAMDA}" * 90]
    runs = Runs()
    compare([{"task.settings.x": value} for value in values], runs, seeds=(1, 2))
    assert len(set(map(str.casefold, runs.trained))) == 12
    assert max(len(name.encode()) for name in runs.trained) < 120


def test_results_for_programs_have_null_where_json_has_no_figure(make_job, tmp_path):
    runs = Runs({"loss": float("nan")}, TaskError("no"))
    variants = [{"task.settings.x": value} for value in (1, 2)]
    comparison = JobComparison(make_job(), tmp_path, tmp_path / "sweep", variants, [1], runs)
    file = tmp_path / "results.json"
    with pytest.raises(click.exceptions.Exit) as ended:
        run_comparison(comparison, file)
    assert ended.value.exit_code == 1
    first, second = json.loads(file.read_text(), parse_constant=pytest.fail)["variants"]
    assert first["runs"][0]["loss"] is None
    assert second == {
        "changes": {"task.settings.x": 2},
        "runs": [{"seed": 1, "failed": "no"}],
        "means": {},
        "deviations": {},
    }
    assert first["means"]["loss"] is None


def test_the_spread_over_seeds_is_shown_and_among_the_results(compare):
    runs = Runs({"loss": 0.25}, {"loss": 0.5}, {"loss": 0.75}, {"loss": float("inf")})
    variants = [{"federated.cohort": 4}, {"federated.cohort": 5}]
    found, printed = compare(variants, runs, seeds=(1, 2))
    first, second = found["variants"]
    assert first["means"]["loss"] == 0.5
    assert first["deviations"]["loss"] == pytest.approx(0.125**0.5)
    assert math.isnan(second["deviations"]["loss"])
    assert "mean of 2 seeds +- their standard deviation" in printed
    assert re.search(r"│ 4 +│ +3 │ +2.0 │ +0.5 \+- 0.35 │", printed)


def test_one_seed_has_no_spread(compare):
    found, printed = compare([{"rounds": 2}], Runs({"loss": 0.25}))
    assert found["variants"][0]["deviations"] == {}
    assert "+-" not in printed


def test_time_and_bytes_have_columns_if_they_are_known():
    run = {"seed": 1, "rounds": 3, "cost": 2.0, "seconds": 12.5, "device_bytes": 3_000_000}
    second = {**run, "seed": 2, "seconds": 14.5}
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(comparison_table([{"rounds": 3}], [[run, second]]))
    printed = console.export_text()
    assert re.search(r"┃ rounds ┃ rounds ┃ cost ┃ +seconds ┃ MB of devices ┃", printed)
    assert re.search(r"│ 3 +│ +3 │ +2.0 │ 13.5 \+- 1.4 │ +3 │", printed)
    nothing = {**run, "seconds": 0.0, "device_bytes": 0}
    assert len(comparison_table([{"rounds": 3}], [[nothing]]).columns) == 3
