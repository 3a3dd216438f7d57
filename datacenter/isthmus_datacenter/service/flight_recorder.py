"""The last collectives of each rank, from PyTorch's flight recorder, and where the ranks differ.

PyTorch numbers the collectives of each process group, of NCCL and of gloo, and keeps the last ones
in a ring. They are read only where a rank does not get on; messages from one rank to another, as in
a pipeline, have no numbers that can be compared.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as native

from isthmus_datacenter.messages import Collective

ENTRIES = 512
"""Collectives of a rank that are kept: those of all its groups in some steps."""
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Environment variables that set the number; the second one is the older name."""
_SAME_SIZES = ("all_reduce", "broadcast")
"""Collectives that need tensors of the same size on all ranks."""


def recorder_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks that record their collectives, unless their owner has set one.

    >>> recorder_environment({"TORCH_NCCL_TRACE_BUFFER_SIZE": "20"})
    {}
    """
    if any(name in environment for name in _SIZE_VARIABLES):
        return {}
    return {_SIZE_VARIABLES[0]: str(ENTRIES)}


def recorder_status() -> str:
    """The numbers of the last collectives that this process began and completed, by group.

    Another text whenever one was begun or completed; always the same one in a version of PyTorch
    without a recorder.
    """
    return "".join(dump.decode(errors="replace") for dump in _dumps(entries=False))


def last_collectives() -> list[Collective]:
    """For each of this process's groups the collective that is under way, or else the last one.

    None if this version of PyTorch writes them in another form, which is not a public one.
    """
    try:
        return _last_collectives()
    except (KeyError, TypeError, ValueError):
        return []


def _last_collectives() -> list[Collective]:
    entries: list[Mapping[str, Any]] = []
    for dump in _dumps(entries=True):
        entries += json.loads(dump).get("entries", [])
    by_group: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for entry in entries:
        # Messages between two ranks have numbers of their own.
        if not entry["is_p2p"]:
            backend = entry["profiling_name"].partition(":")[0]
            by_group[f"{backend} {entry['process_group'][0]}"].append(entry)
    return [_collective(group, by_group[group]) for group in sorted(by_group)]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first collective in which a rank differs from others of its group."""

    rank: int
    other: int
    """One of the ranks that it differs from."""
    sentence: str
    """A clause for a person."""


