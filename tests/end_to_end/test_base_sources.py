"""One run for each kind of source that devices get a model's base from, up to a large one.

All devices of a run get the base from the same kind of source, by its digest, and train adapters
of it in secure sums, in turn and together with a datacenter of two ranks. By default that is a
small base from a store that speaks the protocol of S3; the other kinds have a run in common in
`test_weights`. `make bases` tries each kind with bases of 20 and 200 MB, and prints figures.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from tests.end_to_end.loopback_fleet import DATACENTER, LoopbackFleet
from tests.end_to_end.test_weights import flip_last_bit
from tests.static_https import static_https

from isthmus.start.safetensors_file import write_file
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus_clients.device.weights.store import WeightStore

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ALL = os.environ.get("ISTHMUS_TEST_BASES") == "all"
KINDS = ("disk", "https", "s3", "link") if ALL else ("s3",)
MEGABYTES = (20, 200) if ALL else (5,)
DEVICES = 4
WIDTH = 64
ROUNDS = 3
NAME = "model.safetensors"

TASK = f'''
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoModel, LlamaConfig

import isthmus


class Decoder(nn.Module):
    """A decoder whose vectors of tokens are nearly all of it, and which tells 64 tokens."""

    def __init__(self, tokens):
        super().__init__()
        config = LlamaConfig(
            vocab_size=tokens,
            hidden_size={WIDTH},
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.body = AutoModel.from_config(config, dtype=torch.float32)
        self.head = nn.Linear({WIDTH}, 64, bias=False)

    def forward(self, tokens):
        return self.head(self.body(input_ids=tokens, use_cache=False).last_hidden_state)


class Adapters(isthmus.Task):
    """The next of 64 tokens, by adapters of a decoder that nobody trains."""

    def model(self):
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        return get_peft_model(Decoder(self.settings["tokens"]), lora)

    def loss(self, output, target):
        return nn.functional.cross_entropy(
            output.transpose(1, 2), target, reduction="none"
        ).mean(1)

    def local_data(self, participant):
        return self.rows(participant.shard[0] if participant.shard else 50)

    def eval_data(self):
        return self.rows(99)

    def rows(self, seed):
        first = torch.randint(64, (16, 1), generator=torch.Generator().manual_seed(seed))
        tokens = (first + 3 * torch.arange(7)) % 64
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
'''
JOB = f"""
name = "adapters"
rounds = {ROUNDS}
seed = 3
[task]
source = "task.py:Adapters"
[model]
start = "base"
fresh = ["*lora_*"]
[strategy]
policy = "adaptive"
target_edge_share = 0.8
[federated]
cohort = {DEVICES}
quorum = {DEVICES}
local_epochs = 1
batch_size = 4
[datacenter]
steps = 4
[time]
join_seconds = 150
"""


def write_base(tmp_path: Path, megabytes: int) -> int:
    """The job, its task, and the server's base, in pieces; returns the bytes of the adapters."""
    tokens = megabytes * 1_000_000 // (4 * WIDTH)
    for place in (tmp_path, tmp_path / "tasks", tmp_path / "devices"):
        place.mkdir(exist_ok=True)
        (place / "task.py").write_text(TASK)
    model = build_model(load_task("task.py:Adapters", {"tokens": 64}, base=tmp_path), 3)
    adapters = get_peft_model_state_dict(model)
    rows = {}
    for name, each in model.base_model.model.state_dict().items():
        if "lora_" not in name:
            rows[name.replace(".base_layer", "")] = ("F32", tuple(each.shape))
    [vectors] = [name for name in rows if "embed_tokens" in name]
    rows[vectors] = ("F32", (tokens, WIDTH))
    generator = torch.Generator().manual_seed(5)

    def pieces(name: str) -> Iterator[bytes]:
        shape = rows[name][1]
        step = 10_000
        for start in range(0, shape[0], step):
            values = torch.randn(min(step, shape[0] - start), *shape[1:], generator=generator)
            yield (values * 0.2).numpy().tobytes()

    folder = tmp_path / "tasks" / "base"
    folder.mkdir()
    write_file(folder / NAME, rows, pieces, {})
    (tmp_path / "base").symlink_to(folder)
    (tmp_path / "job.toml").write_text(f"{JOB}[task.settings]\ntokens = {tokens}\n")
    return sum(each.numel() * each.element_size() for each in adapters.values())


