"""ResNet-18, unmodified, on devices and ranks, with both rules of BatchNorm.

That of transformers, and torchvision's where it is installed: its builds fit one build of PyTorch.
"""

import contextlib
import importlib.util
import json
import os

import pytest
from click.testing import CliRunner
from safetensors import safe_open
from tests import forked

from isthmus_server.cli.run import report

NEEDS_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="there is no torchvision; install a torchvision that fits this PyTorch",
)
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Pictures(isthmus.Task):
    def model(self):
        if self.settings["library"] == "torchvision":
            from torchvision.models import resnet18

            return resnet18(num_classes=3)
        from transformers import ResNetConfig, ResNetForImageClassification

        depths, widths = [2, 2, 2, 2], [64, 128, 256, 512]
        return ResNetForImageClassification(
            ResNetConfig(layer_type="basic", depths=depths, hidden_sizes=widths, num_labels=3)
        )

    def forward(self, model, inputs):
        output = model(inputs)
        return output if isinstance(output, torch.Tensor) else output.logits

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        return pictures(8, seed=sum(participant.name.encode()))

    def eval_data(self):
        return pictures(6, seed=0)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.001)


def pictures(count, seed):
    colour = torch.arange(count) % 3
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    images[torch.arange(count), colour] += 3
    return TensorDataset(images, colour)
"""
JOB = """
name = "pictures"
rounds = {rounds}
[task]
source = "task.py:Pictures"
settings = {{ library = "{library}" }}
[exchange]
buffers = "{buffers}"
[strategy]
policy = "alternate"
[federated]
clients = 3
cohort = 3
local_steps = 1
batch_size = 4
[datacenter]
ranks = 2
steps = 1
batch_size = 4
"""


@pytest.mark.parametrize(
    ("buffers", "regimes"), [("average", ["datacenter", "federated"]), ("frozen", ["datacenter"])]
)
@pytest.mark.parametrize(
    ("library", "statistics"),
    [
        ("transformers", "resnet.embedder.embedder.normalization.running_mean"),
        pytest.param("torchvision", "bn1.running_mean", marks=NEEDS_TORCHVISION),
    ],
)
def test_resnet_trains(tmp_path, library, statistics, buffers, regimes):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(
        JOB.format(library=library, buffers=buffers, rounds=len(regimes))
    )
    run = tmp_path / "run"
    process, output = forked.start(
        ["run", "job.toml", "--run-dir", "run"], tmp_path, {**os.environ}
    )
    lines = []
    with contextlib.suppress(EOFError, OSError):
        while line := os.read(output.fileno(), 1 << 16):
            lines.append(line.decode())
    process.join()
    assert process.exitcode == 0, "".join(lines)
    result = json.loads(CliRunner().invoke(report, [str(run), "--json"]).stdout)
    assert [row["regime"] for row in result["rounds"]] == regimes
    with safe_open(run / "model.safetensors", framework="pt") as model:
        assert len(model.keys()) == 62 + (40 if buffers == "average" else 0)
        if buffers == "average":
            assert model.get_tensor(statistics).abs().min() > 0
