"""Runs that start from files, against the same runs of a task whose `model()` has these values."""

import hashlib
import io
import json
import shutil
from textwrap import dedent

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.server.deployment import Killed
from torch import nn

from isthmus.errors import JobError
from isthmus.job import load_job
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.export.model_card import model_card
from isthmus_server.read.report.report import read_report, show
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.recovery import Finding, verify
from isthmus_server.storage.store import Store

JOB = """
name = "table"
rounds = 3
[task]
source = "task.py:Learn"
[model]
start = "weights"
[strategy]
policy = "federated"
[federated]
clients = 3
cohort = 3
quorum = 3
"""
OTHER_VALUES = """
    def model(self):
        torch.manual_seed(9)
        return nn.Linear(4, 3)
    """


@pytest.fixture
async def started(deployment, tmp_path):
    """Devices, and a function that creates runs which start from a file."""
    await deployment.start()
    (tmp_path / "weights").mkdir()
    torch.manual_seed(9)
    save_file(nn.Linear(4, 3).state_dict(), tmp_path / "weights/model.safetensors")
    (tmp_path / "job.toml").write_text(JOB)

    def create(name, *overrides):
        job = load_job(tmp_path / "job.toml", overrides)
        return Store.create(tmp_path / name, job, tmp_path)

    return create


async def run(deployment, store):
    return await Coordinator(RunParts.of(store, deployment.link)).run()


@pytest.mark.parametrize("exchange", ["exchange={}", "exchange.exclude=['bias']"])
async def test_the_model_is_that_of_a_task_with_these_values(
    deployment, started, write_task, tmp_path, exchange
):
    store = started("start", exchange)
    final = await run(deployment, store)
    write_task(OTHER_VALUES)
    plain = started("plain", exchange, "model={}")
    assert (await run(deployment, plain)).model_sha256 == final.model_sha256
    loaded = load_model(store.directory).state_dict()
    torch.testing.assert_close(loaded, load_model(plain.directory).state_dict(), rtol=0, atol=0)
    stored = load_file(tmp_path / "weights/model.safetensors")
    assert torch.equal(loaded["bias"], stored["bias"]) == ("exclude" in exchange)


async def test_without_a_start_the_seed_decides(deployment, started):
    final = await run(deployment, started("seeded", "model={}"))
    assert final.model_sha256 != (await run(deployment, started("start"))).model_sha256


async def test_a_run_starts_from_the_model_of_another_run(deployment, started, tmp_path):
    first = await run(deployment, started("first", "rounds=1"))
    second = started("second", "model.start=first", "rounds=1")
    assert second.job.model.sha256 == first.model_sha256
    parts = RunParts.of(second, deployment.link)
    assert parts.model.sha256 == first.model_sha256
    parts.budgets.close()
    with pytest.raises(JobError, match="has no final model yet; `isthmus report"):
        load_job(tmp_path / "job.toml", ["model.start=second"])


async def test_a_killed_run_continues_from_the_start(deployment, started):
    expected = await run(deployment, started("whole"))
    store = started("killed")
    commit = store.commit

    def die_at_commit(record, state):
        raise Killed

    store.commit = die_at_commit
    with pytest.raises(Killed):
        await run(deployment, store)
    store.commit = commit
    assert (await run(deployment, deployment.reopen(store))).model_sha256 == expected.model_sha256


async def test_files_that_changed_since_the_job_was_made_train_nothing(
    deployment, started, tmp_path
):
    store = started("changed")
    path = tmp_path / "weights/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    sentence = (
        f"^model.start: {tmp_path}/weights has the digest {hashlib.sha256(data).hexdigest()} here, "
        f"and the job is for {store.job.model.sha256}; the files have changed or are others"
    )
    with pytest.raises(JobError, match=sentence):
        RunParts.of(store, deployment.link)
    path.write_bytes(data[:-1])
    with pytest.raises(JobError, match=r"and is shorter than its header says \(\d+ bytes\); copy"):
        RunParts.of(store, deployment.link)
    path.unlink()
    with pytest.raises(JobError, match=r"has no weights: neither model.safetensors nor"):
        RunParts.of(store, deployment.link)
    assert list(store.attempts()) == []


async def test_the_task_names_the_tensors_and_reads_the_configuration(
    deployment, started, write_task, tmp_path
):
    stored = load_file(tmp_path / "weights/model.safetensors")
    save_file(
        {"kernel": stored["weight"], "offset": stored["bias"]},
        tmp_path / "weights/model.safetensors",
    )
    (tmp_path / "weights/config.json").write_text(json.dumps({"outputs": 3}))
    write_task(
        dedent("""
        def model(self):
            return nn.Linear(4, self.start_config["outputs"])

        def start_names(self, names):
            assert sorted(names) == ["bias", "weight"]
            return {"weight": "kernel", "bias": "offset"}
        """)
    )
    parts = RunParts.of(started("named"), deployment.link)
    assert parts.model.module.weight.equal(stored["weight"])
    parts.budgets.close()


async def test_report_model_card_and_verify_name_the_start(deployment, started, tmp_path):
    store = started("named", "rounds=1")
    await run(deployment, store)
    digest = store.job.model.sha256
    report = read_report(store)
    assert report.to_json()["job"]["model"]["sha256"] == digest
    console = Console(file=io.StringIO(), width=200)
    show(report, console)
    assert f"it started from weights\n  sha256 {digest}" in console.file.getvalue()
    card = model_card(report, store.job, report.final, "model.safetensors", "0" * 64)
    assert f"| started from | `weights` |\n| SHA-256 of the start | `{digest}` |" in card

    def findings():
        return [each for each in verify(store.directory) if "model.start" in each.checked]

    path = tmp_path / "weights/model.safetensors"
    assert findings() == [Finding(f"model.start: {tmp_path}/weights")]
    save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, path)
    (finding,) = findings()
    assert f"has the digest {hashlib.sha256(path.read_bytes()).hexdigest()}, and the run began" in (
        finding.damage
    )
    shutil.rmtree(tmp_path / "weights")
    (finding,) = findings()
    assert finding.checked.startswith("model.start: not checked, as ")
    assert not finding.damage
