"""The benchmark of the regimes runs a tiny scenario on synthetic letters."""

import json

import pytest
import regimes
from regime_simulation import curves, data_sets, leave_one_out, runs, scenario
from regime_simulation.changes import changed
from regime_simulation.runs import Row, measure
from regime_simulation.scenario import Federated, Run, Scenario, Split, Zone
from regime_simulation.simulation import Outcome, Point, simulate
from regime_simulation.splits import split_rows

from isthmus.errors import JobError, UserError

SMALL = Scenario(
    name="small",
    seeds=(1,),
    split=Split(clients=6, zones=2, public_rows=200, dirichlet=1.0),
    windows=(Zone(opens=0, closes=2), Zone(opens=3, closes=5)),
    federated=Federated(cohort=3, steps=3),
    run=Run(ticks=7, budget=4.0),
)


def test_the_same_seed_gives_the_same_figures(data):
    first = simulate(SMALL, 1, data, {"policy": "federated"}, 1)
    again = simulate(SMALL, 1, data, {"policy": "federated"}, 1)
    other = simulate(SMALL, 2, data, {"policy": "federated"}, 1)
    assert (first.score, first.trace) == (again.score, again.trace)
    assert first.trace != other.trace


def test_devices_work_only_in_their_windows_and_within_the_budget(data):
    """Seven hours: two of the first zone, one without devices, two of the second, two without."""
    federated = simulate(SMALL, 1, data, {"policy": "federated"}, 1)
    assert federated.rounds == {"federated": 4}
    assert federated.cost == pytest.approx(4.0)
    assert [point.transfers for point in federated.trace[:4]] == [6, 12, 18, 24]
    filled = simulate(SMALL, 1, data, {"policy": "availability"})
    assert filled.rounds == {"federated": 3, "datacenter": 1}  # a fourth would cost too much
    assert "budget" in filled.ended


def test_a_gradient_sent_to_devices_counts_as_a_model(data):
    """Three for each of three devices: model, gradient, update."""
    short = SMALL.model_copy(update={"run": Run(ticks=1, budget=4.0)})
    outcome = simulate(short, 1, data, {"policy": "hybrid", "merge": "transfer"}, 1)
    assert outcome.trace[0].transfers == 9


def test_every_fixed_policy_is_a_job(data):
    jobs = {
        name: scenario.job_for(SMALL, 1, data, dict(changes))
        for name, changes in regimes.contenders(SMALL).items()
    }
    assert {"datacenter", "federated", "fill", "transfer", "rule", "adaptive"} <= set(jobs)
    assert jobs["fill"].seconds == 7 * 3600
    whole, light = (jobs[name].strategy.transfer_weight for name in ("transfer", "transfer-light"))
    assert light == pytest.approx(whole / 4)
    rates = [jobs[name].strategy.server_optimizer.options["lr"] for name in ("warm", "warm-half")]
    assert rates == [0.7, 0.35]


def test_a_scenario_that_declares_another_target_than_its_data_is_refused(data):
    """Devices have none of eight classes, but the whole target is declared to be on devices."""
    split = Split(clients=6, public_classes=8, public_rows=3000, exclusive=True)
    wrong = SMALL.model_copy(update={"split": split, "windows": ()})
    with pytest.raises(JobError, match=r"target_edge_share=1, .* the classes of 6\d% of the test"):
        simulate(wrong, 1, data, {"policy": "federated"})


