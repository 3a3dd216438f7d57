"""Jobs whose devices train with a Flower ClientApp: rounds, crashes, and failing apps."""

import re
import sys

import pytest

from isthmus.errors import TaskError, UserError
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_flower.device.client_app import FlowerRun
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted

TORCH_APP = """
import sys
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    name = context.node_config["name"]
    if name in str(context.run_config.get("fails", "")):
        raise RuntimeError("out of memory")
    if name in str(context.run_config.get("ends", "")):
        sys.exit("no camera")
    draw = torch.Generator().manual_seed(sum(name.encode()))
    inputs = torch.randn(20, 4, generator=draw)
    target = inputs.argmax(1).clamp(max=2)
    lr = message.content["config"].get("lr", 0.5)
    assert lr == context.run_config.get("lr", 0.5)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(inputs), target)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= lr * parameter.grad
    if name in str(context.run_config.get("spoils", "")):
        model.bias.data[0] = float("nan")
    metrics = MetricRecord({"num-examples": 20, "loss": float(loss.detach())})
    if name in str(context.run_config.get("renames", "")):
        metrics["mine"] = metrics.pop("loss")
    if name in str(context.run_config.get("boasts", "")):
        metrics["num-examples"] = 1e30
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""
JOB = ("federated.secure_aggregation=false", 'federated.flower.app="app.py:app"')


async def test_an_app_trains_the_model_under_a_strategy(deployment, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)
    await deployment.start()
    adam = 'federated.flower.strategy={name="FedAdam", options={eta=0.1}}'
    report, final = await deployment.run("run", *JOB, adam, "rounds=5")
    losses = [row["metrics"]["loss"] for row in report["rounds"]]
    assert losses == sorted(losses, reverse=True)
    assert final.metrics["accuracy"] > 0.5
    (row, *_) = report["rounds"]
    assert row["training"]["federated"].keys() == {"loss"}
    assert row["participants"]["accepted"] == 3
    for receipt in row["receipts"]:
        assert receipt["examples"] == 20
        assert receipt["bytes_in"] > 60
        assert receipt["bytes_out"] > 60
    assert row["cost"]["device_bytes"] > 360


async def test_a_strategy_that_matches_arrays_by_position_works(deployment, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)  # its state_dict begins with the weight
    await deployment.start()
    private = (
        'federated.flower.strategy={name="DifferentialPrivacyServerSideFixedClipping", '
        'options={noise_multiplier=0.01, clipping_norm=5.0}, inner={name="FedAvg"}}'
    )
    _, final = await deployment.run("run", *JOB, private, "federated.flower.config={lr=0.4}")
    assert final.metrics["accuracy"] > 0.5


async def test_a_resumed_run_ends_with_the_same_model(deployment, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)
    await deployment.start()
    adam = 'federated.flower.strategy={name="FedAdam"}'
    whole, _ = await deployment.run("whole", *JOB, adam)
    store = deployment.create_run("killed", *JOB, adam)

    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 2
    )
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert read_report(again).to_json()["final"]["model_sha256"] == whole["final"]["model_sha256"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('fails="b"', "the app failed at {app}:16: RuntimeError: out of memory"),
        ('ends="b"', "the app failed at {app}:18: SystemExit: no camera"),
        ('spoils="b"', "the array 'bias' is not finite"),
        ('renames="b"', "its records or metrics have other names than most devices'"),
        (
            'boasts="b"',
            "its num-examples=1e+30 is not a number from 0 to "
            "federated.flower.max_examples=1000000",
        ),
    ],
)
async def test_a_failing_app_loses_only_its_own_update(config, reason, deployment, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)
    await deployment.start()
    report, _ = await deployment.run(
        "run", *JOB, "federated.quorum=2", "rounds=1", f"federated.flower.config={{{config}}}"
    )
    (row,) = report["rounds"]
    (rejected,) = (receipt for receipt in row["receipts"] if receipt["status"] != "accepted")
    assert (rejected["participant"], rejected["status"]) == ("b", "rejected")
    assert rejected["reason"] == reason.format(app=tmp_path / "app.py")


async def test_too_few_replies_are_one_sentence(deployment, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)
    await deployment.start()
    store = deployment.create_run(
        "run", *JOB, "attempts=1", 'federated.flower.config={fails="abc"}'
    )
    with pytest.raises(UserError) as failed:
        await Coordinator(RunParts.of(store, deployment.link)).run()
    assert re.fullmatch(
        r"round 1 failed 1 times; the last time because: 0 of 3 answers were accepted and the "
        r"quorum is 3 \(.: the app failed at .*: RuntimeError: out of memory.*\)",
        str(failed.value),
    )


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("app = 3", "federated.flower.app='app.py:app' is of type int, not a flwr.clientapp."),
        ("", "federated.flower.app='app.py:app': app.py has no 'app'"),
        ("import nothing_like_it", "import of app.py failed at .*ModuleNotFoundError"),
    ],
)
async def test_a_device_declines_an_app_that_cannot_be_loaded(code, says, deployment, tmp_path):
    (tmp_path / "app.py").write_text(code + "\n")
    await deployment.start(names=("a",))
    store = deployment.create_run("run", *JOB, "time.join_seconds=300", "federated.clients=1")
    with pytest.raises(UserError, match=f"a declined: {says}"):
        await Coordinator(RunParts.of(store, deployment.link)).run()


async def test_a_device_without_flower_declines_with_installation_advice(
    deployment, tmp_path, monkeypatch
):
    (tmp_path / "app.py").write_text(TORCH_APP)
    await deployment.start(names=("a",))
    store = deployment.create_run("run", *JOB, "time.join_seconds=300", "federated.clients=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for module in (
        "isthmus_flower.messages",
        "isthmus_flower.records",
        "isthmus_flower.device.client_app",
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(
        UserError, match=r"a declined: this job uses Flower, .*pip install .*\[flower\]'"
    ):
        await coordinator.run()


def test_a_device_loads_only_apps_that_its_owner_installed(make_job, tmp_path):
    (tmp_path / "app.py").write_text(TORCH_APP)
    job = make_job('federated.flower.app="app.py:app"')
    opening = link_pb2.OpenRun(run_id="run", job=job.model_dump_json(), base=str(tmp_path))
    participant = Participant(name="a", regime="federated")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    with pytest.raises(TaskError, match=r"^federated.flower.app='app.py:app' is not a file in .*"):
        FlowerRun(opening, participant, None, tasks)
    (tasks / "app.py").write_text(TORCH_APP)
    assert FlowerRun(opening, participant, None, tasks).app is not None
