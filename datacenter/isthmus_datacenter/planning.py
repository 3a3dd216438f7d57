"""The datacenter's part of `isthmus plan`: memory of layouts, operations and rate of a step."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import JobError, UserError
from isthmus.job import Job, with_changes
from isthmus.job.planned import PlannedLayout, PlannedRanks, RanksQuestion, RankTraffic
from isthmus.task import Task
from isthmus_datacenter.checks import engine_of_one, rows_at_once

MEASURED_SECONDS = 2.0
"""Least time in which steps are measured."""
_KEYS = ("zero_stage", "tensor_parallel", "context_parallel", "pipeline_parallel")
"""Keys that a layout of a plan is told by."""


def plan_ranks(
    job: Job, task: Task, base: Path, ranks: int, question: RanksQuestion
) -> PlannedRanks:
    """What the datacenter of a job needs on so many ranks; none of them is needed.

    Args:
        job: the job.
        task: its task.
        base: the job file's folder.
        ranks: their number.
        question: what is asked.

    Raises:
        UserError: the job's layout is impossible on so many ranks, or its data cannot be read.
    """
    from isthmus_datacenter.training.memory_report import (
        elements_of,
        elements_of_experts,
        largest_parameter,
    )

    section = job.datacenter
    try:
        own = section.for_replicas(section.replicas(ranks))
    except ValueError as error:
        raise JobError(f"datacenter: {error}") from None
    rows = _Rows(task)
    operations = None
    unknown = ""
    try:
        operations = rows.operations(job, ranks)
    except UserError as error:
        unknown = str(error)
    rate = None
    if question.measure and operations is not None:
        rate = measured_rate(job, task, base)
    others: list[PlannedLayout] = []
    if question.layouts:
        found = [_compared(each, rows, ranks, question) for each in layouts_on(job, ranks)]
        others = sorted(found, key=lambda each: (bool(each.refused), each.peak))
    traffic = None
    traffic_unknown = ""
    if question.traffic:
        try:
            traffic = _traffic(job, rows, ranks, question)
        except UserError as error:
            traffic_unknown = str(error)
    return PlannedRanks(
        ranks=ranks,
        on_gpus=question.on_gpus,
        layout=_layout(job, rows, ranks, question),
        others=others,
        largest=largest_parameter(task, job),
        examples=section.replicas(ranks) * own.batch_size,
        operations=operations,
        unknown=unknown,
        rate=rate,
        elements=elements_of(task, job),
        expert_elements=elements_of_experts(task, job),
        traffic=traffic,
        traffic_unknown=traffic_unknown,
        collectives=_collectives(job, rows, ranks, question) if question.collectives else "",
    )


def _traffic(job: Job, rows: _Rows, ranks: int, question: RanksQuestion) -> list[RankTraffic]:
    """What the first rank sends and receives in a step, by operation and group.

    Messages with float8 are taken as those without it.

    Raises:
        UserError: it cannot be found, with the reason.
    """
    from isthmus_datacenter.training.collective_order import traces_of

    plain = with_changes(job, {"datacenter.float8": False})
    traces = traces_of(
        rows.task,
        plain,
        rows.of(plain, ranks),
        ranks,
        lambda dims: [0],
        accelerators=question.on_gpus,
    )
    earlier = traces[0].earlier
    section = job.datacenter
    accumulate = section.for_replicas(section.replicas(ranks)).accumulate
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    parts = [(earlier, accumulate - 1), (traces[0].last, 1)]
    for collectives, times in parts:
        for each in collectives:
            # A message goes between two ranks of its group.
            between = each.ranks if each.peer is None else tuple(sorted((0, each.peer)))
            key = (each.operation, between)
            counts[key] = counts.get(key, 0) + times
            sizes[key] = sizes.get(key, 0) + times * each.size
    return [
        RankTraffic(operation=key[0], ranks=key[1], count=count, size=sizes[key])
        for key, count in counts.items()
    ]


def _collectives(job: Job, rows: _Rows, ranks: int, question: RanksQuestion) -> str:
    """What the comparison of collectives found, or why they cannot be compared.

    Raises:
        UserError: ranks issue different ones.
    """
    from isthmus_datacenter.training.collective_order import (
        CollectiveMismatchError,
        compare_collectives,
    )

    try:
        return compare_collectives(
            rows.task, job, rows.of(job, ranks), ranks, accelerators=question.on_gpus
        ).text
    except CollectiveMismatchError:
        raise
    except UserError as error:
        return f"not compared: {error}"


def layouts_on(job: Job, ranks: int) -> Iterator[Job]:
    """The job with every tensor and pipeline degree and ZeRO stage that so many ranks allow.

    Its other keys stay. Jobs that cannot be are left out.
    """
    sizes = [size for size in range(1, 65) if ranks % size == 0]
    for tensor, pipeline, stage in itertools.product(sizes, sizes, range(4)):
        keys = {"zero_stage": stage, "tensor_parallel": tensor, "pipeline_parallel": pipeline}
        try:
            changed = with_changes(job, PlannedLayout(keys=keys).changes(ranks))
            changed.datacenter.examples_at_once(ranks)
        except (JobError, ValueError):
            continue
        yield changed


class _Rows:
    """Rows of the datacenter's data, read once for each number of them, and their operations."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._read: dict[int, list[Any]] = {}
        self._operations: dict[int, int] = {}

    def of(self, job: Job, ranks: int) -> list[Any]:
        """As many as a replica trains at a time; see `rows_at_once`."""
        from isthmus_datacenter.training.memory_report import examples_at_once

        count = examples_at_once(job, ranks)
        if count not in self._read:
            self._read[count] = rows_at_once(job, self.task, ranks)
        return self._read[count]

    def operations(self, job: Job, ranks: int) -> float:
        """Operations of one rank in a step of a layout; the rows' are counted once.

        Raises:
            UserError: they cannot be counted, with the reason.
        """
        from isthmus_datacenter.training.memory_report import operations_of

        section = job.datacenter
        rows = self.of(job, ranks)
        if len(rows) not in self._operations:
            self._operations[len(rows)] = operations_of(self.task, job, rows)
        shared = section.tensor_parallel * section.context_parallel * section.pipeline_parallel
        parts = section.for_replicas(section.replicas(ranks)).accumulate
        return self._operations[len(rows)] * parts / shared


