"""Simulated devices on the GPUs of one machine."""

import subprocess
import sys

import pytest
import torch
from tests.machine import needs_gpu

from isthmus.errors import UserError
from isthmus_clients.training.accelerator import Accelerators
from isthmus_server.python.saved_model import load_model
from isthmus_simulation.run import gpus_of


@pytest.mark.parametrize(
    ("choice", "count", "gpus"),
    [
        ("cpu", 2, []),
        ("auto", 0, []),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
    ],
)
def test_processes_train_on_the_gpus_that_the_job_names(monkeypatch, make_job, choice, count, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert gpus_of(make_job(f"federated.device={choice}")) == gpus


@pytest.mark.parametrize(
    ("choice", "present", "keys", "sentence"),
    [
        ("cuda", Accelerators(), (), "PyTorch finds no CUDA device here"),
        ("cuda:1", Accelerators(cuda=1), (), "PyTorch finds 1 CUDA devices here"),
        ("mps", Accelerators(), (), "PyTorch finds no GPU of Apple here"),
        ("mps", Accelerators(mps=True), (), "train on cores or on CUDA devices"),
        ("cuda:0", Accelerators(cuda=1), ("exchange.personal=['bias']",), "personal parameters"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_sentence(
    monkeypatch, make_job, choice, present, keys, sentence
):
    monkeypatch.setattr(Accelerators, "present", lambda: present)
    with pytest.raises(UserError, match=sentence):
        gpus_of(make_job(f"federated.device={choice}", *keys))


def test_the_gpu_of_an_apple_machine_is_not_chosen_by_itself(monkeypatch, make_job):
    monkeypatch.setattr(Accelerators, "present", lambda: Accelerators(mps=True))
    assert gpus_of(make_job("federated.device=auto")) == []


def test_devices_with_personal_parameters_train_on_cores_by_default(monkeypatch, make_job):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus_of(make_job("federated.device=auto", "exchange.personal=['bias']")) == []


JOB = """
name = "images"
rounds = 2
[task]
source = "task.py:Images"
[strategy]
policy = "federated"
[federated]
cohort = 5
local_steps = 4
batch_size = 4
[simulation]
clients = 7
"""

TASK = """
import torch
from isthmus import Task
from torch import nn
from torch.utils.data import TensorDataset

class Images(Task):
    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        )

    def local_data(self, participant):
        draw = torch.Generator().manual_seed(participant.shard[0])
        count = 6 + participant.shard[0]
        images = torch.randn(count, 1, 8, 8, generator=draw)
        return TensorDataset(images, torch.randint(3, (count,), generator=draw))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, parameters, participant):
        return torch.optim.{optimizer}
"""


@needs_gpu
@pytest.mark.parametrize("optimizer", ["SGD(parameters, lr=0.1)", "Adam(parameters)"])
def test_devices_on_a_gpu_train_as_on_cores(tmp_path, optimizer):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "task.py").write_text(TASK.replace("{optimizer}", optimizer))
    runs = {
        "cores": ["simulation.training=stacked"],
        "stacked": ["simulation.training=stacked", "federated.device=cuda"],
        "single": ["simulation.training=one-by-one", "federated.device=cuda:0"],
        "three": ["federated.device=auto", "simulation.processes=3"],
    }
    models = {}
    for name, keys in runs.items():
        command = [sys.executable, "-m", "isthmus", "simulate", "job.toml", "--run-dir", name]
        command += [part for key in keys for part in ("--set", key)]
        said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        processes = 3 if name == "three" else 1
        words = f"devices train on GPUs: 1, processes: {processes}"
        assert (words in said.stdout) == (name != "cores")
        parts = load_model(tmp_path / name).parameters()
        models[name] = torch.cat([part.flatten() for part in parts])
    for name in ("stacked", "single", "three"):
        torch.testing.assert_close(models[name], models["cores"], rtol=1e-3, atol=1e-4)
