"""Devices get the base of a model each from elsewhere, and train adapters of it in secure sums.

The base is in none of the packages and rounds: in the store of one device, in the folder of another
one's owner, on a web server, and on the link, where the download is killed on the way. In the store
of one that may fetch nothing a bit has changed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.end_to_end.loopback_fleet import LoopbackFleet
from tests.static_https import StaticHttps, static_https

from isthmus_clients.device.weights.store import WeightStore

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Words(isthmus.Task):
    """Three classes of words, by their vectors in a base that nobody trains."""

    def model(self):
        return nn.Sequential(nn.EmbeddingBag(300_000, 8), nn.Linear(8, 3))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        return self.rows(participant.shard[0] if participant.shard else 50)

    def eval_data(self):
        return self.rows(99)

    def rows(self, seed):
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(300_000, (48, 4), generator=generator)
        return TensorDataset(words, words.sum(1) % 3)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.1)
'''

JOB = """
name = "words"
rounds = 2
seed = 3
[task]
source = "task.py:Words"
[model]
start = "base"
fresh = ["1.*"]
[exchange]
include = ["1.*"]
[strategy]
policy = "adaptive"
target_edge_share = 0.8
[federated]
cohort = 4
quorum = 4
local_epochs = 1
[datacenter]
steps = 2
[time]
join_seconds = 150
"""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaticHttps]:
    """The folder of a server with the job, and a web server with its base."""
    base = tmp_path / "tasks" / "base"
    base.mkdir(parents=True)
    torch.manual_seed(5)
    save_file({"0.weight": torch.randn(300_000, 8)}, base / "model.safetensors")
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "job.toml").write_text(JOB)
    for folder in (tmp_path, tmp_path / "tasks", tmp_path / "devices"):
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(TASK)
    with static_https(base, tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


def percents(log: str) -> list[int]:
    """How far a device says that its download is."""
    lines = [line for line in log.splitlines() if "downloading the model of words, " in line]
    return [int(line.rpartition(", ")[2].split()[0]) for line in lines]


def flip_last_bit(path: Path) -> None:
    """Change a file as a disk may, its size and permissions aside."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    path.chmod(mode)


def test_a_base_comes_from_each_kind_of_source(tmp_path: Path, served: StaticHttps) -> None:
    folder = tmp_path / "models"
    shutil.copytree(tmp_path / "tasks" / "base", folder / "somewhere")
    policies = {
        "phone-1": f"[weights]\nfolders = ['{folder}']\nlink = false\n",
        "phone-2": f"weights_mb = 20\n[weights]\nsources = ['{served.address}']\nlink = false\n",
        "phone-3": "weights_mb = 20\n[weights]\nkb_per_second = 1500\n",
    }
    with LoopbackFleet(tmp_path, devices=5, policies=policies, device_tasks="devices") as fleet:
        fleet.start_datacenter(ranks=2)
        store = WeightStore(tmp_path / "phone-0" / "weights")
        base = store.add(tmp_path / "tasks" / "base").manifest
        damaged = WeightStore(tmp_path / "phone-4" / "weights")
        damaged.add(tmp_path / "tasks" / "base")
        flip_last_bit(damaged.path(base.files[0].sha256))
        job = fleet.submit("job.toml")
        partial = tmp_path / "phone-3" / "weights" / "partial" / base.files[0].sha256
        fleet.until(lambda: partial.exists() and partial.stat().st_size > base.size // 4)
        fleet.until(
            lambda: "downloading the model, " in fleet.run("server", "participants", "state")
        )
        fleet.kill("phone-3")
        had = 100 * partial.stat().st_size // base.size
        before = len(percents(fleet.log("phone-3")))
        fleet.start_device(3)
        fleet.until(lambda: fleet.committed(job) == 2)
        assert percents(fleet.log("phone-3"))[before] >= had > 20
        assert "the server: model.safetensors" in fleet.log("phone-3")
        assert ("/model.safetensors", None) in served.asked
        assert WeightStore(tmp_path / "phone-1" / "weights").used_bytes == 0
        # The one whose owner has not allowed anything says so, and the others go on without it.
        told = fleet.run("server", "participants", "state")
        assert "phone-4 declined words" in told
        assert "model.safetensors was damaged in its store; its owner lets" in told
        assert "is damaged: its bytes have changed since they were verified" in fleet.log("phone-4")
        assert "its owner lets it fetch no models (weights_mb in policy.toml)" in told
        report = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
        receipts = [each for row in report["rounds"] for each in row["receipts"]]
        assert {each["participant"] for each in receipts} >= {f"phone-{n}" for n in range(4)}
        assert all(each["status"] == "accepted" for each in receipts)
        assert report["job"]["federated"]["secure_aggregation"]
        # Both lands train, and no byte of the base, which has 9.6 MB, is in a round.
        assert "cluster" in {each["participant"] for each in receipts}
        assert max(each["bytes_out"] + each["messages_out"] for each in receipts) < 100_000
        assert max(each["bytes_in"] + each["messages_in"] for each in receipts) < 100_000
        assert report["final"]["model_sha256"]
