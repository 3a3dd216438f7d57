"""Devices that hold a base in int8 write no copy of it: a crash and a full disk leave nothing.

Each device is a process of its own, which opens a run over the base in the store and trains a step.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.clients.training.started_runs import opening_of

from isthmus_clients.device.weights.store import WeightStore

WIDTH = 1024
TASK = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Table(isthmus.Task):
    def model(self):
        under = [nn.Linear({WIDTH}, {WIDTH}, bias=False).requires_grad_(False) for _ in range(2)]
        return nn.Sequential(*under, nn.Linear({WIDTH}, 2))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(torch.randn(4, {WIDTH}, generator=generator), torch.arange(4) % 2)

    def eval_data(self):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
"""
JOB = """
name = "table"
[task]
source = "task.py:Table"
[model]
start = "base.safetensors"
fresh = ["2.*"]
[federated]
secure_aggregation = false
local_steps = 1
frozen_dtype = "int8"
"""
DEVICE = """
import hashlib
import os
import sys
from pathlib import Path

import torch

from isthmus.task import Participant
from isthmus.task.scoring import frozen_form
from isthmus.wire import link_pb2
from isthmus_clients.device.weights.store import WeightStore
from isthmus_clients.training.local_run import DeviceRun

store = WeightStore(Path(sys.argv[1]))
killed_at = int(sys.argv[2])
blocks = 0
quantised = frozen_form.quantised


def counted(values):
    global blocks
    blocks += 1
    if blocks == killed_at:
        os.kill(os.getpid(), 9)
    return quantised(values)


frozen_form.quantised = counted
torch.set_num_threads(1)
[model] = store.models()
places = {file.sha256: store.path(file.sha256) for file in model.manifest.files}
place = store.view(model.manifest, places, None)
work = link_pb2.OpenRun.FromString(Path("work").read_bytes())
print("opens", flush=True)
if killed_at < 0:  # begin when the other one does
    sys.stdin.readline()
run = DeviceRun(work, Participant(name="a", regime="federated"), None, start=place)
assert run.model[0].held.dtype == torch.int8
payload = run.layout.encode(torch.full((run.layout.size,), 0.01))
asked = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
run.train(asked, payload, lambda progress: None, lambda: False)
print(hashlib.sha256(payload).hexdigest(), blocks)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's request to open a run, and a store with the base of it, which nobody changes."""
    tmp_path = tmp_path_factory.mktemp("device")
    (tmp_path / "task.py").write_text(TASK)
    torch.manual_seed(5)
    tensors = {f"{index}.weight": torch.randn(WIDTH, WIDTH) for index in range(2)}
    save_file(tensors, tmp_path / "base.safetensors")
    (tmp_path / "job.toml").write_text(JOB)
    work, _, _ = opening_of(tmp_path)
    (tmp_path / "work").write_bytes(work.SerializeToString())
    store = WeightStore(tmp_path / "weights")
    manifest = store.add(tmp_path / "base.safetensors").manifest
    places = {file.sha256: store.path(file.sha256) for file in manifest.files}
    store.view(manifest, places, None)
    (tmp_path / "scratch").mkdir()
    return tmp_path


def device(folder: Path, killed_at: int = 0) -> subprocess.Popen[str]:
    """Start a device, which ends itself at a block that it quantises."""
    environment = {
        **os.environ,
        "TMPDIR": str(folder / "scratch"),
        "HOME": str(folder / "scratch"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", DEVICE, str(folder / "weights"), str(killed_at)],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def trained(folder: Path) -> str:
    """The digest of the update of a device that nothing happens to, and its blocks."""
    with device(folder) as process:
        said, _ = process.communicate()
    assert process.returncode == 0
    return said.split("\n", 1)[1].strip()


@pytest.fixture(scope="module")
def update(folder: Path) -> str:
    """What the first device has trained."""
    return trained(folder)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files, and what links lead to."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_a_device_that_is_killed_while_it_quantises_leaves_nothing(
    folder: Path, update: str
) -> None:
    before = contents(folder)
    blocks = int(update.split()[1])
    assert blocks == 2 * WIDTH * WIDTH // (1 << 18)
    with device(folder, killed_at=blocks - 1) as process:
        process.communicate()
    assert process.returncode == -9
    assert contents(folder) == before
    assert trained(folder) == update


def test_two_devices_of_a_machine_quantise_one_base_at_once(folder: Path, update: str) -> None:
    before = contents(folder)
    with device(folder, killed_at=-1) as first, device(folder, killed_at=-1) as second:
        for each in (first, second):
            assert each.stdout is not None
            assert each.stdout.readline() == "opens\n"
        for each in (first, second):
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        updates = {each.communicate()[0].strip() for each in (first, second)}
    assert updates == {update}
    assert contents(folder) == before


def test_a_full_disk_does_not_keep_a_device_from_quantising(folder: Path, update: str) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    store = folder / "weights"
    size = sum(path.stat().st_size for path in (store / "files").iterdir())
    # Room for the file and, in pages, for what is next to it; the rest is filled.
    script = f"""
set -e
cp -a {store} {folder}/copy
mount -t tmpfs -o size={size + 200_000} tmpfs {store}
cp -a {folder}/copy/. {store}/
mkdir {store}/scratch
cat /dev/zero > {store}/filled 2>/dev/null || true
! echo x >> {store}/filled 2>/dev/null
export TMPDIR={store}/scratch HOME={store}/scratch PYTHONDONTWRITEBYTECODE=1
exec {sys.executable} -c "$DEVICE" {store} 0
"""
    said = subprocess.run(
        [unshare, "-Urm", "sh", "-c", script],
        cwd=folder,
        env={**os.environ, "DEVICE": DEVICE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout.strip().endswith(update), said.stderr
