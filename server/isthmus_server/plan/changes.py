"""What would change a plan: the same figures for jobs with some keys changed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus.job.datacenter import DatacenterSection
from isthmus.job.exchange import Compression
from isthmus.job.planned import FAKE, Figure, PlannedRanks, RanksQuestion
from isthmus.job.unused_layout import SHARING_KEYS
from isthmus.task import Task
from isthmus_server.plan.adapters import adapted_task
from isthmus_server.plan.changed_durations import OF_DATACENTER, Durations, RoundsOfSides
from isthmus_server.plan.cost import beyond
from isthmus_server.plan.sides import Sides

OVER_SELECTION = 1.25
"""Devices that a changed plan invites for each update that is wanted."""
_SAME_SPEED = 0.005
"""Difference of two speeds, as a part of them, that is not told."""
ADAPTER_RANK = 8
"""Rank of the adapters of a changed plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangedPlan:
    """The main figures of a job with something changed."""

    name: str
    changes: Mapping[str, Any]
    """Keys of the job and their values; empty for the job itself."""
    figures: list[Figure] = dataclasses.field(default_factory=list)
    refused: str = ""
    """Why the job cannot be changed so, or the memory of a rank is not known."""
    notes: Sequence[str] = ()
    """What is to be known of the figures, clauses: a cost beyond the budget, other devices."""

    @classmethod
    def of(
        cls,
        name: str,
        changes: Mapping[str, Any],
        sides: Sides,
        before: Sides,
        budget: float | None,
        times: RoundsOfSides,
        more: Sequence[str] = (),
    ) -> ChangedPlan:
        """Pick the main figures of all sides.

        Args:
            name: of the change.
            changes: keys of the job and their values.
            sides: of the changed job, with what failed attempts cost.
            before: those of the job as it is.
            budget: of the job; None for none.
            times: of rounds of the changed job.
            more: notes of this change.
        """
        figures = []
        refused = ""
        ranks = sides.datacenter
        if ranks is not None and not ranks.layout.peak:
            refused = f"memory of a rank: {ranks.layout.refused}"
        elif ranks is not None:
            figures.append(Figure("peak of a rank", ranks.layout.peak, "bytes", FAKE))
        if sides.devices is not None:
            down, up = sides.devices.run
            figures += [down, up]
        figures += times.figures
        figures += sides.privacy
        cost = sides.cost[-1:]
        figures += cost
        notes = [*more, *_other_steps(sides, before), *times.notes]
        notes += [f"cost: {mark}" for each in cost if (mark := beyond(each, budget))]
        clients = changes.get("federated.clients")
        if clients is not None:
            notes.append(
                f"with federated.clients={clients}, among whom the task may divide its data anew"
            )
        return cls(name=name, changes=changes, figures=figures, refused=refused, notes=notes)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "figures": [each.to_json() for each in self.figures],
            "refused": self.refused,
            "notes": list(self.notes),
        }


def _other_steps(sides: Sides, before: Sides) -> list[str]:
    """A clause on a step that has other examples than that of the job as it is; or none."""
    ranks = sides.datacenter
    own = before.datacenter
    if ranks is None or own is None or ranks.examples == own.examples:
        return []
    return [f"a step of the ranks has {ranks.examples:,} examples, and not {own.examples:,}"]


def _about_one_rank(
    sides: Sides,
    times: RoundsOfSides,
    before: Sides,
    times_before: RoundsOfSides,
    memory_gib: float | None,
) -> list[str]:
    """Whether one rank would do, by its memory and its time, clauses; none if neither is known.

    Args:
        sides: of the job on one rank.
        times: of its rounds.
        before: sides of the job as it is, on more ranks.
        times_before: of its rounds.
        memory_gib: of a rank; None if it is not known.
    """
    one = sides.datacenter
    own = before.datacenter
    if one is None or own is None or not one.layout.peak:
        return []
    found = []
    if memory_gib is not None and one.layout.peak <= memory_gib * 2**30:
        found.append(f"one rank is enough for the memory: its peak fits {memory_gib:.4g} GiB")
    took, took_before = (
        [each.value for each in of.figures if each.name == OF_DATACENTER]
        for of in (times, times_before)
    )
    if took and took_before and took[0] and took_before[0]:
        ratio = (own.examples / took_before[0]) / (one.examples / took[0])
        found.append(_compared_with_one(ratio, own.ranks))
    return found


def _compared_with_one(ratio: float, ranks: int) -> str:
    """How many examples ranks train a second, and how many one does, a clause.

    >>> _compared_with_one(0.5, 4)
    'one rank trains 2 times as many examples a second as the 4 ranks'

    Args:
        ratio: what the ranks train, by what one trains.
        ranks: how many there are.
    """
    if abs(ratio - 1) < _SAME_SPEED:
        return "one rank trains as many examples a second"
    if ratio < 1:
        times = f"{1 / ratio:.2g} times"
        return f"one rank trains {times} as many examples a second as the {ranks} ranks"
    return f"the {ranks} ranks train {ratio:.2g} times as many examples a second as one"


