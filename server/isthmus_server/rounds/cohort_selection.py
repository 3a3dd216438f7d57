"""Select the cohort of a round, or of a comparison, among the devices that are available.

Devices that may have unmasked a secure sum take part in another one of the same model, or round,
only with exactly the same survivors (see `isthmus_server.storage.unmasking_log`). So a cohort is

    1. exactly the survivors of such a sum, if all of them are available; else
    2. the usual selection, among the available devices that have unmasked no such sum; else
    3. the groups of such a sum whose devices are all available, if the quorum is in them; else
    4. nothing: the round waits, or the datacenter changes the model first.

In buffered mode the second case comes first, as any devices may fill a buffer.

A sum of ranges of a group that a crash has lost keeps nobody from a round: the same groups are
invited again, and a group with other devices is summed without ranges.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from isthmus.errors import RoundFailed
from isthmus.job import Job
from isthmus.job.federated import MIN_ROBUST_GROUPS, FederatedSection
from isthmus.job.measurements import evaluations_run_id
from isthmus.task import paired_scores
from isthmus.wire import link_pb2
from isthmus_privacy.crypto.canonical import NUMBER, tagged_hash
from isthmus_privacy.purpose import buffer_name, ranged_model, ranges_run_id
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.lottery import MILLION
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.ticket_selection import TicketLottery
from isthmus_server.storage.range_log import RangeLog
from isthmus_server.storage.records import PlannedAttempt
from isthmus_server.storage.unmasking_log import Unmasking, UnmaskingLog
from isthmus_server.strategy.device_selection import select_devices
from isthmus_server.strategy.gradients import REST
from isthmus_server.strategy.selection import CheckedSelection, SelectionRequest
from isthmus_server.transport.enrolment import Enrolments

_EVALUATIONS = 1 << 32
"""Selections for evaluations are numbered from here on, apart from those of comparisons."""

MAX_GROUPS = 32
"""Groups in one round: each takes memory for a model, and a row in the log of unmaskings."""


@dataclasses.dataclass(frozen=True)
class SelectedCohort:
    """The devices of a round, with the number of examples each declared, and their lottery."""

    examples: Mapping[str, int]
    draw: int = 0
    """Draw in which they were selected by their tickets; 0 without tickets."""
    selected_ppm: int = MILLION
    shortage: str = ""
    """Why these are fewer than the round needs, if tickets or the selection are the reason."""
    exact: bool = False
    """Whether only the sum of all of them is allowed, or of all in each group."""
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Devices of each group that is summed by itself, and of the rest; empty for one sum."""
    refused: bool = False
    """Whether the server has refused the sum that is repeated; there are no other devices."""


SUM_REFUSED = "the sum that the others have unmasked was refused"
"""What keeps devices from a sum of a model where one of them lied, or has a fault."""

MEND_SUM = (
    "they take part for this model only together, and would give that sum again, so the run "
    "needs as many other devices, or a datacenter, whose round gives another model; else submit "
    "the job with another seed"
)
"""What a run needs then."""


class NoAllowedCohort(RoundFailed):
    """Too few devices may take part in a sum of this model."""

    def __init__(
        self, missing: Collection[str], allowed: int, needed: int, *, refused: bool = False
    ) -> None:
        """Describe it; `refused`: the server has their sum, and has refused it."""
        self.missing = tuple(sorted(missing))
        """Devices with which a cohort would be allowed; empty if no known set would be."""
        names = ", ".join(self.missing[:8]) + (", ..." if len(self.missing) > 8 else "")
        wait = f"it needs {names}, or others"
        if refused:
            wait = f"{SUM_REFUSED}: {MEND_SUM}"
        elif not self.missing:
            wait = "it needs other devices, or a job with another seed, which gives another model"
        super().__init__(
            f"{allowed} available devices have not unmasked a secure sum of this model and the "
            f"quorum is {needed}; {wait}"
        )


