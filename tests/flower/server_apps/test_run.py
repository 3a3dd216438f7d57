"""Jobs that a ServerApp directs: its process, the devices it reaches, and how the run ends."""

import asyncio
import io
import os

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.server.waiting import wait_until

from isthmus.errors import CannotContinue, TaskError
from isthmus.job import parse_job
from isthmus.job.commands import check
from isthmus_flower.server_apps import process
from isthmus_flower.server_apps.run import ServerAppRun
from isthmus_server.read.report.report import read_report, show
from isthmus_server.rounds.run_loop import run_loop
from isthmus_server.storage.events import EventStream, ParticipantProgress, RunFinished
from isthmus_server.storage.store import Store

JOB = """
name = "project"
seed = 5
[federated]
clients = 3
cohort = 3
secure_aggregation = false
[federated.flower]
app = "project/client_app.py:app"
server_app = "project.server_app:app"
config = { rounds = 2 }
"""
CLIENT_APP = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from project.shared import NAMES

app = ClientApp()


@app.train()
def train(message, context):
    (values,) = message.content["arrays"].to_numpy_ndarrays()
    shift = 1 + NAMES.index(context.node_config["name"])
    records = {"arrays": ArrayRecord([values + shift]), "metrics": metrics(context, shift)}
    return Message(RecordDict(records), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    (values,) = message.content["arrays"].to_numpy_ndarrays()
    return Message(RecordDict({"metrics": metrics(context, values.sum())}), reply_to=message)


@app.query("names")
def query(message, context):
    if context.node_config["name"] == "b":
        raise RuntimeError("out of memory")
    return Message(RecordDict({"metrics": metrics(context, 1)}), reply_to=message)


def metrics(context, value):
    turn = context.state.setdefault("turn", MetricRecord({"of": 0}))
    turn["of"] += 1
    return MetricRecord({"num-examples": 2, "value": float(value), "turn": turn["of"]})
"""
SERVER_APP = """
import os
import random
import time

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from project.shared import NAMES

app = ServerApp()


@app.main()
def main(grid, context):
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
    assert len(NAMES) == 3
    strategy = FedAvg(fraction_evaluate=1.0)
    arrays = ArrayRecord([np.zeros(2)])
    result = strategy.start(grid, arrays, num_rounds=context.run_config["rounds"], timeout=60)
    evaluated = {round_: dict(each) for round_, each in result.evaluate_metrics_clientapp.items()}
    print("evaluated", evaluated)
    with open("model.txt", "w") as file:
        file.write(f"{result.arrays.to_numpy_ndarrays()[0].tolist()} {random.random()}")

    def ask(kind, node):
        return Message(RecordDict(), node, kind)

    nodes = list(grid.get_node_ids())
    ids = list(grid.push_messages([ask("query.names", node) for node in nodes]))
    replies = {}
    while len(replies) < len(ids):
        for reply in grid.pull_messages(ids):
            replies[reply.metadata.reply_to_message_id] = reply
        time.sleep(0.01)  # a grid of Flower can only be polled
    print("answered", sorted(not reply.has_error() for reply in replies.values()))
    (unknown, lost) = grid.send_and_receive([ask("query.ages", nodes[0]), ask("train", 99)])
    print(unknown.error.reason)
    print(lost.error.reason)
"""
WAITS = """
import os
import pathlib

from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    if pathlib.Path("begun").exists():
        raise RuntimeError("no model")
    pathlib.Path("begun").touch()
    print("process", os.getpid())
    while True:
        list(grid.get_node_ids())
"""


@pytest.fixture
def project(deployment, tmp_path):
    """Write a project with a ServerApp and start its devices; create runs of its job."""
    stores = []

    async def start(server_app=SERVER_APP, *overrides):
        folder = tmp_path / "project"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "shared.py").write_text('NAMES = ["a", "b", "c"]\n')
        (folder / "client_app.py").write_text(CLIENT_APP)
        (folder / "server_app.py").write_text(server_app)
        await deployment.start()
        stores.append(Store.create(tmp_path / "run", parse_job(JOB, overrides), tmp_path))
        events, lines = EventStream(), []
        events.subscribe(
            lambda event: lines.append(event.note) if isinstance(event, ParticipantProgress) else 0
        )
        events.subscribe(
            lambda event: lines.append(event.reason) if isinstance(event, RunFinished) else 0
        )
        return run_loop(stores[-1], deployment.link, events, installed=False), lines

    yield start
    for store in stores:
        store.close()


async def test_a_server_app_reaches_devices_until_it_returns(project, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    run, lines = await project()
    assert isinstance(run, ServerAppRun)
    assert await run.run() is None
    at_end = lines[-5:]
    assert at_end == [
        # Each round adds 1, 2 or 3 to both values on devices of equal weight.
        "evaluated {1: {'value': 4.0, 'turn': 2.0}, 2: {'value': 8.0, 'turn': 4.0}}",
        "answered [False, True, True]",
        "the app has no function under @app.query(\"ages\") for 'query.ages' messages; it has "
        "functions for evaluate, query.names, train",
        "there is no node 99",
        f"the ServerApp returned; its files are in {tmp_path / 'run' / 'server_app'}",
    ]
    written = (tmp_path / "run" / "server_app" / "model.txt").read_text()
    assert written == "[4.0, 4.0] " + written.split()[-1]
    assert at_end[1] in (tmp_path / "run" / "logs" / "server-app.log").read_text().splitlines()
    report = read_report(run.store)
    assert (report.status, report.reason, report.final) == ("finished", lines[-1], None)
    show(report, Console(file=io.StringIO()))  # also of a run without a final model
    (tmp_path / "project" / "server_app.py").unlink()
    assert await run_loop(run.store, None, EventStream(), installed=False).run() is None


async def test_a_stopped_run_ends_its_process_and_begins_again(project, tmp_path, deployment):
    run, lines = await project(WAITS)
    running = asyncio.create_task(run.run())
    await wait_until(lambda: lines and lines[-1].startswith("process "))
    run.drain.request()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines[-1].split()[-1]), 0)
    assert run.store.status()[0] == "running"

    again = run_loop(run.store, deployment.link, run.events, installed=False)
    path = tmp_path / "project" / "server_app.py"
    says = f"the ServerApp failed at {path}:13: RuntimeError: no model"
    with pytest.raises(TaskError) as failed:
        await again.run()
    assert str(failed.value) == says
    assert run.store.status()[:2] == ("failed", says)
    assert "Traceback" in (tmp_path / "run" / "logs" / "server-app.log").read_text()


async def test_a_process_that_is_killed_is_no_mistake_of_the_user(project, monkeypatch):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(process, "PROGRAM", ("-c", code))
    run, _ = await project()
    with pytest.raises(CannotContinue, match=r"ended: signal 9 \(SIGKILL\); see .*app\.log"):
        await run.run()


async def test_a_job_is_checked_with_its_apps(project, tmp_path):
    await project()
    (tmp_path / "job.toml").write_text(JOB)
    checked = CliRunner().invoke(check, [str(tmp_path / "job.toml")])
    assert checked.output == (
        f"{tmp_path / 'job.toml'} is fine: the ServerApp project.server_app:app and 3 clients with "
        "the ClientApp project/client_app.py:app\n"
        "level   nothing claimed: the server receives what each device sends "
        "(federated.secure_aggregation = false)\n"
        'owners  need in policy.toml: secure_aggregation = false, weights = "exact"\n'
    )
    (tmp_path / "project" / "other.py").write_text(
        "from flwr.serverapp import ServerApp\napp = ServerApp(server_fn=lambda context: None)\n"
    )
    for source, says in (
        ("project/other.py:app", "has no function under @app.main(): one made from a server_fn"),
        ("project.client_app:app", "is of type ClientApp, not a flwr.serverapp.ServerApp"),
        ("project/none.py:app", f"there is no file {tmp_path / 'project' / 'none.py'}"),
    ):
        options = [str(tmp_path / "job.toml"), "--set", f"federated.flower.server_app={source}"]
        refused = CliRunner().invoke(check, options)
        assert isinstance(refused.exception, TaskError)
        assert f"federated.flower.server_app={source!r}" in str(refused.exception)
        assert says in str(refused.exception)