def test_random_scenarios_declare_the_share_of_the_target_on_their_devices():
    few = scenario.random_scenario(2006, (1,))
    assert (few.split.public_classes, few.split.public_rows) == (8, 5000)  # all there are of these
    assert few.split.exclusive
    assert few.run.target_edge_share == pytest.approx(18 / 26, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title = 'x'", "name: field required"),
        ("name = 'x'\n[split]\nclient = 3", "split.client: extra inputs are not permitted"),
        ("name = 'x'\n[run]\nbudget = 0", "run.budget: input should be greater than 0"),
        ("name = 'x'\nwindows = [{opens = 5, closes = 4}]", "a window closes after it opens"),
        ("name = 'x'\nwindows = [{opens = 1, closes = 4}, {opens = 5, closes = 6}]", "2 windows"),
        ("name = 'x'\n[split]\nexclusive = true\npublic_classes = 26", "leaves the devices"),
        ("name = 'x'\ndata = 'mnist'", "split.public_classes=13 is more than the 10 of the data"),
        (
            "name = 'x'\ndata = 'mnist'\nsplit = {public_classes = 2, shift = 1}",
            "split.shift is for tables, not for 'mnist'",
        ),
        (
            "name = 'x'\ndata = 'heart'\nsplit = {public_classes = 1, clients = 3, native = true}",
            "split.native needs one zone and at least 4 devices",
        ),
        ("name = 'x'\n[split]\nclients = 9", "federated.cohort=10 is more than the 9 devices"),
        ("name = ", "cannot be read as TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        scenario.load(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_named_scenarios_can_be_read():
    names = [scenario.load(path).name for path in sorted(regimes.HERE.glob("scenarios/*.toml"))]
    assert names == ["A", "B", "C"]


def test_random_scenarios_are_reproducible_and_distinct():
    drawn = [scenario.random_scenario(number, (1,)) for number in range(200)]
    assert drawn[7] == scenario.random_scenario(7, (1,))
    assert len({each.model_dump_json(exclude={"name"}) for each in drawn}) == len(drawn)


def a_row(policy, score, points=(), name="small", seed=1):
    outcome = Outcome(
        score=score,
        rounds={},
        comparisons=0,
        decisions="",
        cost=8.0,
        ended="",
        seconds=0.0,
        trace=points,
    )
    return Row(name, policy, seed, outcome)


def test_savings_of_a_run_without_transfers_count_one_transfer():
    rows = [
        a_row("federated", 80.0, (Point(cost=8.0, transfers=60, score=80.0),), "B"),
        a_row("adaptive", 82.0, (Point(cost=2.0, transfers=0, score=81.0),), "B"),
    ]
    assert regimes.savings(rows) == {"savings/B/transfers": 60.0, "savings/B/cost": 4.0}


def test_saved_runs_of_another_scenario_or_other_data_are_repeated(data, tmp_path, capsys):
    kept, other = tmp_path / "kept", tmp_path / "other"
    other.mkdir()
    name = "letter-recognition.data"
    text = (data / name).read_text().replace("A,2,", "A,3,", 1)
    (other / name).write_text(text + "A" + ",0" * 16 + "\n")
    short = SMALL.model_copy(update={"run": Run(ticks=1, budget=4.0)})
    longer = SMALL.model_copy(update={"run": Run(ticks=2, budget=4.0)})

    def runs(scenario, data):
        rows, failed = measure([scenario], ["federated"], data, 1, kept)
        assert not failed
        assert len(rows) == 1
        return len(kept.read_text().splitlines())

    assert [runs(short, data), runs(short, data)] == [1, 1]
    assert "are of another" not in capsys.readouterr().err
    assert [runs(longer, data), runs(longer, other), runs(short, data)] == [2, 3, 3]
    assert "1 runs in" in capsys.readouterr().err


def test_regret_is_measured_from_the_best_fixed_policy_in_hindsight():
    rows = [a_row("datacenter", 50.0), a_row("federated", 80.0), a_row("adaptive", 81.0)]
    assert regimes.regrets(SMALL, rows) == {
        "datacenter": {1: 30.0},
        "federated": {1: 0.0},
        "adaptive": {1: -1.0},
    }


def test_the_best_policy_of_a_seed_can_be_chosen_by_the_other_seeds():
    """Both fixed policies are as good as each other; by chance one is better with each seed."""
    scenario = SMALL.model_copy(update={"seeds": (1, 2, 3)})
    rows = [
        a_row(policy, score, seed=seed)
        for policy, by_seed in {
            "federated": (80.0, 76.0, 78.0),
            "warm": (77.0, 79.0, 78.0),
            "adaptive": (78.0, 78.0, 78.0),
            "hybrid": (99.0, 99.0),  # diverged with the third seed
        }.items()
        for seed, score in enumerate(by_seed, 1)
    ]
    assert regimes.regrets(scenario, rows)["adaptive"] == {1: 2.0, 2: -2.0, 3: 0.0}
    left_out = regimes.regrets(scenario, rows, left_out=True)["adaptive"]
    assert left_out == {1: -1.0, 2: -2.0, 3: 0.0}


FREE = SMALL.model_copy(
    update={
        "split": Split(clients=6, public_rows=400, public_classes=13, dirichlet=1.0),
        "windows": (),
        "run": Run(ticks=28, budget=20.0),
    }
)
"""Devices are always there, and the budget leaves rounds for a warm start."""


def test_the_scale_of_the_loss_changes_no_decision(data):
    """The learning rate is divided by it, so the training is the same."""
    whole = simulate(FREE, 1, data, {"policy": "adaptive"}, 0)
    assert whole.rounds["datacenter"] >= 5
    assert whole.comparisons == 1
    for factor in ("0.1", "10"):
        scaled = simulate(changed(FREE, f"loss={factor}"), 1, data, {"policy": "adaptive"}, 0)
        assert (scaled.rounds, scaled.decisions) == (whole.rounds, whole.decisions)
        assert scaled.score == pytest.approx(whole.score, abs=0.2)


def test_the_names_of_classes_change_no_round(data):
    whole = simulate(FREE, 1, data, {"policy": "adaptive"}, 0)
    renamed = changed(FREE, "renamed")
    other = simulate(renamed, 1, data, {"policy": "adaptive"}, 0)
    assert renamed.name == "small-renamed"
    assert other.rounds == whole.rounds
    assert other.score == pytest.approx(whole.score, abs=0.2)


@pytest.mark.parametrize("zones", [1, 2])
def test_shuffled_devices_stay_in_their_zones(data, zones):
    split = FREE.split.model_copy(update={"zones": zones, "clients": 20})
    train, _ = data_sets.read("letters", data)
    found = [
        split_rows(train, 26, 26, each.model_dump_json(), 1).devices
        for each in (split, split.model_copy(update={"shuffled": True}))
    ]
    for zone in range(zones):
        plain, shuffled = (
            [each.inputs.sum().item() for each in rows[zone::zones]] for rows in found
        )
        assert plain != shuffled
        assert sorted(plain) == sorted(shuffled)


def test_a_regression_has_no_classes_to_rename():
    scenario = Scenario(name="a", data="diabetes", split=Split(public_classes=4))
    with pytest.raises(UserError, match="'diabetes' has no classes to be renamed"):
        changed(scenario, "renamed")


def test_a_run_goes_on_although_devices_do_not_answer(data):
    scenario = changed(FREE, "dropout=0.3")
    outcome = simulate(scenario, 1, data, {"policy": "federated"}, 0)
    assert scenario.name == "small-dropout-0.3"
    assert outcome.rounds["federated"] >= 6
    assert outcome.ended


@pytest.mark.parametrize("change", ["loss", "loss=0", "size=2", "steps=1.5", "dropout=1"])
def test_an_unknown_change_is_refused(change):
    with pytest.raises(UserError, match="is no change of a scenario; give loss=FACTOR"):
        changed(FREE, change)


def test_constants_are_chosen_on_the_other_data_sets():
    """The variant that is best for a data set itself is not the one it gets."""
    half = "adaptive-apart-0.85"
    by_data = {"heart": (1.0, 5.0), "letters": (2.0, 0.0), "mnist": (3.0, 0.0)}
    scenarios = [SMALL.model_copy(update={"name": f"{data}-A", "data": data}) for data in by_data]

    def regrets(scenario):
        default, other = by_data[scenario.data]
        return {"adaptive": {1: default}, half: {1: other}}

    assert leave_one_out.chosen(scenarios, regrets) == {
        "heart": (half, {"heart-A": (5.0, 1.0)}),
        "letters": ("adaptive", {"letters-A": (2.0, 2.0)}),
        "mnist": ("adaptive", {"mnist-A": (3.0, 3.0)}),
    }


def test_the_script_runs_a_scenario_file(data, tmp_path, capsys):
    file, figures, kept, plot = (tmp_path / name for name in ("s.toml", "f.json", "k", "p.svg"))
    file.write_text(
        'name = "mine"\nseeds = [1]\n[split]\nclients = 10\npublic_rows = 200\n[run]\nticks = 1\n'
    )
    arguments = ["--scenario", str(file), "--data", str(data), "--policies", "datacenter,federated"]
    arguments += [
        "--jobs",
        "1",
        "--json",
        str(figures),
        "--results",
        str(kept),
        "--plot",
        str(plot),
    ]
    assert regimes.main(arguments) == 0
    results = json.loads(figures.read_text())["figures"]
    assert set(results) == {"regret/mine/datacenter", "regret/mine/federated"}
    assert min(results.values()) == 0.0
    assert len(kept.read_text().splitlines()) == 2
    assert "<polyline" in plot.read_text()
    assert "mine" in capsys.readouterr().out


def test_a_failed_run_is_reported_and_has_no_figure(data, tmp_path, capsys, monkeypatch):
    broken = {"datacenter": {"policy": "datacenter"}, "warm": {"policy": "no such"}}
    monkeypatch.setattr(runs, "contenders", lambda scenario: broken)
    monkeypatch.setattr(regimes, "contenders", lambda scenario: broken)
    file, figures = tmp_path / "s.toml", tmp_path / "f.json"
    file.write_text(
        'name = "mine"\nseeds = [1]\n[split]\nclients = 20\npublic_rows = 200\n[run]\nticks = 1\n'
    )
    arguments = [
        "--scenario",
        str(file),
        "--data",
        str(data),
        "--jobs",
        "1",
        "--json",
        str(figures),
    ]
    assert regimes.main(arguments) == 1
    assert "not in the figures: warm in mine, seed 1: strategy.policy='no such'" in (
        capsys.readouterr().err
    )
    assert set(json.loads(figures.read_text())["figures"]) == {"regret/mine/datacenter"}


def test_missing_files_are_reported_in_one_sentence(tmp_path, capsys):
    assert regimes.main(["--data", str(tmp_path), "--datasets", "heart"]) == 1
    error = capsys.readouterr().err
    assert f"there is no heart-disease/cleveland.csv in {tmp_path}; give the folder" in error


def test_a_curve_is_the_mean_of_its_runs_up_to_the_end_of_the_shortest():
    line = curves.Curve("x", [[(0, 0.0), (2, 10.0)], [(0, 20.0), (1, 30.0)]]).mean()
    assert line[0] == (0.0, 10.0)
    assert line[-1] == (1.0, 15.0)