class SameDevicesMissing(NoAllowedCohort):
    """The devices of the run's first evaluation are not all available (`same_devices`)."""

    def __init__(self, devices: int, missing: Collection[str]) -> None:
        self.missing = tuple(sorted(missing))
        names = ", ".join(self.missing[:8]) + (", ..." if len(self.missing) > 8 else "")
        RoundFailed.__init__(
            self,
            f"all evaluations of this run are on the {devices} devices of its first one "
            f"(evaluation.same_devices), and {names or 'their draw'} cannot take part now",
        )


class CohortSelector:
    """Selects the devices of a round by the job's settings, and by what they have unmasked."""

    def __init__(
        self,
        job: Job,
        roster: ParticipantRoster,
        availability: DeviceAvailability,
        clock: Clock,
        enrolments: Enrolments,
        run_id: str,
        unmaskings: UnmaskingLog,
        ranges: RangeLog,
    ) -> None:
        """Load the selection that the job names.

        Raises:
            UserError: it cannot be used.
        """
        self._job = job
        self._roster = roster
        self._availability = availability
        self._clock = clock
        self._lottery = TicketLottery(enrolments) if enrolments.requires_tickets else None
        """Selects for secure sums; None if devices do not require tickets."""
        self._run_id = run_id
        self._unmaskings = unmaskings
        self._ranges = ranges
        self._repeated: PlannedAttempt | None = None
        self._replayed: PlannedAttempt | None = None
        self._replayed_groups: Mapping[str, Sequence[str]] = {}
        self._selection = CheckedSelection(job.federated)

    async def repeat(self, interrupted: PlannedAttempt) -> None:
        """Wait for the devices of an attempt that a crash interrupted, to invite the same again.

        The same cohort gives the same model. If not all of them return in time, the round selects
        as usual.
        """
        settings = self._job.federated
        summed = settings.secure_aggregation and settings.mode != "buffered"
        invited = interrupted.invited
        if summed and invited and await self._roster.wait_for(devices=invited):
            self._repeated = interrupted

    async def replay(
        self, planned: PlannedAttempt, groups: Mapping[str, Sequence[str]] | None = None
    ) -> bool:
        """Select exactly the devices of a recorded plan for its round, also if others are ready.

        `groups`: its random groups, if it has any. Returns whether all of its participants are
        ready.
        """
        self._replayed = planned
        self._replayed_groups = groups or {}
        return await self._roster.wait_for(devices=planned.invited, datacenters=planned.datacenters)

    def select(
        self,
        round_: int,
        settings: FederatedSection,
        model_hash: bytes | None,
        busy: Collection[str] = (),
    ) -> SelectedCohort:
        """The devices of a round.

        In buffered mode these are the devices that may be asked while the buffer fills, without
        the `busy` ones that are already training.

        Args:
            round_: its number.
            settings: with its cohort and quorum.
            model_hash: SHA-256 of the model that devices receive; None if no device has had it.
            busy: devices that train across rounds, in buffered mode.

        Raises:
            NoAllowedCohort: too few devices may take part.
        """
        replayed = self._replayed
        if replayed is not None and replayed.round == round_:
            recorded = self._cohort(sorted(replayed.invited))
            return dataclasses.replace(recorded, groups=self._replayed_groups)
        ready = set(self._roster.available()) - set(busy)
        if settings.mode == "buffered":
            unmasked = self._unmasked(round_, None, buffer_name(self._run_id, round_), ready)
            allowed = ready - _devices_of(unmasked)
            if unmasked and len(allowed) + len(busy) < settings.needed:
                return self._buffer_again(round_, unmasked, allowed, ready, settings)
            return self._usual(round_, allowed, settings.concurrency + settings.cohort)
        if not settings.secure_aggregation:
            return self._usual(round_, ready, settings.invited, settings.needed)
        unmasked = self._unmasked(round_, model_hash, model_hash, ready, settings.needed)
        summed = self._unmaskings.about(self._run_id, round_, model_hash)
        again = self._groups_again(round_, summed, ready, settings)
        if again is None and settings.robust is None:  # one sum is no robust one
            again = self._survivors_again(round_, unmasked, ready, settings)
        if again is not None:
            return self._unless_refused(again, round_, unmasked, ready, settings, settings.invited)
        interrupted = self._interrupted_again(round_, unmasked, ready, settings)
        if interrupted is not None:
            return interrupted
        try:
            usual = self._secure(round_, unmasked, ready, settings, settings.invited)
        except NoAllowedCohort:
            complete = self._complete_groups_again(round_, summed, ready, settings)
            if complete is None:
                raise
            return complete
        if settings.robust is not None:
            usual = self.in_random_groups(round_, usual, settings)
        if usual.shortage:
            return self._complete_groups_again(round_, summed, ready, settings) or usual
        return usual

    def _unless_refused(
        self,
        again: SelectedCohort,
        round_: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
        count: int,
    ) -> SelectedCohort:
        """Other devices in place of those whose sum the server has refused, if there are enough.

        The same devices give the same vectors again, and the sum would be refused again, unless one
        of them had a fault that has passed.
        """
        refused = filter(self._unmaskings.is_refused_sum, unmasked)
        if not any(entry.devices & again.examples.keys() for entry in refused):
            return again
        try:
            others = self._secure(round_, unmasked, ready, settings, count)
        except NoAllowedCohort:
            others = None
        if others is None or others.shortage or len(others.examples) < settings.needed:
            return dataclasses.replace(again, refused=True)
        return others

    def by_group(self, selected: SelectedCohort, settings: FederatedSection) -> SelectedCohort:
        """Split a cohort into the groups that are large enough, and the rest.

        Unchanged, with one sum of all devices, if there would be one part only, if the rest is too
        small to be summed, or if the sum of all has to be repeated.
        """
        if selected.exact:
            return selected
        parts: dict[str, list[str]] = {}
        for name in sorted(selected.examples):
            parts.setdefault(self._roster.clients[name].group, []).append(name)
        rest = parts.pop(REST, [])
        by_size = sorted(parts, key=lambda group: (-len(parts[group]), group))
        for at, group in enumerate(by_size):
            if at >= MAX_GROUPS or not self._can_be_summed(parts[group], selected, settings):
                rest += parts.pop(group)
        if rest and not self._can_be_summed(rest, selected, settings):
            return selected
        groups = dict(sorted(parts.items())) | ({REST: sorted(rest)} if rest else {})
        return dataclasses.replace(selected, groups=groups if len(groups) > 1 else {})

    def in_random_groups(
        self, round_: int, selected: SelectedCohort, settings: FederatedSection
    ) -> SelectedCohort:
        """Divide a cohort into random groups, each of which is summed by itself.

        As many as the job has if the devices suffice, else fewer; the same devices make the same
        groups. With a lottery nobody chooses who is in which: it follows from the draw, and devices
        in groups that cannot be summed are left out. With a shortage, if there are too few groups.
        Groups that are repeated stay.
        """
        if selected.exact or selected.shortage or selected.groups:
            return selected
        for count in range(settings.robust_groups, MIN_ROBUST_GROUPS - 1, -1):
            groups = self._divided(round_, selected, count)
            parts = {name: settings.for_group(len(each)) for name, each in groups.items()}
            summed = {name: each for name, each in groups.items() if parts[name] is not None}
            devices = {name for each in summed.values() for name in each}
            if self._lottery is None and len(summed) < count:
                # Fewer groups have all devices. A plan has no groups, and after a crash its devices
                # are divided again: without some of them they would be dealt in another way.
                continue
            if len(summed) >= MIN_ROBUST_GROUPS and len(devices) >= settings.needed:
                examples = {name: selected.examples[name] for name in sorted(devices)}
                return dataclasses.replace(selected, examples=examples, groups=summed)
        few = (
            f"{len(selected.examples)} devices are ready, too few for {MIN_ROBUST_GROUPS} random "
            f"groups of at least {settings.robust_minimum} devices, with a quorum of "
            f"{settings.needed} in all, for federated.robust={settings.robust!r}"
        )
        return dataclasses.replace(selected, shortage=few)

    def _divided(
        self, round_: int, selected: SelectedCohort, count: int
    ) -> dict[str, Sequence[str]]:
        """The devices of each of so many random groups."""
        if self._lottery is not None:
            return dict(self._lottery.groups_of(selected.examples, selected.draw, count))
        # Equally many in each, in an order that follows from the seed and the round alone.
        seed = self._job.seed
        order = {
            name: tagged_hash(
                "random-group", NUMBER.write(seed), NUMBER.write(round_), name.encode()
            )
            for name in selected.examples
        }
        dealt = sorted(order, key=order.__getitem__)
        groups: dict[str, Sequence[str]] = {}
        for index in range(count):
            groups[RandomGroup(index + 1, count).name] = sorted(dealt[index::count])
        return groups

    def _can_be_summed(
        self, names: Collection[str], selected: SelectedCohort, settings: FederatedSection
    ) -> bool:
        part = settings.for_group(len(names))
        if part is None or self._lottery is None:
            return part is not None
        return self._lottery.accepts(names, selected.selected_ppm, part.needed)

    def select_for_comparison(
        self, number: int, settings: FederatedSection, models_hash: bytes
    ) -> SelectedCohort:
        """The devices that score models; every attempt selects the same if it can.

        Args:
            number: of the comparison.
            settings: with its cohort and quorum.
            models_hash: SHA-256 of the compared models.

        Raises:
            NoAllowedCohort: too few devices may take part.
        """
        ready = set(self._roster.available(measured=True))
        # Negative numbers select apart from the cohorts of rounds.
        if not settings.secure_aggregation:
            return self._usual(-number, ready, settings.cohort)
        run_id = paired_scores.comparisons_run_id(self._run_id)
        unmasked = self._unmaskings.about(run_id, number, models_hash)
        again = self._survivors_again(-number, unmasked, ready, settings)
        count = settings.cohort
        if again is not None:
            return self._unless_refused(again, -number, unmasked, ready, settings, count)
        return self._secure(-number, unmasked, ready, settings, count)

    def select_for_evaluation(
        self, round_: int, settings: FederatedSection, name: bytes, busy: Collection[str]
    ) -> SelectedCohort:
        """The devices that evaluate the model of a round; by group if the job has groups.

        Args:
            round_: its number; every attempt selects the same devices if it can.
            settings: with the cohort and quorum of an evaluation.
            name: of the evaluated model, see `isthmus_privacy.purpose.evaluated_model`.
            busy: devices that are training across rounds.

        Raises:
            NoAllowedCohort: too few devices may take part.
        """
        ready = set(self._roster.available(measured=True)) - set(busy)
        number = -(_EVALUATIONS + round_)
        if not settings.secure_aggregation:
            return self._usual(number, ready, settings.cohort)
        run_id = evaluations_run_id(self._run_id)
        unmasked = self._unmaskings.about(run_id, round_, name)
        same = self._job.evaluation.same_devices
        if same:
            # As if all models were one: exactly the survivors of the first evaluation, or nobody.
            unmasked = self._unmaskings.of_run(run_id)
        again = self._groups_again(number, unmasked, ready, settings) or self._survivors_again(
            number, unmasked, ready, settings
        )
        if again is not None and not same:
            again = self._unless_refused(again, number, unmasked, ready, settings, settings.cohort)
            split = settings.groups is not None and not again.exact
            return self.by_group(again, settings) if split else again
        if again is not None:
            return again
        if same and (first := _devices_of([each for each in unmasked if not each.refused])):
            raise SameDevicesMissing(len(first), first - ready)
        selected = self._secure(number, unmasked, ready, settings, settings.cohort)
        return selected if settings.groups is None else self.by_group(selected, settings)

    def measurable(self) -> tuple[int, int]:
        """Ready devices with privacy budget left for evaluations and comparisons, and all."""
        names = self._roster.clients
        return len(names) - sum(map(self._availability.is_measured_out, names)), len(names)

    def note_asked(self, names: Collection[str], draw: int) -> None:
        """Note that the devices of a secure sum are asked now, in its draw."""
        if self._lottery is not None and draw:
            self._lottery.note_asked(names, draw)

    def is_outdated(self, names: Collection[str], draw: int) -> bool:
        """Whether devices would refuse a draw, because other jobs have asked them in later ones."""
        if self._lottery is None or not draw:
            return False
        return self._lottery.is_outdated(names, draw, self._clock.utc())

    def seconds_until_quorum(self) -> float | None:
        """Seconds until a quorum of the ready devices is available; None if it never is."""
        if len(self._roster.available()) >= (needed := self._job.federated.needed):
            return 0.0
        waits = sorted(map(self._roster.seconds_until_available, self._roster.clients))
        wait = waits[needed - 1] if len(waits) >= needed else math.inf
        return None if wait == math.inf else wait

    def awaits_others(self) -> bool:
        """Whether a quorum needs devices that are known and not ready, and may be one with them."""
        if self.seconds_until_quorum() is not None:
            return False
        roster = self._roster
        left = sum(roster.seconds_until_available(name) < math.inf for name in roster.clients)
        needed = self._job.federated.needed
        # Of fewer devices than a quorum nobody knows how many more will join.
        return len(roster.clients) >= needed and roster.may_come(needed - left)

    def _unmasked(
        self,
        round_: int,
        model_hash: bytes | None,
        name: bytes | None,
        ready: Collection[str],
        needed: int = 0,
    ) -> list[Unmasking]:
        """Sums of updates, and of ranges of which only the devices may know, newest first.

        `name` is what their configurations name: the model, or what takes its place. `needed`: a
        sum of ranges of fewer devices is that of a group.
        """
        unmasked = self._unmaskings.about(self._run_id, round_, model_hash)
        if name is None or not self._job.finds_ranges:
            return unmasked
        if self._ranges.of(round_, name, "") or self._ranges.of_other_groups(round_, name, ""):
            return unmasked  # what the server has is not summed again
        ranges = self._unmaskings.about(ranges_run_id(self._run_id), round_, ranged_model(name))
        # Devices may have unmasked these, and the server stopped before it had them. If they have
        # not all come back, the updates are summed without. Those of a group keep nobody from the
        # round: the server may have stopped when some groups had unmasked theirs, and others not.
        # A group that is the same gives the same sum again, see `RangedAttempt`.
        unknown = [
            each
            for each in ranges
            if each.refused
            or (not each.group and len(each.devices) >= needed and each.devices <= set(ready))
        ]
        return [*unmasked, *unknown]

    @property
    def _left_out(self) -> set[str]:
        """Devices that have refused the draw of the others; see `DeviceDraws.left_out`."""
        return set() if self._lottery is None else self._lottery.left_out()

    # -- the cases ---------------------------------------------------------------------------------

    def _groups_again(
        self,
        round_: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
        *,
        complete: bool = False,
    ) -> SelectedCohort | None:
        """Exactly the survivors of the groups that the last attempt has summed.

        A device takes part only in the sum of the group that its owner declares now.
        `complete`: only of groups whose devices are all ready, and whose sum was not refused.
        """
        groups = {} if settings.least_in_group is None else _last_groups(unmasked)
        if complete:
            groups = {
                group: entry
                for group, entry in groups.items()
                if entry.devices <= set(ready) and not self._unmaskings.is_refused_sum(entry)
            }
        names = sorted(_devices_of(list(groups.values())))
        least = 1 if settings.robust is None else MIN_ROBUST_GROUPS
        if len(groups) < least or not settings.needed <= len(names) or not set(names) <= set(ready):
            return None
        clients = self._roster.clients
        for group, entry in groups.items():
            if settings.robust is not None:
                continue  # nobody has declared it
            if group != REST and any(clients[name].group != group for name in entry.devices):
                return None
        sizes = (len(entry.devices) for entry in groups.values())
        parts = [settings.for_group(size, exact=True) for size in sizes]
        needed = min(1 if part is None else part.needed for part in parts)
        drawn = RandomGroup.parse(unmasked[0].group) if settings.robust is not None else None
        if drawn is not None:
            needed = settings.robust_minimum * drawn.count
        cohort = self._again(
            round_, names, unmasked[0].draw, needed, exact=True, same_draw=drawn is not None
        )
        devices = {name: sorted(entry.devices) for name, entry in groups.items()}
        return None if cohort is None else dataclasses.replace(cohort, groups=devices)

    def _complete_groups_again(
        self,
        round_: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
    ) -> SelectedCohort | None:
        """The groups of the last attempt that can be repeated, if the quorum is in them.

        A round goes on without a group that cannot be summed, so also after a crash.
        """
        return self._groups_again(round_, unmasked, ready, settings, complete=True)

    def _survivors_again(
        self,
        number: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
    ) -> SelectedCohort | None:
        """Exactly the survivors of an earlier sum, in the same draw if devices still accept it."""
        # A sum that was lost before one that was refused: both may be repeated.
        for entry in sorted(_repeatable(unmasked, settings), key=self._unmaskings.is_refused_sum):
            if not entry.devices <= set(ready):
                continue
            names = sorted(entry.devices)
            cohort = self._again(number, names, entry.draw, settings.needed, exact=True)
            if cohort is not None:
                return cohort
        return None

    def _buffer_again(
        self,
        round_: int,
        unmasked: Sequence[Unmasking],
        allowed: Collection[str],
        ready: Collection[str],
        settings: FederatedSection,
    ) -> SelectedCohort:
        """Exactly the survivors of a buffer, if all of them had the model of this round.

        One whose update had begun in an earlier round would give another one now, and the
        difference of the two sums would be about such devices alone.

        Raises:
            NoAllowedCohort: there are none, or not all of them are ready.
        """
        fresh = [
            entry
            for entry in _repeatable(unmasked, settings)
            if [start.round for start in _buffered_starts(entry)] == [round_]
        ]
        for entry in fresh:
            if entry.devices <= set(ready):
                return self._cohort(sorted(entry.devices), exact=True)
        missing = min((entry.devices - set(ready) for entry in fresh), key=len, default=())
        raise NoAllowedCohort(missing, len(allowed), settings.needed)

    def _interrupted_again(
        self,
        round_: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
    ) -> SelectedCohort | None:
        """The cohort of an attempt that a crash interrupted, unless some of it have unmasked."""
        interrupted = self._repeated
        if interrupted is None or interrupted.round != round_:
            return None
        names = sorted(interrupted.invited)
        if not set(names) <= set(ready) - _devices_of(unmasked) - self._left_out:
            return None
        if settings.robust is None:
            return self._again(round_, names, interrupted.draw, settings.needed)
        # Who is in which group follows from the draw, and the devices of some may have unmasked
        # their ranges together.
        divided = self.in_random_groups(round_, self._cohort(names, interrupted.draw), settings)
        drawn = RandomGroup.parse(next(iter(divided.groups), ""))
        if drawn is None:
            return None
        needed = settings.robust_minimum * drawn.count
        return self._again(round_, names, interrupted.draw, needed, same_draw=True)

    def _again(
        self,
        round_: int,
        names: Sequence[str],
        draw: int,
        needed: int,
        *,
        exact: bool = False,
        same_draw: bool = False,
    ) -> SelectedCohort | None:
        """A cohort once more, in the same draw; None if devices do not accept that any longer."""
        if self._lottery is None:
            return self._cohort(names, exact=exact)
        again = self._lottery.repeat(
            round_, names, draw, needed, now=self._clock.utc(), same_draw=same_draw
        )
        if again is None:
            return None
        return self._cohort(names, again.draw, again.selected_ppm, exact=exact)

    def _secure(
        self,
        number: int,
        unmasked: Sequence[Unmasking],
        ready: Collection[str],
        settings: FederatedSection,
        count: int,
    ) -> SelectedCohort:
        """The usual selection for a secure sum, among devices that have unmasked none."""
        allowed = set(ready) - _devices_of(unmasked)
        if unmasked and len(allowed) < settings.needed:
            refused = any(map(self._unmaskings.is_refused_sum, unmasked))
            absent = [entry.devices - set(ready) for entry in _repeatable(unmasked, settings)]
            if together := _devices_of(list(_last_groups(unmasked).values())):
                absent.append(frozenset(together - set(ready)))
            missing = min(absent, key=len, default=())  # the fewest that would allow a cohort
            raise NoAllowedCohort(missing, len(allowed), settings.needed, refused=refused)
        if self._lottery is None:
            return self._usual(number, allowed, count, settings.needed)
        now = self._clock.utc()
        needed = settings.needed
        others = allowed - self._left_out
        if number > 0 and settings.robust is not None:
            return self._secure_groups(self._lottery, number, allowed, others, settings)
        drawn = self._lottery.select(number, others, count=count, needed=needed, now=now)
        if drawn.shortage and others != allowed:
            drawn = self._lottery.select(number, allowed, count=count, needed=needed, now=now)
        return self._cohort(drawn.names, drawn.draw, drawn.selected_ppm, drawn.shortage)

    def _secure_groups(
        self,
        lottery: TicketLottery,
        number: int,
        allowed: Collection[str],
        others: Collection[str],
        settings: FederatedSection,
    ) -> SelectedCohort:
        """Devices of random groups, as many as the job has or can have, preferably of `others`."""
        now = self._clock.utc()
        smallest = next(n for n in itertools.count(1) if settings.for_group(n) is not None)
        for names in (others, allowed):
            for count in range(settings.robust_groups, MIN_ROBUST_GROUPS - 1, -1):
                drawn = lottery.select_groups(
                    number,
                    names,
                    each=settings.invited // count,
                    groups=count,
                    least=settings.robust_minimum,
                    smallest=smallest,
                    needed=settings.needed,
                    now=now,
                )
                if not drawn.shortage:
                    return self._cohort(drawn.names, drawn.draw, drawn.selected_ppm)
        return self._cohort(drawn.names, drawn.draw, drawn.selected_ppm, drawn.shortage)

    def _usual(
        self, number: int, ready: Collection[str], count: int, needed: int = 0
    ) -> SelectedCohort:
        """The devices of a round by the job's selection; others are a sample by its seed.

        `needed`: the quorum, if devices that already train do not count towards it.
        """
        seed = self._job.seed
        if number <= 0:  # what a measurement says must not depend on who is preferred in training
            return self._cohort(select_devices(ready, count=count, seed=seed, round_=number))
        request = SelectionRequest(
            round=number,
            count=min(count, len(ready)),
            devices={name: self._roster.clients[name].examples for name in sorted(ready)},
            records=self._availability.attendance.records,
            seed=seed,
        )
        names = self._selection.select(request)
        shortage = ""
        if len(names) < needed <= len(request.devices):
            shortage = (
                f"federated.selection={self._job.federated.selection!r} selected {len(names)} of "
                f"{len(request.devices)} available devices and the quorum is {needed}; lower the "
                "quorum, or have it select more"
            )
        return self._cohort(names, shortage=shortage)

    def _cohort(
        self,
        names: Collection[str],
        draw: int = 0,
        selected_ppm: int = MILLION,
        shortage: str = "",
        *,
        exact: bool = False,
    ) -> SelectedCohort:
        examples = {name: self._roster.clients[name].examples for name in names}
        return SelectedCohort(examples, draw, selected_ppm, shortage, exact)


