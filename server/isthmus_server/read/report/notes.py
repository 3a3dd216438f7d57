"""What happened in a run besides its rounds, in sentences for people.

Receipts, and participants that declined or left, are told elsewhere: with their rounds and names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.printable import in_a_line
from isthmus.system.clocks import utc
from isthmus_server.read.report.late_devices import LateDevices
from isthmus_server.read.report.left_out_groups import more_than_withstood
from isthmus_server.read.report.suspected_devices import suspicions
from isthmus_server.read.report.unused_updates import unused_updates
from isthmus_server.storage.events import (
    Event,
    LayoutChanged,
    RunAdopted,
    RunBranched,
    ServerTakenOver,
)
from isthmus_server.storage.records import RoundRecord

_ROUNDS_NAMED = 5
"""Rounds that are named for one reason."""

COURSE = (RunAdopted.kind, ServerTakenOver.kind, RunBranched.kind, LayoutChanged.kind)
"""Kinds of the events that `course` tells of."""


def devices_to_look_at(job: Mapping[str, Any], rounds: Sequence[RoundRecord]) -> list[str]:
    """Devices that most likely lie, and whether there are more than the job withstands."""
    return [in_a_line(line) for line in suspicions(rounds) + more_than_withstood(job, rounds)]


def notes(rounds: Sequence[RoundRecord], events: Sequence[Event]) -> list[str]:
    """Incidents of rounds, devices without effect, late ones, evaluations on devices, the course.

    Args:
        rounds: the committed rounds, the oldest first.
        events: of the run's log, the oldest first.
    """
    lines = [f"round {record.round}: {told}" for record in rounds for told in record.incidents]
    lines += unused_updates(rounds)
    with_devices = sum(record.regime != "datacenter" for record in rounds)
    lines += LateDevices(events).sentences(with_devices)
    lines += [
        f"round {record.round}: {sentence}"
        for record in rounds
        if record.evaluation is not None
        for sentence in record.evaluation.clipped.values()
    ]
    lines += failed_evaluations(
        (record.round, record.evaluation.error or "")
        for record in rounds
        if record.evaluation is not None
    )
    return [*map(in_a_line, lines), *course(events)]


def failed_evaluations(errors: Iterable[tuple[int, str]]) -> list[str]:
    """In which rounds evaluations on devices failed, and why; a reason of several rounds once.

    `errors` are rounds with the errors of their evaluations, empty for one that did not fail.

    >>> failed_evaluations([(1, "no quorum"), (2, ""), (3, "no quorum")])
    ['rounds 1, 3: evaluations on devices failed: no quorum']
    """
    rounds: dict[str, list[int]] = {}
    for round_, error in errors:
        if error:
            rounds.setdefault(error, []).append(round_)
    lines = []
    for error, failed in rounds.items():
        if len(failed) == 1:
            lines.append(f"round {failed[0]}: an evaluation on devices failed: {error}")
            continue
        named = ", ".join(map(str, failed[:_ROUNDS_NAMED]))
        if others := failed[_ROUNDS_NAMED:]:
            named += f" and {len(others)} more up to {others[-1]}"
        lines.append(f"rounds {named}: evaluations on devices failed: {error}")
    return [in_a_line(line) for line in lines]


def course(events: Iterable[Event]) -> list[str]:
    """What became of the run: copies that took its place, takeovers, branches and layouts."""
    events = list(events)
    lines = [
        f"{event.by} had this copy take the place of {event.original}, and stated: {event.stated}"
        for event in events
        if isinstance(event, RunAdopted)
    ]
    lines += [
        f"{event.sentence} ({utc(event.at)})"
        for event in events
        if isinstance(event, ServerTakenOver)
    ]
    lines += [
        f"the rounds up to {event.round} are those of another run, of which this is a branch"
        for event in events
        if isinstance(event, RunBranched)
    ]
    # Only the last of several layouts in one round was trained in.
    layouts = {each.round: each for each in events if isinstance(each, LayoutChanged)}
    lines += [
        f"ranks train in another layout from round {each.round} on: "
        + ", ".join(f"{key}={json.dumps(value)}" for key, value in each.changes.items())
        for each in layouts.values()
    ]
    return [in_a_line(line) for line in lines]