def changed_plans(
    job: Job, task: Task, base: Path, ranks: int, sides: Sides, durations: Durations
) -> Iterator[ChangedPlan]:
    """The figures of the job with one thing changed at a time, all by the code of the plan itself.

    Args:
        job: the job.
        task: its task.
        base: the job file's folder.
        ranks: of the datacenter; 0 for none.
        sides: of the job as it is.
        durations: of the job as it is, and of changed ones.
    """
    options = durations.options
    question = RanksQuestion(on_gpus=options.on_gpus, traffic=options.gpu is not None)

    def planned(
        name: str,
        changes: Mapping[str, Any],
        task: Task,
        number: int,
        known: PlannedRanks | None,
        *,
        own_task: bool = True,
    ) -> ChangedPlan:
        """One of them; `known` is the datacenter's part if only devices are changed."""
        try:
            changed = with_changes(job, changes)
            if changed.datacenter != job.datacenter:
                known = None
            found = Sides.of(changed, task, base, number, question, known=known)
            found = _with_rate(found, sides)
            if own_task:
                took = durations.of_changed(changed, found, job)
            else:
                took = durations.of_another_task(changed, found)
            found = found.with_failed(took.failed)
        except UserError as error:
            return ChangedPlan(name=name, changes=changes, refused=str(error))
        more = []
        if number == 1 < ranks and sides.datacenter is not None:
            as_it_is = durations.of(job, sides)
            more = _about_one_rank(found, took, sides, as_it_is, options.memory_of_rank)
        return ChangedPlan.of(name, changes, found, sides, job.budget, took, more)

    found_changes = itertools.chain(
        # Of a job without rounds of devices they would be the job as it is again.
        _changes_of_devices(job, ranks) if sides.devices is not None else (),
        _changes_of_ranks(job, ranks) if sides.datacenter is not None else (),
    )
    for name, changes, number in found_changes:
        known = sides.datacenter if number == ranks else None
        yield planned(name, changes, task, number, known)
    adapted = adapted_task(task, ADAPTER_RANK)
    yield planned(
        f"adapters of rank {ADAPTER_RANK}, frozen base", {}, adapted, ranks, None, own_task=False
    )


def _with_rate(changed: Sides, sides: Sides) -> Sides:
    """The sides of a changed job with the rate of a rank that was measured for the job."""
    if changed.datacenter is None or sides.datacenter is None:
        return changed
    ranks = dataclasses.replace(changed.datacenter, rate=sides.datacenter.rate)
    return dataclasses.replace(changed, datacenter=ranks)


def _changes_of_devices(job: Job, ranks: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Names, changed keys and numbers of ranks of changes to rounds of devices."""
    federated = job.federated
    cohorts = {"cohort x 2": 2 * federated.cohort, "cohort / 2": federated.cohort // 2}
    for name, cohort in cohorts.items():
        changes: dict[str, Any] = {"federated.cohort": cohort}
        if federated.quorum is not None:
            changes["federated.quorum"] = max(1, federated.quorum * cohort // federated.cohort)
        if 0 < federated.clients < cohort:
            changes["federated.clients"] = cohort
        yield name, changes, ranks
    if federated.mode == "rounds":
        share = OVER_SELECTION if federated.over_selection == 1 else 1.0
        changes = {"federated.over_selection": share}
        invited = federated.model_copy(update={"over_selection": share}).invited
        if 0 < federated.clients < invited:
            changes["federated.clients"] = invited
        yield f"over-selection {share:g}", changes, ranks
    for bits in (2, 3, 4, 8):
        yield from _with_bits(job, ranks, bits)


def _changes_of_ranks(job: Job, ranks: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Names, changed keys and numbers of ranks of changes to rounds of the datacenter."""
    part = _least_divisor(ranks)
    numbers = {"ranks x 2": 2 * ranks, f"ranks / {part}": ranks // part}
    for name, number in numbers.items():
        if number != ranks:
            yield name, {"datacenter.ranks": number} if job.datacenter.ranks else {}, number
    alone = _on_one_rank(job)
    is_shared = bool(alone.keys() - {"datacenter.ranks"})
    if ranks > 1 and (ranks // part > 1 or is_shared):
        yield "one rank", alone, 1
    if job.datacenter.zero_stage != 3:
        yield "ZeRO 3", {"datacenter.zero_stage": 3}, ranks


def _on_one_rank(job: Job) -> dict[str, Any]:
    """Keys of a job with which one rank has the whole model; ZeRO shards nothing over it."""
    section = job.datacenter
    found: dict[str, Any] = {"datacenter.ranks": 1} if section.ranks else {}
    for key in SHARING_KEYS:
        usual = DatacenterSection.model_fields[key].default
        if key != "zero_stage" and getattr(section, key) != usual:
            found[f"datacenter.{key}"] = usual
    return found


def _least_divisor(number: int) -> int:
    """The least divisor above 1, of which 1 has none but itself.

    >>> [_least_divisor(number) for number in (1, 2, 9, 35)]
    [1, 2, 3, 5]
    """
    return next((each for each in range(2, number) if not number % each), number)


def _with_bits(job: Job, ranks: int, bits: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Another number of bits for elements of updates: of secure sums, or of single updates."""
    federated = job.federated
    if federated.secure_aggregation:
        before = federated.compression
        one_in = (Compression.model_validate({}) if before is None else before).one_in
        # Fewer elements than all are sent, so that the bits alone do not say how many bytes are.
        sent = f"updates of {bits} bits, one element in {one_in}"
        name = sent if one_in > 1 else f"updates of {bits} bits"
        if before is None and bits in (3, 8):
            yield name, {"federated.compression": {"bits": bits}}, ranks
        elif before is not None and before.bits != bits:
            yield name, {"federated.compression.bits": bits}, ranks
        return
    settings = {"bits": bits}
    if federated.codec in (None, "rounded") and federated.codec_settings != settings:
        changes = {"federated.codec": "rounded", "federated.codec_settings": settings}
        yield f"updates of {bits} bits", changes, ranks
