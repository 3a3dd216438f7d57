"""Load the examples as a job does, and train their tasks in this process."""

from pathlib import Path

import pytest
import torch

from isthmus.job import load_job
from isthmus.task import Participant, load_task
from isthmus.task.scoring import batches, build_model, evaluate, losses

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")
DATACENTER = Participant(name="datacenter", regime="datacenter")


def device(index, count):
    return Participant(name=f"device-{index}", regime="federated", shard=(index, count))


@pytest.fixture
def load_example():
    """Load an example's job, with overrides, and its task."""

    def load(name, *overrides, data=None):
        base = EXAMPLES / name
        job = load_job(base / "job.toml", overrides)
        return job, load_task(job.task.source, job.task.settings, base=base, data=data)

    return load


def train(task, participant, epochs, batch_size):
    """The metrics on held-out data before and after a short training on a participant's data."""
    model = build_model(task, seed=1)
    data, held_out = task.local_data(participant), task.eval_data()
    optimizer = task.optimizer(model.parameters(), participant)

    def score():
        return evaluate(task, model, held_out, range(len(held_out)), 512, CPU).result()

    before = score()
    order = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        rows = torch.randperm(len(data), generator=order).tolist()
        for inputs, target in batches(task, data, rows, batch_size, CPU):
            optimizer.zero_grad()
            losses(task, model, inputs, target)[1].mean().backward()
            optimizer.step()
    return before, score()