def _compared(job: Job, rows: _Rows, ranks: int, question: RanksQuestion) -> PlannedLayout:
    """A layout of several that are compared, with what the time of its step follows from.

    Of what is not known, or of a layout that does not fit, that is left out.
    """
    found = _layout(job, rows, ranks, question)
    fits = question.memory is None or found.peak <= question.memory
    if found.refused or not fits or not question.operations_of_layouts:
        return found
    section = job.datacenter
    replicas = section.replicas(ranks)
    try:
        return dataclasses.replace(
            found,
            examples=replicas * section.for_replicas(replicas).batch_size,
            operations=rows.operations(job, ranks),
            traffic=_traffic(job, rows, ranks, question) if question.traffic else None,
        )
    except UserError:
        return found


def _layout(job: Job, rows: _Rows, ranks: int, question: RanksQuestion) -> PlannedLayout:
    from isthmus_datacenter.training.memory_report import memory_of

    keys = {key: getattr(job.datacenter, key) for key in _KEYS}
    try:
        found = memory_of(rows.task, job, rows.of(job, ranks), ranks, accelerators=question.on_gpus)
    except UserError as error:
        return PlannedLayout(keys=keys, refused=str(error))
    return PlannedLayout(keys=keys, memory=dataclasses.asdict(found))


def measured_rate(job: Job, task: Task, base: Path) -> float:
    """Operations per second of the job's steps on one rank of this machine's processors.

    Raises:
        UserError: a step cannot be trained, with the reason.
    """
    from isthmus_datacenter.messages import Command, ControlSignal
    from isthmus_datacenter.training.memory_report import operations_of
    from isthmus_datacenter.training.round import train_round

    with engine_of_one(job, task, base) as engine:
        single = engine.job
        rows = rows_at_once(single, task, 1)
        each = operations_of(task, single, rows) * single.datacenter.for_replicas(1).accumulate
        done = 0
        steps = 1
        while True:
            until = done + steps
            command = Command(op="train_steps", run_id="check", from_step=done, until_step=until)
            began = time.monotonic()
            trained: dict[str, Any] = train_round(
                engine, command, lambda _: None, lambda: ControlSignal.CONTINUE
            )
            spent = float(trained["seconds"])
            # The first step also prepares what the others reuse.
            if done and spent >= MEASURED_SECONDS:
                return each * steps / spent
            done = until
            took = max(time.monotonic() - began, 1e-3)
            steps = max(1, min(100 * steps, int(1.5 * MEASURED_SECONDS * steps / took)))
