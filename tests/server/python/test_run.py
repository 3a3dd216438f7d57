"""`isthmus.run`: a run from Python, which is the command's, followed, stopped and resumed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import isthmus
from isthmus_server.python import child_process
from isthmus_server.python.child_process import IN_RUN
from isthmus_server.python.task_source import source_of
from isthmus_server.read.export.results import open_result

JOB = {
    "rounds": 3,
    "strategy": {"policy": "federated"},
    "federated": {"clients": 3, "cohort": 3},
    "datacenter": {"ranks": 0},
    "evaluation": {"keep_best": {"name": "loss", "mode": "max"}},  # which is the first round's
}
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

CLASSES = 3


def rows(seed, count):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Table(isthmus.Task):
    def model(self):
        return nn.Linear(8, CLASSES)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        return rows(participant.shard[0], 40)

    def eval_data(self):
        return rows(99, 100)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=self.settings.get("lr", 0.3))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose task is a file of the current folder."""
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return {**JOB, "task": {"source": "task.py:Table"}}


@pytest.fixture
def forked(monkeypatch, forked_python):
    """The processes of runs do not import PyTorch anew, as those of a script do."""
    monkeypatch.setattr(child_process, "sys", SimpleNamespace(executable=str(forked_python)))


@pytest.mark.usefixtures("forked")
def test_a_run_is_followed_stopped_and_resumed(job):
    seen = []

    def fail(run, record):
        seen.append(record.round)
        raise KeyError("in the callback")

    def stop(run, record):
        seen.append(record.round)
        run.stop()

    job["rounds"] = 30
    with pytest.raises(KeyError, match="in the callback"):
        isthmus.run(job, run_dir="run", on_round=fail, quiet=True)
    assert seen == [1]
    seen = list(range(1, len(isthmus.Run("run").rounds) + 1))  # it ended after a running round
    stopped = isthmus.Run("run").resume(on_round=stop, wait=False, quiet=True).wait()
    assert len(stopped.rounds) < 30
    assert stopped.final is None
    run = stopped.resume(on_round=lambda run, record: seen.append(record.round), quiet=True)
    assert seen == list(range(1, 31))
    assert run.status == "finished"
    assert len(run.receipts) == 90

    frame = run.frame()
    assert list(frame["cost"]) == [3.0 * round_ for round_ in range(1, 31)]
    assert list(frame["loss"]) == [record.metrics["loss"] for record in run.rounds]
    assert len(run.receipts_frame()) == 90
    axes = run.plot("loss", against="round")
    assert list(axes.lines[0].get_xdata()) == list(range(1, 31))
    with pytest.raises(isthmus.UserError, match="no figure 'auc'; it has round, regime, "):
        run.plot("auc")

    last, best = run.model(), isthmus.load_model("run", round="best")
    torch.testing.assert_close(last.state_dict(), isthmus.load_model(run, 30).state_dict())
    inputs, targets = held_out_rows()
    losses = [torch.nn.functional.cross_entropy(each(inputs), targets) for each in (best, last)]
    expected = [record.metrics["loss"] for record in (run.rounds[0], run.rounds[-1])]
    torch.testing.assert_close(torch.stack(losses), torch.tensor(expected))
    with pytest.raises(isthmus.UserError, match="no model of round 2; it has delivered, last, be"):
        run.model(2)


@pytest.mark.usefixtures("forked")
def test_a_fetched_model_is_loaded_like_that_of_its_run(job):
    run = isthmus.run(job, run_dir="run", quiet=True, rounds=2)
    folder = Path("fetched")
    folder.mkdir()
    for what, name in (("report", "report.json"), ("model", "model.safetensors")):
        with contextlib.closing(open_result(Path("run"), what)) as result:
            (folder / name).write_bytes(result.file.read())
    expected = isthmus.load_model(run).state_dict()
    torch.testing.assert_close(isthmus.load_model(folder).state_dict(), expected)
    names = {}
    exec(TASK, names)
    model = isthmus.load_model(folder, task=names["Table"])
    torch.testing.assert_close(model.state_dict(), expected)
    with pytest.raises(isthmus.UserError, match="was fetched and has no model of round 'last'"):
        isthmus.load_model(folder, "last")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(isthmus.UserError, match=r"is not the model of .*report\.json; fetch"):
        isthmus.load_model(folder)


