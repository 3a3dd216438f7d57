"""Run a task that was made of a script in both regimes, from one start."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import isthmus
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus_server.python import child_process

SCRIPTS = Path(__file__).parent / "scripts"
SEED = 3
STEPS = 12
"""Two epochs of 48 rows in batches of 8."""
REGIMES = {
    "device": {
        "rounds": 1,
        "strategy": {"policy": "federated"},
        "federated": {
            "clients": 1,
            "cohort": 1,
            "local_steps": STEPS,
            "batch_size": 8,
            "secure_aggregation": False,
        },
        "datacenter": {"ranks": 0},
    },
    "datacenter": {
        "rounds": 2,
        "strategy": {"policy": "datacenter"},
        "federated": {"clients": 0},
        "datacenter": {"ranks": 1, "steps": STEPS // 2, "batch_size": 8},
    },
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """`project(script, code)`: a folder with the script as it is and `task.py`; gives its task."""
    monkeypatch.chdir(tmp_path)

    def project(script, code):
        shutil.copy(SCRIPTS / script, tmp_path)
        (tmp_path / "task.py").write_text(code)
        return load_task("task.py:Own", {}, base=tmp_path)

    return project


@pytest.fixture
def trained(monkeypatch, forked_python):
    """`trained(regime, name)`: a run in the current folder, as `isthmus run` trains it."""
    monkeypatch.setattr(child_process, "sys", SimpleNamespace(executable=str(forked_python)))

    def trained(regime, name="run", **more):
        job = {"seed": SEED, "task": {"source": "task.py:Own"}, **REGIMES[regime], **more}
        return isthmus.run(job, run_dir=name, quiet=True)

    return trained


def start_of(task):
    """The model that each run begins with."""
    return build_model(task, SEED)


def assert_moved_alike(start, own, plain):
    """Whether two models differ by less than 1e-5 of how far training has moved them."""
    assert plain.keys() == own.keys()
    names = [name for name, each in plain.items() if each.is_floating_point()]
    moved = max(float((plain[name] - start[name]).abs().max()) for name in names)
    assert moved > 0.01
    for name in names:
        torch.testing.assert_close(own[name], plain[name], rtol=0, atol=1e-5 * moved)
