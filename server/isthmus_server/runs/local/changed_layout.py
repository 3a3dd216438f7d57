"""Refuse another layout of the ranks where it would change what a step of the task computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.errors import JobError
from isthmus.job.layout_changes import are_as_many_at_once, examples_at_once, with_layout
from isthmus.task.definition import defines
from isthmus.task.loading import load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.running_statistics import find_statistics
from isthmus_server.storage.store import Store


def check_examples_at_once(store: Store, changes: Mapping[str, Any]) -> None:
    """Refuse other numbers of examples that are computed together, if the task depends on them.

    As many examples in a step are not enough then: BatchNorm normalises by those that a replica
    computes at once, and a `training_step` may compare them with each other. An `order()` of the
    task is for batches of one size.

    Args:
        store: of the run.
        changes: of the ranks' layout, by dotted key.

    Raises:
        JobError: the task depends on them, and with the changes they are others.
        UserError: the task cannot be loaded.
    """
    job = store.job
    changed = with_layout(job, {**store.layout_changes(), **changes})
    as_many_at_once = are_as_many_at_once(job.datacenter, changed.datacenter)
    batch = job.datacenter.batch_size
    if as_many_at_once and changed.datacenter.batch_size == batch:
        return
    data = job.task.data_in(store.base)
    task = load_task(job.task.source, job.task.settings, base=store.base, data=data)
    if defines(task, "order") and changed.datacenter.batch_size != batch:
        raise JobError(
            f"order() orders an epoch for batches of {batch} examples, and with this layout they "
            f"would have {changed.datacenter.batch_size}, so that the rest of the epoch would have "
            "other examples; keep batch_size and the number of replicas, or begin a new run"
        )
    if as_many_at_once:
        return
    frozen = job.exchange.buffers == "frozen"
    statistics = [] if frozen else [*find_statistics(build_model(task, job.seed))]
    if defines(task, "training_step"):
        depends = "training_step() gets the examples that a replica computes at once"
    elif statistics:
        depends = (
            "the model normalises by the examples that a replica computes at once "
            f"({statistics[0]!r})"
        )
    else:
        return
    before = examples_at_once(job.datacenter)
    after = examples_at_once(changed.datacenter)
    if before is None or after is None:
        numbers = "how many these are follows from ranks that are not known here"
    else:
        numbers = f"with this layout these are {after} in place of {before}"
    raise JobError(
        f"{depends}, and {numbers}, which changes the training; keep the number of replicas, "
        "batch_size and accumulate, or begin a new run"
    )
