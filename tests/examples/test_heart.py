"""Four hospitals, on the UCI heart disease data, which are not part of the project."""

import contextlib
import os
import runpy
import sys

import numpy as np
import pytest
import torch
from tests import forked, machine

from isthmus import TaskError
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store

from .conftest import EXAMPLES, device

DATA = machine.DATA / "heart-disease"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SIZES = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}
"""Training and test rows in FLamby."""

pytestmark = machine.needs_data


def isthmus(*arguments, folder):
    """Run a command to its end, in processes of its own."""
    process, output = forked.start([str(each) for each in arguments], folder, os.environ)
    with open(output.fileno(), "rb", closefd=False) as file:
        said = file.read()
    process.join()
    assert process.exitcode == 0, said.decode()


def test_the_split_is_that_of_flamby(load_example):
    _, task = load_example("heart", data=DATA)
    for index, hospital in enumerate(HOSPITALS):
        train = task.local_data(device(index, 4)).tensors
        test = task.validation_data(device(index, 4)).tensors
        assert (len(train[1]), len(test[1])) == SIZES[hospital]
        assert train[0].shape[1] == 13
        varies = train[0].std(0) > 0
        assert torch.allclose(train[0].mean(0), torch.zeros(13), atol=1e-5)
        assert torch.allclose(train[0].std(0)[varies], torch.ones(int(varies.sum())))
    assert sum(sizes[0] for sizes in SIZES.values()) == 486  # as in its common.py


def test_other_numbers_of_devices_and_missing_files_are_refused(load_example, tmp_path):
    _, task = load_example("heart", data=tmp_path)
    with pytest.raises(TaskError, match=r"3 devices for 4 hospitals; set federated\.clients=4"):
        task.local_data(device(0, 3))
    with pytest.raises(TaskError, match=r"there is no file .*/va\.csv; give the folder"):
        task.local_data(device(3, 4))


def test_the_secure_accuracy_is_that_of_the_hospitals_own_figures(tmp_path, monkeypatch, capsys):
    """Three of the 15 rounds, with real processes."""
    run = tmp_path / "run"
    command = ["run", EXAMPLES / "heart/job.toml", "--run-dir", run, "--set", f"task.data={DATA}"]
    isthmus(*command, "--set", "rounds=3", folder=tmp_path)
    with contextlib.closing(Store.open(run)) as store:
        evaluation = read_report(store).rounds[-1].evaluation
    assert (evaluation.asked, evaluation.devices) == (4, 4)
    tables = [str(DATA / f"{hospital}.csv") for hospital in HOSPITALS]
    script = str(EXAMPLES / "heart/own_figures.py")
    monkeypatch.setattr(sys, "argv", [script, str(run / "model.safetensors"), *tables])
    monkeypatch.syspath_prepend(EXAMPLES / "heart")
    monkeypatch.delitem(sys.modules, "task", raising=False)
    runpy.run_path(script, run_name="__main__")
    own = [line.split() for line in capsys.readouterr().out.splitlines()]
    right = sum(round(float(share) * int(patients)) for _, share, _, patients, _ in own)
    assert evaluation.metrics["devices_accuracy"] == pytest.approx(right / 254)
    assert right / 254 > 0.6


def test_statistics_equal_those_of_the_pooled_rows_of_all_hospitals(tmp_path, load_example):
    """With real processes; a job then hands them to the task."""
    output = tmp_path / "statistics.json"
    command = ["statistics", EXAMPLES / "heart/job.toml", "--set", f"task.data={DATA}"]
    isthmus(*command, "--output", output, folder=tmp_path)
    _, task = load_example("heart", f"task.statistics={output}", data=DATA)
    assert task.statistics["devices"] == 4
    columns = task.statistics["columns"]
    of = [task.statistics_data(device(index, 4)) for index in range(4)]
    pooled = {name: torch.cat([each[name] for each in of]).double().numpy() for name in columns}
    for name, half in (("age", 35), ("pressure", 120), ("cholesterol", 350)):
        values, figures = pooled[name], columns[name]
        assert (figures["count"], figures["missing"]) == (486, 0)
        assert abs(figures["mean"] - values.mean()) <= half / 2**29
        assert abs(figures["variance"] - values.var()) <= 3 * half**2 / 2**29
        counts, _ = np.histogram(values, figures["histogram"]["edges"])
        assert figures["histogram"]["counts"] == counts.tolist()
        assert min(counts) >= 5
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        exact = np.quantile(pooled["age"], share, method="inverted_cdf")
        assert columns["age"]["quantiles"][name] == pytest.approx(exact, abs=1e-9)
    for name in ("pain", "disease"):
        found, counts = np.unique(pooled[name], return_counts=True)
        expected = {str(int(value)): count for value, count in zip(found, counts, strict=True)}
        assert columns[name]["values"] == expected
