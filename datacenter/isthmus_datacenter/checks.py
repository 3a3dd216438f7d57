"""The datacenter's part of `isthmus job check`: train one batch, on one rank."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import JobError
from isthmus.job import Job, with_changes
from isthmus.job.datacenter import DatacenterSection
from isthmus.job.unused_layout import SHARING_KEYS
from isthmus.task import Participant, Task, user_code
from isthmus.task.scoring import build_start_model, count_examples
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.tensors.own_buffers import OwnBuffers

if TYPE_CHECKING:
    from isthmus_datacenter.parallel.parallel_dims import ParallelDims
    from isthmus_datacenter.training.engine import Engine

# `zero_stage` stays: it shards nothing over one rank, and privacy may prescribe it.
_ONE_RANK = {
    **{
        f"datacenter.{key}": DatacenterSection.model_fields[key].default
        for key in SHARING_KEYS
        if key != "zero_stage"
    },
    "datacenter.ranks": 1,
    "datacenter.readers": 0,
    "datacenter.log_steps": 0,
    "datacenter.profile_steps": None,
    "datacenter.compile": False,
    "datacenter.offload": "none",
    "datacenter.float8": False,
}
"""Changes of a job for one rank, which has nobody to share a model with."""


def check(job: Job, task: Task, base: Path) -> str:
    """Train one batch of the datacenter's data.

    Returns what was tried; empty if `isthmus run` starts no ranks for the job.

    Raises:
        UserError: the data, the loss or the optimizer cannot be used, with the reason.
    """
    if not job.datacenter.ranks:
        return ""
    from isthmus_datacenter.messages import Command, ControlSignal
    from isthmus_datacenter.training.round import train_round

    with engine_of_one(job, task, base) as engine:
        _check_batch(job, engine.examples)
        dims = _given_dims(job)
        if dims is not None:
            engine.optimizer.check_for(dims)
        (whole,) = engine.shard.stages.values()
        buffers = OwnBuffers(whole)
        step = Command(op="train_steps", run_id="check", from_step=0, until_step=1)
        train_round(engine, step, lambda _: None, lambda: ControlSignal.CONTINUE)
        found = f"one training batch of the datacenter{buffers.in_words(whole)}"
        return found + _not_tried(job)


def _not_tried(job: Job) -> str:
    """How the model is divided over ranks, of which one has tried it whole, a clause."""
    section = job.datacenter
    degrees = {
        key: getattr(section, key)
        for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    }
    divided = ", ".join(f"{key}={degree}" for key, degree in degrees.items() if degree > 1)
    if not divided:
        return ""
    return (
        f" as a whole: whether {divided} can divide the model is found when the run opens, or "
        "before it by --memory"
    )


def _given_dims(job: Job) -> ParallelDims | None:
    """The layout of a job that gives one for its ranks."""
    if job.datacenter.layout != "given" or not job.datacenter.ranks:
        return None
    from isthmus_datacenter.parallel.parallel_dims import ParallelDims

    return ParallelDims.from_section(job.datacenter, job.datacenter.ranks)


@contextlib.contextmanager
def engine_of_one(job: Job, task: Task, base: Path) -> Iterator[Engine]:
    """The training of the datacenter, with the whole model on one rank of this process.

    Raises:
        UserError: the model or the data cannot be used, with the reason.
    """
    import torch

    from isthmus_datacenter.messages import Command
    from isthmus_datacenter.parallel.parallelize import refuse_unshardable
    from isthmus_datacenter.training.engine import Engine, RankPlacement

    model = build_start_model(task, job, base)
    division = divide(model, job.exchange)
    dims = _given_dims(job)
    if dims is not None:
        # The single rank below shards nothing.
        refuse_unshardable(model, dims, "cpu")
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
        yield Engine(opening, placement)


def memory(job: Job, task: Task, base: Path, ranks: int, accelerators: bool) -> list[str]:
    """Lines on what the job's layout takes of each rank's memory; no rank is needed.

    Args:
        job: the job.
        task: its task.
        base: the job file's folder.
        ranks: their number.
        accelerators: whether they are GPUs.

    Raises:
        UserError: it cannot be found, with the reason.
    """
    from isthmus_datacenter.training.memory_report import memory_of

    rows = rows_at_once(job, task, ranks)
    count = len(rows)
    found = memory_of(task, job, rows, ranks, accelerators=accelerators)
    at_a_time = "1 example" if count == 1 else f"{count} examples"
    lines = [
        f"on each of {ranks} ranks ({'GPUs' if accelerators else 'processors'}), the most:",
        f"parameters   {_in_units(found.parameters)}",
        f"gradients    {_in_units(found.gradients)}",
        f"optimizer    {_in_units(found.optimizer)}",
        f"activations  {_in_units(found.activations)}, of {at_a_time} at a time",
        f"peak         {_in_units(found.peak)} of a step, with what is gathered for a while",
    ]
    if job.datacenter.expert_parallel > 1:
        lines.append(
            "this is with tokens spread evenly over experts: activations and peak are larger on a "
            "rank whose experts get more"
        )
    return lines


def collectives(job: Job, task: Task, base: Path, ranks: int, accelerators: bool) -> list[str]:
    """Lines on whether all ranks issue the same collectives in the same order; none is needed.

    The arguments are those of `memory`.

    Raises:
        UserError: they differ, or cannot be found, with the reason.
    """
    from isthmus_datacenter.training.collective_order import compare_collectives

    rows = rows_at_once(job, task, ranks)
    found = compare_collectives(task, job, rows, ranks, accelerators=accelerators)
    return [found.text]


def rows_at_once(job: Job, task: Task, ranks: int) -> list[Any]:
    """As many rows of the datacenter's data as a replica trains at a time, of any order.

    Raises:
        UserError: there are fewer, they cannot be read, or so many ranks are impossible.
    """
    from torch.utils.data import IterableDataset

    from isthmus_datacenter.training.memory_report import examples_at_once

    count = examples_at_once(job, ranks)
    with user_code("local_data()"):
        data: Any = task.local_data(Participant(name="datacenter", regime="datacenter"))
    # Not in the order of training: only their shapes matter.
    if isinstance(data, IterableDataset):
        with user_code("reading the dataset"):
            rows = list(itertools.islice(data, count))
        examples = len(rows)
    else:
        examples = count_examples(data, "local_data()")
        with user_code("reading the dataset"):
            rows = [data[index] for index in range(min(count, examples))]
    if len(rows) < count:
        raise JobError(
            f"a replica trains {count} examples at a time, and local_data() has {examples}; lower "
            "datacenter.batch_size"
        )
    return rows


def _in_units(count: int) -> str:
    """A number of bytes for a person.

    >>> _in_units(1288490188), _in_units(5 << 20), _in_units(300)
    ('1.20 GiB', '5.0 MiB', '0.3 KiB')
    """
    if count >= 1 << 30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count / 2**10:.1f} KiB"


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
