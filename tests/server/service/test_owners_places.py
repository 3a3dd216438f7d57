"""Sentences of an owner's machine, as a server on another machine reads them."""

import asyncio

from tests.conftest import TABLE
from tests.server.waiting import wait_until

from isthmus.job import parse_job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


async def asked(fleet, member, source, *overrides, task_digest=b""):
    """What the server reads of a device that cannot open a run."""
    job = parse_job(f'name = "t"\n[task]\nsource = "{source}"', overrides)
    opening = link_pb2.OpenRun(
        run_id="run", job=job.model_dump_json(), task_digest=task_digest, layout=LAYOUT.header
    )
    request = link_pb2.Request(id=fleet.link.new_id(), open=opening)
    reply = await fleet.link.ask(member.name, request)
    return reply.failure.reason


async def test_a_server_reads_no_path_of_an_owners_machine(fleet, caplog):
    """A refusal names a task by its job, and the owner's log has the whole sentence."""
    await fleet.listen()
    member = await fleet.member("phone")
    tasks = fleet.folder / "home of ann" / "tasks"
    (tasks / "learn").mkdir(parents=True)
    (tasks / "learn" / "task.py").write_text(TABLE + "    def model(self):\n        return 1 / 0\n")
    participant = Participant(name="phone", regime="federated")
    agent = Agent(participant, None, tasks=tasks)
    fleet.connections.append(asyncio.create_task(agent.uplink(fleet.address, member).run()))
    await wait_until(lambda: "phone" in fleet.link.peers)
    learn = "learn/task.py:Learn"
    said = [
        await asked(fleet, member, learn, task_digest=b"x" * 32),
        await asked(fleet, member, "other/task.py:Learn"),
        await asked(fleet, member, "learn/../learn/task.py:Learn"),
        # Without secure aggregation also what the task's code raises.
        await asked(fleet, member, learn, "federated.secure_aggregation=false"),
    ]
    for sentence in said:
        assert str(fleet.folder) not in sentence
        assert "of ann" not in sentence
    assert "failed at --tasks/learn/task.py:" in said[-1]
    assert f"failed at {tasks}/learn/task.py:" in caplog.text
