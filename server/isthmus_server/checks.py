"""What a server refuses in a job, told before there is a run of it."""

from __future__ import annotations

from isthmus.job import Job
from isthmus.task import Task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.optimizers import make_optimizer
from isthmus_server.strategy import load_policy


def check(job: Job, task: Task) -> None:
    """Make once what a run makes before its first round: policy, model, optimizer, strategy.

    Raises:
        UserError: what cannot be made, and why.
    """
    load_policy(job.strategy)
    model = build_model(task, job.seed)
    layout = TensorLayout.of(model)
    make_optimizer(job.strategy.server_optimizer, list(model.parameters()))
    if job.federated.flower is not None:
        from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter

        FlowerStrategyAdapter(job.federated, layout)
