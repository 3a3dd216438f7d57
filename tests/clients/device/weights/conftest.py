"""A model of several files, the job that starts from it, and a device's keeper of models."""

import pytest
import torch
from safetensors.torch import save_file
from tests.static_https import static_https

from isthmus.job import load_job, write_job
from isthmus.start.files import StartFiles
from isthmus.start.manifest import StartManifest
from isthmus.transport.requests import listed_messages
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import LimitsGuard, parse
from isthmus_clients.device.weights.keeper import WeightKeeper
from isthmus_clients.device.weights.store import WeightStore

JOB = """
name = "table"
[task]
source = "task.py:Learn"
[model]
start = "base"
"""


@pytest.fixture
def model(tmp_path):
    """A folder with a model of 800 kB."""
    folder = tmp_path / "server" / "base"
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    save_file({"weight": torch.randn(200_000)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "table"}')
    return folder


@pytest.fixture
def job(model):
    """The job that starts from the model."""
    (model.parent / "job.toml").write_text(JOB)
    return load_job(model.parent / "job.toml")


@pytest.fixture
def manifest(model):
    """The model's files."""
    return StartManifest.of(StartFiles.find_all(model))


@pytest.fixture
def mirror(model, tmp_path, monkeypatch):
    """A web server with the model."""
    with static_https(model, tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


@pytest.fixture
def device(tmp_path, manifest):
    """A device with an owner's limits; `get` has it prepare for a job."""

    class Device:
        def __init__(self):
            self.store = WeightStore(tmp_path / "state" / "weights")
            self.tasks = tmp_path / "tasks"
            self.tasks.mkdir(exist_ok=True)
            self.reports = []

        def keeper(self, limits="weights_mb = 100\n", **options):
            (tmp_path / "state").mkdir(exist_ok=True)
            guard = LimitsGuard(parse(limits, "policy.toml"), tmp_path / "state" / "usage.json")
            options = {"look_seconds": 0.01, **options}
            self.kept = WeightKeeper(self.store, guard, self.tasks, **options)
            return self.kept

        async def get(
            self, job, limits="weights_mb = 100\n", *, listed=manifest, pull=None, **more
        ):
            keeper = self.keeper(limits, **more)
            if pull is not None:
                keeper.connect(pull)
            files = listed_messages(listed)
            work = link_pb2.Prepare(run_id="run", job=write_job(job), files=files)
            await keeper.prepare("1", work, lambda report: self.reports.append(report.fetched))
            return keeper.place(job)

    return Device()


@pytest.fixture
def pull(model):
    """A link to a server that has the model; what is asked for is noted."""
    asked = []

    async def pull(sha256, offset, length):
        asked.append((offset, length))
        data = (model / "model.safetensors").read_bytes()
        return bytearray(data[offset : offset + length])

    pull.asked = asked
    return pull
