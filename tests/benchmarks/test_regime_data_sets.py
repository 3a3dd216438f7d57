"""The data sets and problems of the benchmark of the regimes, on synthetic files."""

import gzip
import json
import random

import pytest
import regimes
import torch
from regime_simulation import data_sets, readers, scenario
from regime_simulation.problems import FOLDER, PROBLEMS, figure_key, load_problems
from regime_simulation.readers import Rows
from regime_simulation.runs import Row
from regime_simulation.scenario import Run, Scenario, Split
from regime_simulation.simulation import Outcome, simulate
from regime_simulation.splits import split_rows

from isthmus.errors import JobError, UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small files in the form of each data set that is not part of a package."""
    draw = random.Random(1)
    folder = tmp_path_factory.mktemp("data")
    (folder / "heart-disease").mkdir()
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [[str(draw.randint(0, 9)) for _ in range(13)] for _ in range(200)]
        rows[0][3] = "?"
        lines = [",".join([*row, str(max(0, int(row[0]) - 5))]) for row in rows]
        (folder / "heart-disease" / f"{name}.csv").write_text("\n".join(lines))
    pixels = bytes(draw.randrange(256) for _ in range(50 * 28 * 28))
    for name, data in (
        ("images-idx3", bytes(16) + pixels),
        ("labels-idx1", bytes(8) + bytes(i // 5 for i in range(50))),
    ):
        (folder / f"mnist-t10k-{name}-ubyte.gz").write_bytes(gzip.compress(data))
    speeches = [f"SPEAKER {i}:\n{'to be or not to be ' * (i + 5)}" for i in range(62)]
    (folder / "tinyshakespeare.txt").write_text("\n\n".join(speeches))
    return folder


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist", (1, 14, 14)),
        ("shakespeare", (8,)),
        ("heart", (26,)),
        ("diabetes", (10,)),
        ("languages", (384,)),
    ],
)
def test_a_data_set_has_rows_that_its_model_can_learn(folder, name, shape):
    data_set = data_sets.DATA_SETS[name]
    train, test = data_sets.read(name, folder)
    for rows in (train, test):
        assert rows.inputs.shape[1:] == shape
        assert len(rows.target) == len(rows.kind) == len(rows.inputs) > 0
    assert set(train.kind.tolist()) == set(range(data_set.kinds))
    output = data_set.model((12,))(test.inputs[:5])
    assert output.shape == (5, data_set.labels or 1)
    assert not data_set.labels or int(train.target.max()) < data_set.labels
    assert data_set.digest(folder) == data_set.digest(folder)


def test_a_speaker_has_training_text_and_its_last_tenth_for_tests(folder):
    train, test = readers.shakespeare(folder)
    text = "to be or not to be " * 66  # of the speaker with the most text
    longest = test.at(test.kind == 59)
    number = {
        character: n for n, character in enumerate(sorted(set("SPEAKER 0123456789:\n" + text)))
    }
    held_out = torch.tensor([number[c] for c in text.strip()][len(text.strip()) * 9 // 10 :])
    assert torch.equal(longest.inputs[0], held_out[:8])
    assert len(train.at(train.kind == 59).target) > 1000


@pytest.fixture
def rows():
    """Forty rows of each of four kinds, which are also their classes; inputs are row numbers."""
    kind = torch.arange(4).repeat(40)
    return Rows(torch.arange(160.0)[:, None], kind, kind)


def divided(rows, labels=4, **keys):
    split = Split(**{"clients": 4, "public_classes": 2, "public_rows": 30, **keys})
    return split_rows(rows, 4, labels, split.model_dump_json(), 1)


def test_every_row_is_in_one_place(rows):
    parts = divided(rows)
    everyone = [parts.public, parts.held_out, *parts.devices]
    numbers = torch.cat([part.inputs for part in everyone]).flatten()
    assert sorted(numbers.tolist()) == list(range(160))
    assert len(parts.held_out.target) == 3
    assert min(len(device.target) for device in parts.devices) >= 20


def test_exclusive_kinds_are_on_no_device(rows):
    parts = divided(rows, exclusive=True, clients=3)
    public = set(parts.public.kind.tolist())
    assert len(public) == 2
    assert not public & {int(kind) for device in parts.devices for kind in device.kind}


def test_a_native_device_has_rows_of_one_source(rows):
    parts = divided(rows, native=True, clients=5, public_classes=1, public_rows=20)
    assert [len(set(device.kind.tolist())) for device in parts.devices] == [1] * 5
    assert len({int(device.kind[0]) for device in parts.devices}) == 4


def test_poisoned_labels_are_all_wrong_and_those_of_devices_are_right(rows):
    poison = {"public_classes": 4, "swapped_classes": 1.0}
    parts = divided(rows, **poison)
    assert not (parts.public.target == parts.public.kind).any()
    assert not (parts.held_out.target == parts.held_out.kind).any()
    assert all((device.target == device.kind).all() for device in parts.devices)
    other = Rows(rows.inputs, (rows.kind + 1) % 3, rows.kind)  # classes are not the kinds
    parts = divided(other, labels=3, **poison)
    assert not (parts.public.target == (parts.public.kind + 1) % 3).any()
    real = Rows(rows.inputs, rows.inputs.flatten() + 1, rows.kind)
    parts = divided(real, labels=0, **poison)
    assert torch.equal(parts.public.target, -parts.public.inputs.flatten() - 1)


def test_too_few_rows_for_the_devices_are_refused(rows):
    with pytest.raises(UserError, match=r"^130 rows are left for split.clients=7 devices"):
        divided(rows, clients=7)


def test_the_problems_of_every_data_set_can_be_read():
    scenarios = load_problems(list(data_sets.DATA_SETS))
    assert len(scenarios) == 3 * len(data_sets.DATA_SETS)
    assert figure_key(scenarios[4]) == "mnist/B"
    for each in scenarios:
        problem = each.name.rpartition("-")[2]
        assert each.split.exclusive == (problem == "B")
        assert each.split.swapped_classes == (1.0 if problem == "P" else 0.0)


def test_the_problems_of_letters_are_the_scenarios_with_their_names():
    for problem in load_problems(["letters"], ["A", "B"]):
        name = problem.name.rpartition("-")[2]
        named = scenario.load(regimes.HERE / "scenarios" / f"{name.lower()}.toml")
        update = {"name": named.name, "title": named.title}
        assert problem.model_copy(update=update) == named


@pytest.mark.parametrize(
    ("names", "problems", "sentence"),
    [
        (["digits"], PROBLEMS, "no data set 'digits'; there are letters, mnist"),
        (["heart"], ["Q"], "no problem 'Q'; there are A, B, P"),
    ],
)
def test_an_unknown_name_is_refused(names, problems, sentence):
    with pytest.raises(UserError, match=sentence):
        load_problems(names, problems)


def test_a_wrong_key_of_a_problem_is_refused(tmp_path, monkeypatch):
    text = (FOLDER / "heart.toml").read_text().replace("[P]", "[Q]")
    (tmp_path / "heart.toml").write_text(text)
    monkeypatch.setattr("regime_simulation.problems.FOLDER", tmp_path)
    with pytest.raises(JobError, match=r"heart.toml: Q: extra inputs are not permitted"):
        load_problems(["heart"])


def test_rows_like_the_target_are_evaluated_and_not_scored(folder):
    everything = data_sets.read("heart", folder)[1]
    scored, evaluated = data_sets.test_rows("heart", folder, evaluated=True)
    assert len(scored.target) + len(evaluated.target) == len(everything.target)
    public, target = (load_problems(["heart"], ["P"], kind)[0] for kind in ("public", "target"))
    assert target.name == "heart-P-target"
    for problem, expected in ((public, 15), (target, len(evaluated.target))):
        settings = scenario.job_for(problem, 1, folder, {"policy": "federated"}).task.settings
        task = data_sets.Simulated(settings, folder)
        assert len(task.eval_data()) == expected
        assert len(task.public_eval()) == 15


def test_the_share_of_the_target_can_be_measured(folder):
    complementary = load_problems(["heart"], ["B"])[0]
    job = scenario.job_for(complementary, 1, folder, {"policy": "rule"})
    assert 0.6 < job.strategy.target_edge_share < 0.9


def test_the_regret_of_a_regression_is_in_per_cent_of_the_lowest_error():
    split = Split(public_classes=3)
    measured = Scenario(name="d", data="diabetes", seeds=(1,), split=split)
    outcome = Outcome(
        score=0.0, rounds={}, comparisons=0, decisions="", cost=1.0, ended="", seconds=0.0, trace=()
    )
    rows = [
        Row("d", policy, 1, Outcome(**{**vars(outcome), "score": error}))
        for policy, error in (("federated", 0.5), ("warm", 1.0), ("adaptive", 0.6))
    ]
    regrets = {policy: regret[1] for policy, regret in regimes.regrets(measured, rows).items()}
    assert regrets == pytest.approx({"federated": 0.0, "warm": 100.0, "adaptive": 20.0})


def test_the_script_runs_a_problem_of_a_regression(tmp_path, monkeypatch, capsys):
    short = (FOLDER / "diabetes.toml").read_text().replace("ticks = 50", "ticks = 3")
    (tmp_path / "diabetes.toml").write_text(short)
    monkeypatch.setattr("regime_simulation.problems.FOLDER", tmp_path)
    figures = tmp_path / "f.json"
    arguments = ["--data", str(tmp_path), "--datasets", "diabetes", "--problems", "A", "--quick"]
    arguments += ["--policies", "federated,warm-half,adaptive", "--jobs", "1"]
    assert regimes.main([*arguments, "--json", str(figures)]) == 0
    assert set(json.loads(figures.read_text())["figures"]) == {
        f"regret/diabetes/A/{policy}" for policy in ("federated", "warm-half", "adaptive")
    }
    assert "diabetes-A: public data of a part of the range" in capsys.readouterr().out


def test_native_devices_learn_with_the_public_data_of_other_sources(folder):
    complementary = load_problems(["heart"], ["B"])[0]
    short = complementary.model_copy(update={"run": Run(ticks=4, target_edge_share="measured")})
    outcome = simulate(short, 1, folder, {"policy": "rule"})
    assert outcome.rounds == {"hybrid": 4}
    assert 0 <= outcome.score <= 100
