"""Whether all ranks of a layout issue the same collectives in the same order, without the ranks.

A rank that issues another collective than the others of its group, or none, waits forever, and they
with it. Each rank's step is traced here by itself (`one_rank`), as if this process were that rank,
and what the ranks of each group issue is compared: in `model()`, in the first step, which prepares
what is kept from step to step, and in a later one. Random numbers are those of the rank.

Where ranks are many, those are traced that differ by construction, and some that a condition on the
rank tells apart: the first, the second and the last along each axis of the layout, the first of
each stage of a pipeline, and the last of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from isthmus.errors import TaskError
from isthmus.job import Job, with_changes
from isthmus.task import Task
from isthmus.task.scoring import map_tensors
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.training.assumed_values import spread_evenly
from isthmus_datacenter.training.collective_trace import (
    TracedCollective,
    by_group,
    trace_collectives,
)
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.one_rank import (
    as_rank,
    batch_of,
    built,
    dims_of,
    distributed,
    fake_mode,
    parts_of_step,
    pass_batch,
    ranks_alone,
)
from isthmus_datacenter.training.rng import seed_rank

MOST_RANKS = 16
"""As many ranks are all traced; of more, some are."""
_FOUND = "the collectives of a step are"


class CollectiveMismatchError(TaskError):
    """Ranks of a group issue different collectives; the message has the ranks and the places."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank issues until it has taken two steps, of which the second is like all later."""

    model: Sequence[TracedCollective]
    """In the task's `model()`."""
    first: Sequence[TracedCollective]
    """In the first step, of two parts of an accumulated batch if there are more."""
    earlier: Sequence[TracedCollective]
    """Collectives of each part of an accumulated batch but the last; empty if there is one part."""
    last: Sequence[TracedCollective]

    @property
    def step(self) -> list[TracedCollective]:
        """In a later step, in their order, of two parts if there are more."""
        return [*self.earlier, *self.last]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRanks:
    """Ranks that issue the same collectives in the same order."""

    ranks: int
    traced: Sequence[int]
    collectives: int
    """Number of them of the first rank in a step, of two parts of it if there are more."""
    groups: int
    """In which they are issued."""

    @property
    def text(self) -> str:
        """For a person."""
        which = "all" if len(self.traced) == self.ranks else f"{len(self.traced)} traced"
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        return (
            f"{which} of {self.ranks} ranks issue the same in the same order in {groups}; the "
            f"first rank takes part in {self.collectives} in a step"
        )


def compare_collectives(
    task: Task, job: Job, rows: Sequence[Any], ranks: int, *, accelerators: bool
) -> ComparedRanks:
    """Compare the collectives of `model()` and of two steps' passes over the ranks.

    All ranks are taken to have batches of the same shapes, and nothing has values. What the task's
    file and constructor, the optimizer and an evaluation issue is not among it, and what is issued
    while the model is distributed.

    Args:
        task: of the job.
        job: the job.
        rows: of the data set, as many as are trained at a time.
        ranks: their number.
        accelerators: whether they are GPUs.

    Raises:
        CollectiveMismatchError: ranks differ.
        LayoutError: the layout is impossible on so many ranks, or not one whose steps are known.
        TaskError: the model cannot be built or trained without values.
    """
    traces = traces_of(task, job, rows, ranks, traced_ranks, accelerators=accelerators)
    steps = {rank: trace.step for rank, trace in traces.items()}
    compare({rank: trace.model for rank, trace in traces.items()}, "model()")
    compare({rank: trace.first for rank, trace in traces.items()}, "the first step")
    compare(steps, "a later step")
    return ComparedRanks(
        ranks=ranks,
        traced=list(traces),
        collectives=len(steps[0]),
        groups=len({group for step in steps.values() for group, _ in by_group(step)}),
    )


def traced_ranks(dims: ParallelDims) -> list[int]:
    """The ranks whose steps are traced, in their order.

    >>> traced_ranks(ParallelDims(ranks=4, zero_stage=3))
    [0, 1, 2, 3]
    >>> traced_ranks(ParallelDims(ranks=64, zero_stage=3, tensor=4, pipeline=2, microbatches=2))
    [0, 1, 3, 4, 28, 32, 63]
    """
    if dims.ranks <= MOST_RANKS:
        return list(range(dims.ranks))
    step = dims.ranks
    found = {0, dims.ranks - 1}
    for axis, size in dims.axes.items():
        step //= size
        at = range(size) if axis == "pipeline" else (1, size - 1)
        found.update(step * index for index in at if index < size)
    return sorted(found)


def traces_of(
    task: Task,
    job: Job,
    rows: Sequence[Any],
    ranks: int,
    which: Callable[[ParallelDims], Iterable[int]],
    *,
    accelerators: bool,
) -> dict[int, RankTrace]:
    """What some ranks issue; `which` says of a layout which ranks.

    The other arguments, and what is raised, are those of `compare_collectives`.
    """
    # Compiled blocks issue what they would without.
    job = with_changes(job, {"datacenter.compile": False})
    dims = dims_of(job, ranks, _FOUND, accelerators=accelerators)
    batch = batch_of(task, rows)
    with ranks_alone(_FOUND, batch):
        return {rank: _traced(task, job, dims, batch, rank) for rank in which(dims)}


