"""A Flower app in a task's process: the same answers, errors and state as in the agent's."""

import pytest

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits
from isthmus_clients.device.sandbox.process_host import ProcessHost
from isthmus_clients.device.task_host import InProcessHost
from isthmus_flower.messages import (
    ConfigRecord,
    ErrorCode,
    MetricRecord,
    RecordDict,
    node_of,
)
from isthmus_flower.records import decode, encode

APP = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from project.sizes import UNIT

app = ClientApp()


@app.query()
def query(message, context):
    count = context.state.setdefault("count", MetricRecord({"of": 0}))
    count["of"] += 1
    if message.content["config"]["fails"]:
        import socket

        socket.socket()
        raise RuntimeError("it was permitted" if context.node_config["data"] else "")
    size = UNIT * message.content["config"]["size"]
    records = {"count": count, "name": MetricRecord({"values": [1.5] * size})}
    return Message(RecordDict(records), reply_to=message)
"""
WHO = Participant(name="a", regime="federated")


@pytest.fixture
def hosts(tmp_path, make_job):
    """The same app in both hosts."""
    state, tasks, data = (tmp_path / name for name in ("state", "tasks", "data"))
    for folder in (state, tasks, data):
        folder.mkdir()
    folder = tasks / "installed" / "project"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "sizes.py").write_text("UNIT = 1000\n")
    (folder / "app.py").write_text(APP)
    source = "installed/project/app.py:app"
    job = make_job(f'federated.flower.app="{source}"', "federated.flower.max_bytes=20000")
    work = link_pb2.OpenRun(run_id="run", job=job.model_dump_json(), base="/nowhere")
    made = [
        ProcessHost(WHO, data, tasks, 1, state=state, limits=OwnerLimits()),
        InProcessHost(WHO, data, tasks, 1),
    ]
    assert [host.open(work) for host in made] == [0, 0]
    yield made
    process = made[0].process
    made[0].close()
    process.wait()


def ask(host, **config):
    records = encode(RecordDict({"config": ConfigRecord({"fails": False, "size": 1, **config})}))
    work = link_pb2.AppMessage(run_id="run", id="1", kind="query", node=node_of("a"))
    reply, answered = host.answer("1", work, memoryview(records))
    reply.seconds = 0.0
    return reply, None if answered is None else decode(answered)


def test_an_app_answers_in_its_own_process_as_in_the_agents(hosts):
    sandboxed = hosts[0]
    for number in (1, 2):  # its state is kept
        answers = [ask(host) for host in hosts]
        assert answers[0] == answers[1]
        assert answers[0][1]["count"] == MetricRecord({"of": number})
    reply, records = ask(sandboxed, fails=True)
    assert records is None
    assert reply.error_code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert reply.error.endswith("PermissionError: [Errno 1] Operation not permitted")
    with pytest.raises(TaskError, match=r"which exceeds federated\.flower\.max_bytes=20000"):
        ask(sandboxed, size=20)
