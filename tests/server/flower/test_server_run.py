"""Our ServerApp and ClientApp, with Flower's runtime left out: messages are function calls."""

import json

import pytest
import torch

from isthmus.errors import JobError, UserError
from isthmus.integrations.flower import messages
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_clients.flower.hosted import client_app
from isthmus_server.flower.server_run import server_app

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


class InPlace:
    """A Grid whose nodes are apps in this process; `broken` ones answer errors."""

    def __init__(self, app, config, nodes=3, broken=()):
        messages.identify()
        self.app = app
        self.broken = set(broken)
        self.nodes = {
            2 + place: messages.Context(
                run_id=1,
                node_id=2 + place,
                node_config={"name": "abcdef"[place]},
                state=messages.RecordDict(),
                run_config=config,
            )
            for place in range(nodes)
        }

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, timeout):
        self.asked = list(messages)
        return [self.answer(one) for one in self.asked]

    def answer(self, asked):
        node = asked.metadata.dst_node_id
        if node in self.broken:
            return messages.Message(messages.Error(2, "no battery"), reply_to=asked)
        return self.app(asked, self.nodes[node])


@pytest.fixture
def hosted(write_task, tmp_path):
    """Run the pair; gives the report, and the grid."""
    torch.set_num_threads(1)
    write_task()
    path = tmp_path / "job.toml"
    path.write_text(JOB)

    def run(config=None, **more):
        config = {"directory": str(tmp_path / "out"), **(config or {})}
        grid = InPlace(client_app(path), config, **more)
        context = messages.Context(1, 1, {}, messages.RecordDict(), config)
        with messages.captured_warnings():
            server_app(path)(grid, context)
        return json.loads((tmp_path / "out" / "report.json").read_text()), grid

    return run


async def test_a_hosted_job_comes_to_what_our_own_devices_come_to(hosted, place, tmp_path):
    report, _ = hosted({"federated.quorum": 3})
    await place.listen()
    plain = (
        "federated.secure_aggregation=false",
        "federated.flower.strategy.name=FedAvg",
        "rounds=2",
    )
    ours, _ = await place.run("ours", *plain)
    for theirs, row in zip(report["rounds"], ours["rounds"], strict=True):
        assert theirs["metrics"] == pytest.approx(row["metrics"], rel=1e-5)
    payload = bytearray((tmp_path / "out" / "model.safetensors").read_bytes())
    length = 8 + int.from_bytes(payload[:8], "little")
    layout = TensorLayout.from_header(payload[:length])
    expected = bytearray((tmp_path / "ours" / "model.safetensors").read_bytes())
    torch.testing.assert_close(layout.decode(payload), layout.decode(expected))


def test_so_many_nodes_are_asked_as_the_job_says(hosted):
    report, grid = hosted(nodes=6)
    assert len(grid.asked) == 3
    assert [row["accepted"] for row in report["rounds"]] == [3, 3]


def test_a_node_that_fails_is_done_without_down_to_the_quorum(hosted):
    report, _ = hosted(broken=[3])
    assert [row["accepted"] for row in report["rounds"]] == [2, 2]
    with pytest.raises(UserError) as failed:
        hosted(broken=[3, 4])
    assert str(failed.value) == (
        "round 1 failed 2 times; the last time because: 1 of 3 answers were accepted and the "
        "quorum is 2 (node 3: no battery; node 4: no battery)"
    )


def test_too_few_nodes_are_one_sentence(hosted):
    with pytest.raises(UserError) as failed:
        hosted(nodes=2)
    assert str(failed.value) == (
        "2 SuperNodes are connected and a round asks 3 (federated.cohort); waited 0.1 s"
    )


def test_what_a_strategy_remembers_goes_from_round_to_round(hosted):
    plain, _ = hosted()
    config = {"federated.flower.strategy.name": "FedAvgM"}
    same, _ = hosted(config)
    config["federated.flower.strategy.options.server_momentum"] = 0.9
    faster, _ = hosted(config)
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
def test_what_flowers_runtime_has_nothing_for_is_one_sentence(config, says, hosted):
    with pytest.raises(JobError) as refused:
        hosted(config)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
