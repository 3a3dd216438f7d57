"""Changes of the ranks' layout in a run that has begun: only what leaves the training as it is.

>>> from isthmus.job import parse_job
>>> job = parse_job('''
... name = "digits"
... [task]
... source = "task.py:Digits"
... [datacenter]
... ranks = 2
... batch_size = 16
... ''')
>>> with_layout(job, {"datacenter.ranks": 4, "datacenter.tensor_parallel": 2}).datacenter.ranks
4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from isthmus.errors import JobError
from isthmus.job.datacenter import DatacenterSection
from isthmus.job.schema import Job, apply_override, with_changes
from isthmus.job.unused_layout import SHARING_KEYS

LAYOUT_KEYS = (
    "ranks",
    *SHARING_KEYS,
    "accumulate",
    "batch_size",
    "global_batch",
    "offload",
    "compile",
    "checkpoint_activations",
    "checkpoint_every",
    "checkpoint_steps",
    "readers",
    "hang_seconds",
)
"""Keys of `[datacenter]` that say how ranks share the work of a step, and not what a step is."""

AT_ONCE_KEYS = (
    "ranks",
    "layout",
    "data_parallel",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "microbatches",
    "accumulate",
    "batch_size",
    "global_batch",
)
"""Keys of `[datacenter]` on which it depends how many examples a replica computes together."""


def layout_changes(overrides: Iterable[str]) -> dict[str, Any]:
    """The changes that `--set KEY=VALUE` asks for, by dotted key.

    Raises:
        JobError: one is not of that form, or its key is not about the layout.
    """
    changes: dict[str, Any] = {}
    for override in overrides:
        table: dict[str, Any] = {}
        apply_override(table, override)
        key = override.partition("=")[0].strip()
        section, _, name = key.partition(".")
        if section != "datacenter" or name not in LAYOUT_KEYS:
            raise JobError(
                f"--set {key} cannot be combined with --resume: a run keeps its job, of which only "
                f"the ranks' layout may change (datacenter.{', '.join(LAYOUT_KEYS)}); begin a new "
                "run with it"
            )
        changes[key] = table[section][name]
    return changes


def with_layout(job: Job, changes: Mapping[str, Any]) -> Job:
    """A validated copy of a job with changes of the ranks' layout, see `layout_changes`.

    Raises:
        JobError: the result is no valid job, or a step would have other examples than before.
    """
    changed = with_changes(job, changes)
    if not job.datacenter.ranks and changed.datacenter.ranks:
        raise JobError(
            "datacenter.ranks cannot be set: the job of this run starts no datacenter, and what "
            "trains would change"
        )
    if job.datacenter.ranks and not changed.datacenter.ranks:
        raise JobError(
            "datacenter.ranks=0 would leave the run without its datacenter; set 1 or more"
        )
    before = _examples_of_a_step(job.datacenter)
    after = _examples_of_a_step(changed.datacenter)
    if before is None or after is None:
        if job.datacenter != changed.datacenter:
            raise JobError(
                "the layout of this run can only change if its job has datacenter.global_batch: "
                "otherwise the examples of a step follow from ranks that are not known here"
            )
    elif before != after:
        raise JobError(
            f"with this layout a step would have {after} examples in place of {before}, which "
            f"changes the training; add --set datacenter.global_batch={before}"
        )
    return changed


def _examples_of_a_step(section: DatacenterSection) -> int | None:
    """Examples of all replicas in one step; None if that follows from ranks that are not known."""
    if section.global_batch is not None:
        return section.global_batch
    if not section.ranks or section.layout == "auto":
        return None
    return section.replicas(section.ranks) * section.batch_size


def are_as_many_at_once(before: DatacenterSection, after: DatacenterSection) -> bool:
    """Whether a replica is known to compute as many examples together as before.

    What normalises by them, or has one loss of them, trains differently with other numbers.
    """
    if all(getattr(before, name) == getattr(after, name) for name in AT_ONCE_KEYS):
        return True
    known = examples_at_once(before)
    return known is not None and known == examples_at_once(after)


def examples_at_once(section: DatacenterSection) -> int | None:
    """Examples that a replica computes together; None if that follows from ranks not known here."""
    if not section.ranks or section.layout == "auto":
        return None
    return section.examples_at_once(section.ranks)
