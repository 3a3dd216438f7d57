"""The server's part of `isthmus job check`: find errors in a job before it is run."""

from __future__ import annotations

from isthmus.job import Job
from isthmus.task import Task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.optimizers import make_optimizer
from isthmus_server.regimes.base import load_extension
from isthmus_server.strategy import load_policy


def check(job: Job, task: Task) -> None:
    """Build the policy, model, optimizer and Flower strategy of a job, as a run does at its start.

    Raises:
        UserError: one of them cannot be built, with the reason.
    """
    load_policy(job.strategy)
    model = build_model(task, job.seed)
    layout = TensorLayout.of(model)
    make_optimizer(job.strategy.server_optimizer, list(model.parameters()))
    load_extension(job.federated, layout)
