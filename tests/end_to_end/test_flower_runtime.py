"""Isthmus' ServerApp and ClientApp on Flower's own SuperLink and SuperNodes.

Flower's programs do what they do when they are installed, in processes that have PyTorch and this
project already: there are a dozen, and each would import them anew.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.forked_commands import ForkedCommands

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.global_model import GlobalModel

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
APP = ROOT / "examples" / "flower"
PROGRAMS = (
    *("flwr", "flower-superlink", "flower-supernode"),
    *("flower-superexec", "flwr-serverapp", "flwr-clientapp"),  # started by name, by those
)


def test_flwr_run_trains_an_isthmus_task(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # all processes share this machine
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.05")
    roots = PROJECT["tool"]["hatch"]["build"][
        "dev-mode-dirs"
    ]  # this checkout, for Flower's processes
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / name) for name in roots))
    from harness import flower_runtime

    app, home, results = tmp_path / "app", tmp_path / "home", tmp_path / "results"
    shutil.copytree(APP, app)
    home.mkdir()
    with contextlib.ExitStack() as stack:
        commands = stack.enter_context(ForkedCommands(*PROGRAMS))
        monkeypatch.setattr(flower_runtime, "programs", lambda: commands.folder)
        _, _, environment = stack.enter_context(flower_runtime.deployment(home, clients=2))
        finished = subprocess.run(
            [
                *(str(commands.folder / "flwr"), "run", str(app), flower_runtime.NAME, "--stream"),
                *("--run-config", f'directory="{results}" rounds=1'),
            ],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report = json.loads((results / "report.json").read_text())
    (row,) = report["rounds"]
    assert row["accepted"] == 2
    assert row["training"].keys() == {"loss", "train_loss"}
    payload = bytearray((results / "model.safetensors").read_bytes())
    job = load_job(APP / "hosted.toml")
    task = load_task(job.task.source, {}, base=APP)
    model = GlobalModel(task, job.seed, job.strategy.server_optimizer)
    start = model.evaluate(512)
    model.replace(TensorLayout.from_header(model.layout.header).decode(payload))
    assert model.evaluate(512) == report["final"]["metrics"]
    assert report["final"]["metrics"]["loss"] < start["loss"]
