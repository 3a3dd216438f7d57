"""Decide whether ranks hang, by what each of them does: see `find_hang`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isthmus_datacenter.messages import Activity
from isthmus_datacenter.service.flight_recorder import Difference, describe, first_difference

ROUND_SHARE = 0.25
"""Share of `time.round_seconds` that a step may take if the job does not say how long."""
LONGEST_STEPS = 10
"""Longest steps so far that a step may take, in the same case."""
_ADVICE = "if the code was at work, set datacenter.hang_seconds above its longest step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangLimits:
    """The times of a job that bound a wait for other ranks."""

    lease_seconds: float = 10.0
    """Silence after which a rank counts as hung."""
    round_seconds: float = 600.0
    hang_seconds: float | None = None
    """Given by the user; None for the limits above."""


def find_hang(activities: Sequence[Activity], limits: HangLimits, *, trains: bool) -> str | None:
    """Return which ranks hang, at which line, and for how long; None if no rank does.

    No rank has got on in all that time: taken a step, begun or ended a collective, or left the
    function in which it is. The ranks hang if

      * all wait for each other in different collectives: for a lease, as that cannot end;
      * the user's code is at work on some ranks while others wait for them, in training: for a
        quarter of `time.round_seconds`, for ten longest steps, and for a lease;
      * otherwise, only for a time that the user has given. All ranks may be at work, or the
        network may be slow.

    Args:
        activities: of all ranks, each with a command.
        limits: of the job.
        trains: whether the command is one whose steps have a time limit.
    """
    seconds = min(each.seconds for each in activities)
    if seconds < limits.lease_seconds and limits.hang_seconds is None:
        return None
    difference = first_difference([each.collectives for each in activities])
    working = [rank for rank, each in enumerate(activities) if not each.waits]
    limit = limits.hang_seconds
    deadlock = not working and difference is not None and all(map(_has_begun, activities))
    if deadlock:
        limit = min(limit or limits.lease_seconds, limits.lease_seconds)
    elif limit is None:
        if not trains or not _keep_others_waiting(activities, working):
            return None
        longest = max(each.longest for each in activities)
        limit = max(
            limits.lease_seconds, ROUND_SHARE * limits.round_seconds, LONGEST_STEPS * longest
        )
    if seconds < limit:
        return None
    sentence = _sentence(activities, working, difference, seconds)
    return sentence if deadlock else f"{sentence}; {_ADVICE}"


def _has_begun(activity: Activity) -> bool:
    """Whether a collective is under way; code that waits for ranks may also read a checkpoint."""
    return any(not each.done for each in activity.collectives)


def _keep_others_waiting(activities: Sequence[Activity], working: Sequence[int]) -> bool:
    """Whether the user's code on the ranks that work keeps others waiting."""
    waiting = [
        rank
        for rank, each in enumerate(activities)
        if rank not in working or _waits_elsewhere(each)
    ]
    blamed = [rank for rank in working if rank not in waiting]
    return bool(waiting and blamed) and all(activities[rank].in_task for rank in blamed)


def _waits_elsewhere(activity: Activity) -> bool:
    """Whether a rank waits for others, and not in its main thread."""
    # A device waits in NCCL's collectives, while the main thread may be anywhere. In those of gloo
    # a thread waits that writes a checkpoint; the task's code may go on while one is under way.
    return any(
        not each.done and (each.group.startswith("nccl") or not activity.in_task)
        for each in activity.collectives
    )


def _sentence(
    activities: Sequence[Activity],
    working: Sequence[int],
    difference: Difference | None,
    seconds: float,
) -> str:
    # The rank that is behind is the first to look at, also where it waits itself.
    rank = difference.rank if difference is not None else (working or [0])[0]
    if working and rank not in working:
        rank = working[0]
    sentence = f"rank {rank} hung for {seconds:.0f} s at {activities[rank].where}"
    if difference is not None:
        if not working:
            # Either may be where it should not be.
            sentence += f", and rank {difference.other} at {activities[difference.other].where}"
        return f"{sentence} ({difference.sentence})"
    others = len(activities) - 1
    if others and working == [rank]:
        return f"{sentence} (the others wait for it)"
    return f"{sentence} (no rank gets on)" if others else sentence


def describe_ranks(activities: Sequence[Activity | None]) -> list[str]:
    """One line for each rank: where it is, and its last collectives."""
    lines = []
    for rank, activity in enumerate(activities):
        if activity is None:
            lines.append(f"rank {rank} has no command")
            continue
        what = "waits for other ranks" if activity.waits else "is"
        line = f"rank {rank} {what} at {activity.where}, for {activity.seconds:.0f} s"
        collectives = [
            f"{'after' if each.done else 'in'} {describe(each)}" for each in activity.collectives
        ]
        lines.append(", ".join([line, *collectives]))
    return lines
