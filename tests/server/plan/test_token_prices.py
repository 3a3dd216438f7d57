"""A plan of a language model: what a token costs on each side, and that only adapters travel."""

from __future__ import annotations

import pytest
from peft import get_peft_model_state_dict
from tests.chat_projects import new_chat_project

from isthmus.job import load_job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_start_model
from isthmus.task.scoring.order import EpochOrder
from isthmus_clients.training.example_order import step_indices
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.page import plan_page
from isthmus_server.plan.plan import plan_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

PRICES = ("prices.datacenter_step=0.5", "prices.client_update=2")
TABLE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Table(isthmus.Task):
    def model(self):
        return nn.Linear(4, 3)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def local_data(self, participant):
        return TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))

    def eval_data(self):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "ferry"
    new_chat_project(folder)
    return folder


@pytest.fixture(scope="module")
def plan(project):
    return plan_of(project / "job.toml", PRICES, PlanOptions())


@pytest.fixture(scope="module")
def task(project, plan):
    settings = plan.job.task.settings
    return load_task(plan.job.task.source, settings, base=project, data=project / "data")


def tokens(rows):
    return sum(len(tokens) for tokens, _ in rows)


def test_a_million_tokens_have_the_price_of_their_steps_and_updates(plan, task):
    found = {each.name: each for each in plan.sides.tokens}
    there = task.local_data(Participant(name="datacenter-0", regime="datacenter"))
    counted = [there[index * len(there) // 64] for index in range(64)]
    step = 8 * tokens(counted) / 64
    assert found.pop("a million tokens, datacenter").value == pytest.approx(1e6 * 0.5 / step)
    updates = []
    for index in range(4):
        device = Participant(name=f"client-{index}", regime="federated", shard=(index, 4))
        rows = task.local_data(device)
        assert len(rows) <= 64
        updates.append(8 * tokens(rows))  # local_epochs
    update = sum(updates) / 4
    assert found.pop("a million tokens, devices").value == pytest.approx(1e6 * 2 / update)
    assert not found


def test_the_plan_its_page_and_json_have_them(plan):
    for figure in plan.sides.tokens:
        assert f"  {figure.name}: {figure.text}" in plan.lines()
        assert f"cost of {figure.name}" in plan_page(plan)
    assert plan.to_json()["tokens"] == [each.to_json() for each in plan.sides.tokens]


@pytest.mark.parametrize("steps", [3, 40])
def test_steps_instead_of_epochs_are_counted(project, task, steps):
    """As a device takes them: the last batch of an epoch is smaller."""
    path = project / "steps.toml"
    path.write_text(
        (project / "job.toml").read_text().replace("local_epochs = 8", f"local_steps = {steps}")
    )
    wanted = (*PRICES, "federated.batch_size=5")
    settings = load_job(path, wanted).federated
    found = plan_of(path, wanted, PlanOptions()).sides.tokens[1]
    updates = []
    for index in range(4):
        device = Participant(name=f"client-{index}", regime="federated", shard=(index, 4))
        rows = task.local_data(device)
        assert len(rows) % settings.batch_size
        order = EpochOrder(task, rows, len(rows), settings.batch_size)
        trained = sum(map(len, step_indices(bytes(32), order, settings)))
        updates.append(trained * tokens(rows) / len(rows))
    assert found.value == pytest.approx(1e6 * 2 / (sum(updates) / 4))


HALF = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Words(isthmus.Task):
    def model(self):
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)

    def local_data(self, participant):
        return TensorDataset(torch.ones(8, 6, dtype=torch.long), torch.ones(8, 6, dtype=torch.long))

    def order(self, dataset, batch_size, generator):
        return [0, 2]

    def eval_data(self):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.1)
"""


def test_an_order_that_leaves_examples_out_is_followed(tmp_path):
    (tmp_path / "task.py").write_text(HALF)
    path = tmp_path / "job.toml"
    path.write_text('name = "half"\n[task]\nsource = "task.py:Words"\n')
    wanted = (*PRICES, "federated.local_epochs=3", "strategy.policy=federated")
    [found] = plan_of(path, wanted, PlanOptions()).sides.tokens
    assert found.value == pytest.approx(1e6 * 2 / (3 * 2 * 6))


def test_a_side_that_trains_nothing_or_has_no_data_here_has_no_price(project, plan):
    path = project / "job.toml"
    federated = plan_of(path, (*PRICES, "strategy.policy=federated"), PlanOptions())
    assert [each.name for each in federated.sides.tokens] == ["a million tokens, devices"]
    private = project / "data/private.jsonl"
    text = private.read_text()
    try:
        private.unlink()
        on_a_server = plan_of(path, PRICES, PlanOptions())
        assert [each.name for each in on_a_server.sides.tokens] == ["a million tokens, datacenter"]
    finally:
        private.write_text(text)


def test_a_job_without_tokens_has_no_price_of_them(tmp_path):
    (tmp_path / "task.py").write_text(TABLE)
    path = tmp_path / "job.toml"
    path.write_text('name = "table"\n[task]\nsource = "task.py:Table"\n')
    found = plan_of(path, (), PlanOptions())
    assert found.sides.tokens == []
    assert not any("million tokens" in line for line in found.lines())


def test_only_adapters_travel(project, plan, task):
    job = load_job(project / "job.toml")
    model = build_start_model(task, job, project)
    adapters = 4 * sum(each.numel() for each in get_peft_model_state_dict(model).values())
    base = (project / "base/model.safetensors").stat().st_size
    most = max(each.highest for each in plan.sides.devices.received)
    assert adapters <= most < adapters + 10_000 < base
