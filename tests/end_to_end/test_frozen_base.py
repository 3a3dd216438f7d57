"""Devices train adapters in secure sums over a base that each holds in bfloat16, of its owner's.

All are real processes, which have joined and speak mutual TLS.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.end_to_end.loopback_fleet import LoopbackFleet
from transformers import AutoModelForCausalLM, LlamaConfig

import isthmus
from isthmus.task import load_task
from isthmus.task.scoring import build_model

SIZES = {
    "vocab_size": 131_072,
    "hidden_size": 512,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
"""128 MB in bfloat16, of which nearly all is the matrix of tokens."""
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
        tokens = torch.randint(131_072, (4, 7), generator=torch.Generator().manual_seed(seed))
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
cohort = 2
quorum = 2
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
    tokens = torch.randint(131_072, (4, 7), generator=torch.Generator().manual_seed(shard))
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
    policies = {
        f"phone-{index}": f"{memory}[weights]\nfolders = ['{base.parent}']\nlink = false\n"
        for index, memory in enumerate(("", "", "memory_mb = 128\n"))
    }
    with LoopbackFleet(tmp_path, devices=3, policies=policies, device_tasks="devices") as fleet:
        job = fleet.submit("job.toml")
        fleet.until(lambda: fleet.committed(job) == 1)
        told = fleet.run("server", "participants", "state")
        assert "phone-2 declined adapters: its owner allows memory_mb = 128 (policy.toml)" in told
        assert "needs 129 MB here: 129 for what is frozen, in bfloat16, and 1 for what is" in told
        said = "the frozen parameters are in bfloat16: the loss of the first batch is "
        assert all(said in fleet.log(f"phone-{index}") for index in range(2))
        report = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
        trained = isthmus.load_model(fleet.directory(job))
    receipts = [each for row in report["rounds"] for each in row["receipts"]]
    assert {(each["participant"], each["status"]) for each in receipts} == {
        ("phone-0", "accepted"),
        ("phone-1", "accepted"),
    }
    start = dict(
        build_model(load_task("task.py:Adapters", {}, base=tmp_path), 3).named_parameters()
    )
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    reference = get_peft_model(reference, LoraConfig(**LORA))
    moves = [plain_movement(reference, start, shard) for shard in range(2)]
    ended = dict(trained.named_parameters())
    expected = torch.cat([(one + two).flatten() / 2 for one, two in zip(*moves, strict=True)])
    actual = torch.cat([(ended[n] - start[n]).detach().flatten() for n in start if "lora_" in n])
    assert expected.norm() > 1e-3
    # The devices go through their rows in another order, of which sums in bfloat16 are rounded.
    assert (actual - expected).norm() < 0.02 * expected.norm()