@contextlib.contextmanager
def source_of(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, list[str], str]]:
    """What owners say of a kind of source, changes to the job, and how the log names it."""
    folder = tmp_path / "tasks" / "base"
    allowed = "weights_mb = 1000\n"
    if kind == "link":
        yield allowed, [], "the server: "
    elif kind == "disk":
        yield f"{allowed}[weights]\nlink = false\nsources = ['file:{folder}']\n", [], "file:"
    elif kind == "https":
        with static_https(folder, tmp_path / "keys") as served:
            monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
            address = served.address
            yield f"{allowed}[weights]\nlink = false\nsources = ['{address}']\n", [], address
    else:
        pytest.importorskip("moto", reason="moto is not installed; pip install 'moto[s3,server]'")
        pytest.importorskip("boto3", reason="boto3 is not installed; pip install boto3")
        from tests.s3_server import BUCKET, s3_server

        with s3_server(tmp_path / "keys") as s3:
            monkeypatch.setenv("SSL_CERT_FILE", str(s3.certificate))
            s3.client.upload_file(str(folder / NAME), BUCKET, f"base/{NAME}")
            asked = {"Bucket": BUCKET, "Key": f"base/{NAME}"}
            address = s3.client.generate_presigned_url("get_object", Params=asked, ExpiresIn=3600)
            host = f"https://127.0.0.1:{s3.port}"
            policy = f"{allowed}[weights]\nlink = false\njob_sources = ['{host}/{BUCKET}/*']\n"
            # Devices have no keys of the store: the address is signed.
            yield policy, [f"model.sources=['{address}']"], f"{host}/{BUCKET}/base/{NAME}"


def memory(pid: int, field: str) -> int:
    """A size of a process in /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(field)


def check_receipts(report: dict[str, Any], adapters: int, base: int) -> int:
    """Check who took part, and that nothing as large as the base was sent; the most bytes sent."""
    receipts = [each for row in report["rounds"] for each in row["receipts"]]
    phones = {f"phone-{n}" for n in range(DEVICES)}
    assert {each["participant"] for each in receipts} == {*phones, DATACENTER}
    assert {each["regime"] for each in receipts} == {"datacenter", "federated"}
    assert all(each["status"] == "accepted" for each in receipts)
    assert report["job"]["federated"]["secure_aggregation"]
    most = max(
        max(each["bytes_in"] + each["messages_in"], each["bytes_out"] + each["messages_out"])
        for each in receipts
    )
    # A model and two sums of adapters, and the messages of secure sums.
    assert adapters < most < 4 * adapters + 30_000 < base / 50
    return most


@pytest.mark.parametrize("megabytes", MEGABYTES)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_over_a_base_that_all_devices_get_from_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, megabytes: int
) -> None:
    adapters = write_base(tmp_path, megabytes)
    base = (tmp_path / "base" / NAME).stat().st_size
    with source_of(kind, tmp_path, monkeypatch) as (policy, changes, named):
        policies = {f"phone-{index}": policy for index in range(DEVICES)}
        with LoopbackFleet(tmp_path, DEVICES, policies, device_tasks="devices") as fleet:
            fleet.start_datacenter(ranks=2)
            # One has the base from before, and its disk has changed a bit of it.
            damaged = WeightStore(tmp_path / "phone-0" / "weights")
            [file] = damaged.add(tmp_path / "base").manifest.files
            flip_last_bit(damaged.path(file.sha256))
            job = fleet.submit("job.toml", *changes)
            fleet.until(lambda: fleet.committed(job) >= 1)
            server = fleet.pid("server")
            Path(f"/proc/{server}/clear_refs").write_text("5")  # the peak begins anew: proc(5)
            resident = memory(server, "VmRSS")
            fleet.until(lambda: fleet.committed(job) == ROUNDS)
            grown = memory(server, "VmHWM") - resident
            logs = [fleet.log(f"phone-{index}") for index in range(DEVICES)]
            report = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
    for index, text in enumerate(logs):
        [line] = [line for line in text.splitlines() if f"{NAME}, {base} bytes" in line]
        assert named in line
        assert "Signature" not in text
        assert WeightStore(tmp_path / f"phone-{index}" / "weights").used_bytes == base
    assert ["is damaged" in text for text in logs] == [True, False, False, False]
    most = check_receipts(report, adapters, base)
    # No copy of the base is made for a round.
    assert grown < 20_000_000
    losses = [row["metrics"]["loss"] for row in report["rounds"]]
    assert losses[-1] < losses[0]
    print(
        f"{kind}, {base / 1e6:.1f} MB: at most {most / 1e3:.1f} kB of a participant in a round, "
        f"of which adapters have {adapters / 1e3:.1f}; rounds add {grown / 1e6:.1f} MB to the "
        f"server's {resident / 1e6:.0f} MB; loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