def first_difference(by_rank: Sequence[Sequence[Collective]]) -> Difference | None:
    """Compare what `last_collectives` returned on each rank; None if no group's ranks differ.

    Collectives are compared within a group only: ranks of different groups may differ.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, Collective]] = {}
    for rank, last in enumerate(by_rank):
        for each in last:
            members = tuple(each.ranks) or tuple(range(len(by_rank)))
            groups.setdefault((each.group, members), {})[rank] = each
    for (_, members), entries in sorted(groups.items()):
        positions = {rank: each.position for rank, each in entries.items()}
        if min(positions.values()) == 1:
            # A rank that has begun none of a group has no entry of it. Later the ring may have
            # lost its entries.
            positions |= {rank: 1 for rank in members if rank not in entries}
        difference = _difference(entries, positions)
        if difference is not None:
            return difference
    return None


def _difference(
    entries: Mapping[int, Collective], positions: Mapping[int, int]
) -> Difference | None:
    """The difference within one group; `positions` has the number where each rank is."""
    under_way = {rank: each for rank, each in entries.items() if not each.done}
    if not under_way:
        return None
    number = min(positions.values())
    behind = [rank for rank, position in positions.items() if position == number]
    ahead = {rank: each for rank, each in under_way.items() if each.position > number}
    here = {rank: each for rank, each in under_way.items() if each.position == number}
    absent = [rank for rank in behind if rank not in here]
    if absent and here:
        others = _named(here)
        return Difference(
            absent[0],
            min(here),
            f"{_named(absent)} {_has(absent)} not begun {_first(here)}, in which {others} "
            f"{_wait(here)}",
        )
    if absent and ahead:
        return Difference(
            absent[0],
            min(ahead),
            f"{_named(absent)} {_has(absent)} not begun collective {number} "
            f"{_of(_value(ahead))}, and {_named(ahead)} {_wait(ahead)} in {_first(ahead)}",
        )
    if here and ahead:
        return Difference(
            min(here),
            min(ahead),
            f"{_named(here)} {_wait(here)} in {_first(here)}, and {_named(ahead)} in "
            f"{_first(ahead)}",
        )
    return _other_call(here)


def _other_call(here: Mapping[int, Collective]) -> Difference | None:
    """Ranks that are in the same collective by its number, and have called something else."""
    for named in (_operation, _operation_with_size):
        calls = {rank: named(each) for rank, each in here.items()}
        counts = collections.Counter(calls.values())
        if len(counts) < 2:
            continue
        # The rarest is the odd one out; of two that are as frequent, that of the higher ranks.
        rarest = min(reversed(calls.values()), key=lambda call: counts[call])
        odd = [rank for rank, call in calls.items() if call == rarest]
        others = [rank for rank in calls if rank not in odd]
        each = here[odd[0]]
        return Difference(
            odd[0],
            others[0],
            f"collective {each.number} {_of(each)} is {rarest} on {_named(odd)} and "
            f"{calls[others[0]]} on {_named(others)}",
        )
    return None


def describe(collective: Collective) -> str:
    """One collective in words, such as `all_reduce 17 of axis 'tensor'`.

    >>> describe(Collective(group="gloo 0", axis="", ranks=[], number=17, operation="barrier",
    ...     elements=0, done=True))
    'barrier 17 of all ranks'
    """
    return f"{collective.operation} {collective.number} {_of(collective)}"


def _of(collective: Collective) -> str:
    if collective.axis:
        return f"of axis {collective.axis!r}"
    return f"of {_named(collective.ranks)}" if collective.ranks else "of all ranks"


def _operation(collective: Collective) -> str:
    return collective.operation


def _operation_with_size(collective: Collective) -> str:
    # Others may have unequal parts.
    if collective.operation not in _SAME_SIZES:
        return collective.operation
    return f"{collective.operation} of {collective.elements:,} elements"


def _value(by_rank: Mapping[int, Collective]) -> Collective:
    return by_rank[min(by_rank)]


def _first(by_rank: Mapping[int, Collective]) -> str:
    return describe(_value(by_rank))


def _named(ranks: Iterable[int]) -> str:
    """The ranks in words; of many only the first.

    >>> _named([1]), _named([0, 2]), _named(range(8))
    ('rank 1', 'ranks 0 and 2', 'rank 0 and 7 others')
    """
    first, *others = sorted(ranks)
    if not others:
        return f"rank {first}"
    if len(others) == 1:
        return f"ranks {first} and {others[0]}"
    return f"rank {first} and {len(others)} others"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Iterable[int]) -> str:
    return "waits" if len(list(ranks)) == 1 else "wait"


def _collective(group: str, entries: Sequence[Mapping[str, Any]]) -> Collective:
    """The first collective of a group that is not done, or else the last one."""
    under_way = [each for each in entries if not _is_done(each)]
    entry = (
        min(under_way, key=lambda each: int(each["collective_seq_id"]))
        if under_way
        else max(entries, key=lambda each: int(each["collective_seq_id"]))
    )
    name, description = entry["process_group"]
    return Collective(
        group=group,
        axis=description.removeprefix("mesh_") if description.startswith("mesh_") else "",
        ranks=_members(name),
        number=int(entry["collective_seq_id"]),
        operation=entry["profiling_name"].partition(":")[2],
        elements=sum(_product(size) for size in entry["input_sizes"]),
        done=not under_way,
    )


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _members(name: str) -> list[int]:
    """The ranks of a group; empty for all ranks."""
    try:
        group = native._resolve_process_group(name)  # type: ignore[arg-type]  # a `str` at run time
        ranks = dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError):  # one that has ended meanwhile
        return []
    return [] if len(ranks) == dist.get_world_size() else ranks


def _product(size: Iterable[int]) -> int:
    product = 1
    for each in size:
        product *= each
    return product


def _dumps(*, entries: bool) -> list[bytes]:
    """JSON of the recorders that this version of PyTorch has, with their collectives or without."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [
        getattr(native, name)(includeCollectives=entries) for name in names if hasattr(native, name)
    ]