def _buffered_starts(entry: Unmasking) -> Sequence[link_pb2.BufferedStart]:
    """The models that the updates of a buffer began at, as its devices were told."""
    return link_pb2.Request.FromString(entry.request).agree.starts


def _devices_of(unmasked: Sequence[Unmasking]) -> set[str]:
    return {name for entry in unmasked for name in entry.devices}


def _last_groups(unmasked: Sequence[Unmasking]) -> dict[str, Unmasking]:
    """The sums of the groups of the last attempt, if their devices are in no other sum."""
    if not unmasked or not unmasked[0].group:
        return {}
    last = unmasked[0]
    groups = {
        entry.group: entry
        for entry in unmasked
        if (entry.round, entry.attempt) == (last.round, last.attempt) and entry.group
    }
    for other in unmasked:
        for entry in groups.values():
            if other.devices & entry.devices and (other.refused or other.devices != entry.devices):
                return {}
    return groups


def _repeatable(unmasked: Sequence[Unmasking], settings: FederatedSection) -> list[Unmasking]:
    """Sums whose survivors may all take part again, the latest first."""
    return [
        entry
        for entry in unmasked
        if not entry.refused
        and settings.needed <= len(entry.devices) <= settings.cohort
        and all(
            other.devices == entry.devices and not other.refused
            for other in unmasked
            if other.devices & entry.devices
        )
    ]