def _traced(task: Task, job: Job, dims: ParallelDims, batch: Any, rank: int) -> RankTrace:
    """What one rank issues."""
    mode = fake_mode()
    with as_rank(dims, rank, mode):
        inputs = map_tensors(mode.from_tensor, batch)
        with trace_collectives([], "model()") as of_model:
            model = built(task, job)
        spread_evenly(model)
        _, steps = distributed(task, model, job, dims, inputs, rank)
        # As before a rank's first step: what is drawn before it decides nothing.
        seed_rank(job.seed, 0, dims, rank)
        first = _step(task, steps, inputs)
        later = _step(task, steps, inputs)
        return RankTrace(
            model=of_model,
            first=[each for part in first for each in part],
            earlier=later[0] if len(later) > 1 else [],
            last=later[-1],
        )


def _step(task: Task, steps: ForwardBackward, batch: Any) -> list[list[TracedCollective]]:
    """What a rank issues in the parts of a step."""
    parts: list[list[TracedCollective]] = []
    for last in parts_of_step(steps):
        with trace_collectives(list(steps.shard.stages.values())) as found:
            pass_batch(task, steps, batch)
            if last and steps.pipeline is not None:
                steps.pipeline.sync_tied()
        parts.append(found)
    return parts


def compare(traces: Mapping[int, Sequence[TracedCollective]], when: str = "a step") -> None:
    """Compare what ranks issue, group by group, and the messages between each two of them.

    Args:
        traces: of each rank, in its order.
        when: it issues them, for the message.

    Raises:
        CollectiveMismatchError: ranks differ, with the first difference.
    """
    by_rank = {rank: dict(by_group(trace)) for rank, trace in traces.items()}
    groups = sorted({group for found in by_rank.values() for group in found})
    for group in groups:
        members = [rank for rank in group if rank in traces]
        _compare_group(group, {rank: by_rank[rank].get(group, []) for rank in members}, when)
    _compare_messages(traces, when)


def _compare_group(
    group: Sequence[int], issued: Mapping[int, Sequence[TracedCollective]], when: str
) -> None:
    for at in range(max(map(len, issued.values()))):
        kinds: dict[Any, list[int]] = {}
        for rank, found in issued.items():
            kinds.setdefault(found[at].signature if at < len(found) else None, []).append(rank)
        if len(kinds) == 1:
            continue
        said = []
        for ranks in kinds.values():
            found = issued[ranks[0]]
            text = f"issue {found[at].text}" if at < len(found) else "issue none"
            said.append(f"{_ranks_in_words(ranks)} {text if len(ranks) > 1 else _single(text)}")
        raise CollectiveMismatchError(
            f"ranks would wait for each other forever: as collective {at + 1} of {when} in the "
            f"group of {_ranks_in_words(group)}, {', and '.join(said)}; have all ranks of a group "
            "issue the same collectives in the same order, whatever their rank"
        )


def _single(text: str) -> str:
    return text.replace("issue", "issues", 1)


def _compare_messages(traces: Mapping[int, Sequence[TracedCollective]], when: str) -> None:
    sent: dict[tuple[Any, ...], list[TracedCollective]] = {}
    received: dict[tuple[Any, ...], list[TracedCollective]] = {}
    unknown = set()
    for rank, trace in traces.items():
        for each in trace:
            if each.operation == "send":
                sent.setdefault((rank, each.peer), []).append(each)
            elif each.operation == "recv":
                received.setdefault((each.peer, rank), []).append(each)
            elif each.operation == "recv_any_source":
                unknown.add(rank)
    for pair in sorted({*sent, *received}):
        source, target = pair
        if source not in traces or target not in traces or target in unknown:
            continue
        given = sent.get(pair, [])
        taken = received.get(pair, [])
        for at in range(max(len(given), len(taken))):
            one = given[at] if at < len(given) else None
            other = taken[at] if at < len(taken) else None
            if one is not None and other is not None and one.tensors == other.tensors:
                continue
            first = f"issues {one.text}" if one is not None else "sends none"
            second = f"issues {other.text}" if other is not None else "receives none"
            raise CollectiveMismatchError(
                f"ranks would wait for each other forever: as message {at + 1} of {when} from rank "
                f"{source} to rank {target}, rank {source} {first}, and rank {target} {second}"
            )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks for a person.

    >>> _ranks_in_words([3]), _ranks_in_words([0, 2]), _ranks_in_words(range(64))
    ('rank 3', 'ranks 0 and 2', 'ranks 0, 1, 2, ..., 63 (64 ranks)')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        first = ", ".join(map(str, ranks[:3]))
        return f"ranks {first}, ..., {ranks[-1]} ({len(ranks)} ranks)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
