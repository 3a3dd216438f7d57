"""The datacenter's part of `isthmus job check`: train one batch, on one rank."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import JobError
from isthmus.job import Job, with_changes
from isthmus.task import Task
from isthmus.task.scoring import build_model
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint

_ONE_RANK = {
    "datacenter.ranks": 1,
    "datacenter.layout": "given",
    "datacenter.data_parallel": None,
    "datacenter.tensor_parallel": 1,
    "datacenter.pipeline_parallel": 1,
    "datacenter.schedule": "1f1b",
    "datacenter.microbatches": None,
    "datacenter.readers": 0,
    "datacenter.log_steps": 0,
    "datacenter.profile_steps": None,
    "datacenter.compile": False,
}


def check(job: Job, task: Task, base: Path) -> str:
    """Train one batch of the datacenter's data.

    Returns what was tried; empty if `isthmus run` starts no ranks for the job.

    Raises:
        UserError: the data, the loss or the optimizer cannot be used, with the reason.
    """
    if not job.datacenter.ranks:
        return ""
    import torch

    from isthmus_datacenter.messages import Command, ControlSignal
    from isthmus_datacenter.parallel.parallel_dims import ParallelDims
    from isthmus_datacenter.training.engine import Engine, RankPlacement
    from isthmus_datacenter.training.round import train_round

    model = build_model(task, job.seed)
    division = divide(model, job.exchange)
    data = job.task.data_in(base)
    changes: dict[str, object] = dict(_ONE_RANK)
    if job.datacenter.privacy is not None:  # finding the noise takes a while, and the server
        changes["datacenter.privacy.noise"] = 1.0
    opening = Command(
        op="open",
        run_id="check",
        job=with_changes(job, changes).model_dump_json(),
        base=str(base),
        data=None if data is None else str(data),
        layout=division.exchanged.header.decode("latin-1"),
        frozen=fingerprint(model, division.personal.names),
    )
    with _group_of_one(), tempfile.TemporaryDirectory(prefix="isthmus-check-") as state:
        placement = RankPlacement(
            rank=0,
            ranks=1,
            device=torch.device("cpu"),
            participant="datacenter-0",
            state=Path(state),
        )
        engine = Engine(opening, placement)
        _check_batch(job, engine.examples)
        if job.datacenter.layout == "given":
            engine.optimizer.check_for(
                ParallelDims.from_section(job.datacenter, job.datacenter.ranks)
            )
        step = Command(op="train_steps", run_id="check", from_step=0, until_step=1)
        train_round(engine, step, lambda _: None, lambda: ControlSignal.CONTINUE)
    return "one training batch of the datacenter"


def _check_batch(job: Job, examples: int) -> None:
    """Refuse a batch in which examples would be repeated; streamed data have 0 examples."""
    section = job.datacenter
    replicas = 1 if section.layout == "auto" else section.replicas(section.ranks)
    section = section.for_replicas(replicas)
    batch = replicas * section.batch_size
    if 0 < examples < batch:
        raise JobError(
            f"datacenter.batch_size={section.batch_size} for each of {replicas} replica(s) is a "
            f"batch of {batch} examples, and local_data() of the datacenter has {examples}; lower "
            "it"
        )


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """A process group of this process alone, which the code of the ranks expects."""
    import torch.distributed as dist

    from isthmus_datacenter.parallel.kept_groups import forget_groups

    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in PyTorch's list of exports
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        # A second check in this process has another group.
        forget_groups()
        dist.destroy_process_group()
