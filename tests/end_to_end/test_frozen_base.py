"""Devices train adapters in secure sums over a base that each holds in bfloat16, of its owner's.

All are real processes, which have joined and speak mutual TLS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests.end_to_end.loopback_fleet import LoopbackFleet
from transformers import AutoModelForCausalLM, LlamaConfig

from isthmus.task import load_task
from isthmus.task.scoring import build_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
TASK = f'''
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

import isthmus


class Adapters(isthmus.Task):
    """The next token, by adapters of a base that nobody trains."""

    def model(self):
        config = LlamaConfig(**{SIZES!r})
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return get_peft_model(decoder, LoraConfig(**{LORA!r}))

    def forward(self, model, tokens):
        return model(input_ids=tokens, use_cache=False).logits

    def loss(self, output, target):
        return nn.functional.cross_entropy(
            output.float().transpose(1, 2), target, reduction="none"
        ).mean(1)

    def local_data(self, participant):
        return self.rows(participant.shard[0] if participant.shard else 50)

    def eval_data(self):
        return self.rows(99)

    def rows(self, seed):
        tokens = torch.randint(64, (4, 7), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
'''
JOB = """
name = "adapters"
rounds = 1
seed = 3
[task]
source = "task.py:Adapters"
[model]
start = "base"
fresh = ["*lora_*"]
[strategy]
policy = "federated"
[federated]
cohort = 3
quorum = 3
local_steps = 2
batch_size = 4
frozen_dtype = "bfloat16"
[time]
join_seconds = 150
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The job, its task, and the folder of a base in bfloat16 that owners have too."""
    folder = tmp_path / "tasks" / "base"
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (tmp_path / "base").symlink_to(folder)
    (tmp_path / "job.toml").write_text(JOB)
    for place in (tmp_path, tmp_path / "tasks", tmp_path / "devices"):
        place.mkdir(exist_ok=True)
        (place / "task.py").write_text(TASK)
    return folder


def plain_movement(
    model: torch.nn.Module, start: dict[str, torch.nn.Parameter], shard: int
) -> list[torch.Tensor]:
    """What two steps over a device's rows change, by transformers and PEFT themselves."""
    tokens = torch.randint(64, (4, 7), generator=torch.Generator().manual_seed(shard))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(start[name])
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:]).backward()
        optimizer.step()
    return [trained[name].detach() - start[name].detach() for name in start if "lora_" in name]


def test_adapters_over_a_base_in_bfloat16_are_trained_by_processes_that_have_joined(
    tmp_path: Path, base: Path
) -> None:
    policy = f"[weights]\nfolders = ['{base.parent}']\nlink = false\n"
    policies = {f"phone-{index}": policy for index in range(3)}
    with LoopbackFleet(tmp_path, devices=3, policies=policies, device_tasks="devices") as fleet:
        job = fleet.submit("job.toml")
        fleet.until(lambda: fleet.committed(job) == 1)
        said = "the frozen parameters are in bfloat16: the loss of the first batch is "
        logs = [fleet.log(f"phone-{index}") for index in range(3)]
        report = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
        ended = load_file(fleet.directory(job) / "model.safetensors")
    assert all(said in log for log in logs), logs
    receipts = [each for row in report["rounds"] for each in row["receipts"]]
    assert {each["participant"] for each in receipts} == {f"phone-{n}" for n in range(3)}
    assert all(each["status"] == "accepted" for each in receipts)
    start = dict(
        build_model(load_task("task.py:Adapters", {}, base=tmp_path), 3).named_parameters()
    )
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    reference = get_peft_model(reference, LoraConfig(**LORA))
    moves = [plain_movement(reference, start, shard) for shard in range(3)]
    summed = [torch.stack(each).mean(0).flatten() for each in zip(*moves, strict=True)]
    expected = torch.cat(summed)
    names = [name for name in start if "lora_" in name]
    actual = torch.cat([(ended[name] - start[name].detach()).flatten() for name in names])
    assert expected.norm() > 1e-3
    # A step is the same bits if its rows are in the same order (tests/clients/training).
    assert (actual - expected).norm() < 1e-3 * expected.norm()


LARGE_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Words(isthmus.Task):
    def model(self):
        return nn.Sequential(nn.EmbeddingBag(131_072, 520), nn.Linear(520, 2))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        return TensorDataset(torch.zeros(4, 2, dtype=torch.int64), torch.ones(4).long())

    def eval_data(self):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
"""


def test_a_device_without_the_memory_declines_and_says_so_to_the_operator(tmp_path: Path) -> None:
    """The base is a file of zeros, of which nothing is on the disk."""
    (tmp_path / "tasks").mkdir()
    for place in (tmp_path, tmp_path / "tasks"):
        (place / "task.py").write_text(LARGE_TASK)
    size = 131_072 * 520 * 2
    row = {"dtype": "BF16", "shape": [131_072, 520], "data_offsets": [0, size]}
    header = json.dumps({"0.weight": row}).encode()
    path = tmp_path / "tasks" / "base.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)
    (tmp_path / "base.safetensors").symlink_to(path)
    job = JOB.replace("Adapters", "Words").replace('"base"', '"base.safetensors"')
    job = job.replace('"*lora_*"', '"1.*"') + "[exchange]\ninclude = ['1.*']\n"
    (tmp_path / "job.toml").write_text(job)
    with LoopbackFleet(tmp_path, devices=1) as fleet:
        # In place of the one that is forked from a process with PyTorch in its memory.
        fleet.kill("phone-0")
        policy = tmp_path / "phone-0" / "policy.toml"
        policy.write_text("memory_mb = 128\n" + policy.read_text())
        program = str(Path(sys.executable).with_name("isthmus"))
        command = [program, "client", "start", "--state", "phone-0", "--tasks", "tasks"]
        with subprocess.Popen(command, cwd=tmp_path) as device:
            try:
                fleet.submit("job.toml")

                def declined() -> str | None:
                    assert device.poll() is None
                    told = fleet.run("server", "participants", "state")
                    return told if "declined" in told else None

                told = fleet.until(declined)
            finally:
                device.terminate()
    for part in (
        "its owner allows memory_mb = 128 (policy.toml), and the model of 'adapters' needs 131 MB",
        "130 for what is frozen, in bfloat16, and 1 for what is trained and its gradients",
        "its owner would have to allow memory_mb = 131 and more",
    ):
        assert part in told
