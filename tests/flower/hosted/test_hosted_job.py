"""Isthmus' ServerApp and ClientApp without Flower's runtime: messages are function calls."""

import json

import pytest
import torch

from isthmus.errors import JobError, UserError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_flower import messages
from isthmus_flower.hosted.client import client_app
from isthmus_flower.hosted.server import server_app

JOB = """
name = "table"
rounds = 2
attempts = 2
task = { source = "task.py:Learn" }
strategy = { policy = "federated" }
[federated]
cohort = 3
quorum = 2
secure_aggregation = false
[time]
join_seconds = 0.1
lease_seconds = 0.1
"""


class InProcessGrid:
    """A Grid whose nodes are apps in this process; `broken` nodes reply with errors."""

    def __init__(self, app, config, nodes=3, broken=()):
        messages.identify()
        self.app = app
        self.broken = set(broken)
        self.nodes = {
            2 + deployment: messages.Context(
                run_id=1,
                node_id=2 + deployment,
                node_config={"name": "abcdef"[deployment]},
                state=messages.RecordDict(),
                run_config=config,
            )
            for deployment in range(nodes)
        }

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, timeout):
        self.sent = list(messages)
        return [self.reply_to(message) for message in self.sent]

    def reply_to(self, message):
        node = message.metadata.dst_node_id
        if node in self.broken:
            return messages.Message(messages.Error(2, "no battery"), reply_to=message)
        return self.app(message, self.nodes[node])


@pytest.fixture
def run_apps(write_task, tmp_path):
    """Run both apps; returns the report and the grid."""
    torch.set_num_threads(1)
    write_task()
    path = tmp_path / "job.toml"
    path.write_text(JOB)

    def run(config=None, **more):
        config = {"directory": str(tmp_path / "out"), **(config or {})}
        grid = InProcessGrid(client_app(path), config, **more)
        context = messages.Context(1, 1, {}, messages.RecordDict(), config)
        with messages.captured_warnings():
            server_app(path)(grid, context)
        return json.loads((tmp_path / "out" / "report.json").read_text()), grid

    return run


async def test_the_apps_train_the_same_model_as_isthmus_devices(run_apps, deployment, tmp_path):
    report, _ = run_apps({"federated.quorum": 3})
    await deployment.start()
    plain = (
        "federated.secure_aggregation=false",
        "federated.flower.strategy.name=FedAvg",
        "rounds=2",
    )
    direct, _ = await deployment.run("direct", *plain)
    for hosted, row in zip(report["rounds"], direct["rounds"], strict=True):
        assert hosted["metrics"] == pytest.approx(row["metrics"], rel=1e-5)
    payload = bytearray((tmp_path / "out" / "model.safetensors").read_bytes())
    length = 8 + int.from_bytes(payload[:8], "little")
    layout = TensorLayout.from_header(payload[:length])
    expected = bytearray((tmp_path / "direct" / "model.safetensors").read_bytes())
    torch.testing.assert_close(layout.decode(payload), layout.decode(expected))


def test_the_job_determines_how_many_nodes_are_selected(run_apps):
    report, grid = run_apps(nodes=6)
    assert len(grid.sent) == 3
    assert [row["accepted"] for row in report["rounds"]] == [3, 3]


def test_failing_nodes_are_tolerated_down_to_the_quorum(run_apps):
    report, _ = run_apps(broken=[3])
    assert [row["accepted"] for row in report["rounds"]] == [2, 2]
    with pytest.raises(UserError) as failed:
        run_apps(broken=[3, 4])
    assert str(failed.value) == (
        "round 1 failed 2 times; the last time because: 1 of 3 answers were accepted and the "
        "quorum is 2 (node 3: no battery; node 4: no battery)"
    )


def test_too_few_nodes_are_one_sentence(run_apps):
    with pytest.raises(UserError) as failed:
        run_apps(nodes=2)
    assert str(failed.value) == (
        "2 SuperNodes are connected and a round needs 3 (federated.cohort); waited 0.1 s"
    )


def test_strategy_state_is_kept_from_round_to_round(run_apps):
    plain, _ = run_apps()
    config = {"federated.flower.strategy.name": "FedAvgM"}
    same, _ = run_apps(config)
    config["federated.flower.strategy.options.server_momentum"] = 0.9
    faster, _ = run_apps(config)
    rows = [report["rounds"] for report in (plain, same, faster)]
    assert rows[0][0]["metrics"] == rows[1][0]["metrics"] == rows[2][0]["metrics"]
    assert rows[0][1]["metrics"] == rows[1][1]["metrics"] != rows[2][1]["metrics"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"strategy.policy": "hybrid"}, "strategy.policy='hybrid': its rounds are all 'federated'"),
        ({"federated.secure_aggregation": True, "federated.quorum": 3}, "need our link; set it to"),
        ({"federated.mode": "buffered"}, "federated.mode='buffered': Flower works in rounds"),
        ({"federated.flower.app": "x.py:app"}, "the app is the one in pyproject.toml"),
        ({"federated.cohort": "two"}, "federated.cohort='two': input should be a valid integer"),
    ],
)
def test_settings_unsupported_by_flowers_runtime_are_refused(config, says, run_apps):
    with pytest.raises(JobError) as refused:
        run_apps(config)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
