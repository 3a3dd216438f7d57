"""A ServerApp on a server: installed there, with the app that the owners of devices installed."""

import pytest

from isthmus.errors import AdmissionRefused
from isthmus.job import parse_job
from isthmus.wire import operator_pb2 as pb

JOB = """
name = "project"
[federated]
cohort = 3
secure_aggregation = false
[federated.flower]
app = "project/pkg/client_app.py:app"
server_app = "project/pkg/server_app.py:app"
"""
CLIENT_APP = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pkg.shared import ANSWER

app = ClientApp()


@app.query()
def query(message, context):
    return Message(RecordDict({"answer": MetricRecord({"of": ANSWER})}), reply_to=message)
"""
SERVER_APP = """
import pathlib

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from pkg.shared import ANSWER

app = ServerApp()


@app.main()
def main(grid, context):
    messages = [
        Message(RecordDict(), node, MessageType.QUERY) for node in grid.get_node_ids()
    ]
    answers = [reply.content["answer"]["of"] for reply in grid.send_and_receive(messages)]
    assert answers == [ANSWER] * 3
    pathlib.Path("answers").write_text(str(answers))
"""


async def test_a_server_runs_an_installed_server_app(operated):
    folder = operated.state / "tasks" / "project" / "pkg"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "shared.py").write_text("ANSWER = 42\n")
    (folder / "client_app.py").write_text(CLIENT_APP)
    (folder / "server_app.py").write_text(SERVER_APP)
    await operated.devices()
    id_ = await operated.submit(parse_job(JOB))
    assert await operated.ended(id_) == "finished"
    directory = operated.state / "runs" / id_ / "server_app"
    assert (directory / "answers").read_text() == "[42, 42, 42]"
    (job,) = (await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest())).jobs
    assert (job.reason, job.round) == (f"the ServerApp returned; its files are in {directory}", 0)


async def test_a_server_app_that_is_not_installed_is_refused(operated):
    with pytest.raises(AdmissionRefused, match="server_app='project/pkg/server_app"):
        await operated.submit(parse_job(JOB))