@pytest.mark.usefixtures("forked")
def test_a_delivered_model_that_is_not_the_recorded_one_is_not_loaded(job):
    run = isthmus.run(job, run_dir="run", quiet=True, rounds=2)
    path = Path("run/model.safetensors")
    written = path.read_bytes()
    for damaged in (written[:-1] + b"x", written + b"x", written[:-1], b""):
        path.write_bytes(damaged)
        for load in (run.model, lambda: isthmus.load_model("run", 2)):
            with pytest.raises(isthmus.UserError, match="is damaged: its digest differs"):
                load()
    path.unlink()
    with pytest.raises(isthmus.UserError, match=r"cannot be read: No such file .* restore it from"):
        run.model()
    path.write_bytes(written)
    assert run.model() is not None


def held_out_rows():
    table = {}
    exec(TASK, table)
    return table["rows"](99, 100).tensors


@pytest.mark.usefixtures("forked")
def test_a_failed_run_raises_its_last_sentence(job):
    with pytest.raises(isthmus.UserError, match=r"^round 1 failed .* Invalid learning rate: -1"):
        isthmus.run(job, run_dir="run", quiet=True, attempts=1, **{"task.settings": {"lr": -1}})
    assert isthmus.Run("run").status == "failed"


def test_a_script_need_not_be_guarded(tmp_path):
    """The run's processes do not run it again."""
    script = f"{TASK}\nrun = isthmus.run({JOB!r}, task=Table, run_dir='run', rounds=1)\n"
    (tmp_path / "script.py").write_text(script + "print(run)\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].endswith("finished, 1 rounds")


def test_a_task_file_that_starts_a_run_is_told_so(monkeypatch):
    monkeypatch.setenv(IN_RUN, "1")
    with pytest.raises(isthmus.UserError, match="call it under `if __name__ =="):
        isthmus.run(JOB, task=None)


def test_a_task_within_a_function_is_refused(tmp_path):
    class Local(isthmus.Task):
        pass

    with pytest.raises(isthmus.UserError, match="within another block; define it at the top"):
        source_of(Local, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"job": None}, "a job file or a mapping of its tables, and not None"),
        ({"job": JOB, "task": 3}, "a subclass of isthmus.Task, and not 3"),
        ({"job": JOB, "budget": None}, "none that a job file can have: .*NoneType"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(isthmus.UserError, match=said):
        isthmus.run(**arguments)
    assert repr(isthmus.Run("none")).endswith("contains no run (no job.json)")


def test_the_server_is_imported_only_when_a_run_is_made():
    """A device has no server's packages."""
    code = "import sys, isthmus; isthmus.Task; print('isthmus_server' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        isthmus.walk  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "kept"),
    [
        ("import os", True),
        ("SIZE = 3", True),
        ("PATH = Path('x') ", True),
        ("LAYERS: tuple = (nn.ReLU, 8)", True),
        ("trained = train()", False),
        ("train()", False),
        ("for i in range(3): print(i)", False),
        ("torch.y = 3", True),
        ("x.y = 3", False),
        ("", True),
    ],
)
def test_what_of_a_script_is_copied(tmp_path, monkeypatch, statement, kept):
    """Definitions and constants that can be executed, and nothing that computes."""
    file = tmp_path / "script.py"
    imports = "import torch\nfrom pathlib import Path\nfrom torch import nn"
    file.write_text(f"{imports}\n{statement}\n{TASK}")
    module = type(sys)("__main__")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", module)
    task = type("Table", (isthmus.Task,), {"__module__": "__main__"})
    source = source_of(task, tmp_path / "made")
    assert source == f"{tmp_path / 'made/task.py'}:Table"
    written = (tmp_path / "made/task.py").read_text()
    assert (statement.strip().split("=")[0].strip() in written) == kept
    assert "class Table" in written
