"""Select the devices of a secure round by their tickets in the authority's lottery.

Devices that have joined with a certificate refuse a roster with a member whose ticket is above the
stated share, and a share that is wider than the round needs (`isthmus_privacy.secagg.lottery`). So
the server selects the available devices with the lowest tickets, and states the smallest share
that contains them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.lottery import (
    DRAW_SECONDS,
    MILLION,
    SELECTION_SLACK,
    largest_share,
    smallest_share,
    ticket,
)
from isthmus_server.transport.enrolment import Enrolments

_KEPT_SECONDS = DRAW_SECONDS // 2
"""Age of a draw after which another attempt at the round takes a new one."""
_DRAWS_TRIED = 20
"""Draws of the next seconds that are tried if too few of the available devices are eligible."""


@dataclasses.dataclass(frozen=True)
class TicketSelection:
    """Devices with the lowest tickets in a draw."""

    names: Sequence[str]
    """Sorted."""
    draw: int = 0
    selected_ppm: int = MILLION
    shortage: str = ""
    """Why these are fewer than the round needs; empty if they are not."""


class TicketLottery:
    """Selects by tickets; all attempts at a round have the same draw if they can.

    Guarantees:
      * a draw is never before one that the devices have accepted, as they would refuse it;
      * a draw that all devices have refused changes nothing for the next one.
    """

    def __init__(self, enrolments: Enrolments) -> None:
        """`enrolments` has the lottery numbers, and the draws of all runs of this server."""
        self._enrolments = enrolments
        self._kept: tuple[int, int] | None = None
        """Round and draw of the last selection."""

    def note_asked(self, names: Collection[str], draw: int) -> None:
        """Note that devices get to see a draw now."""
        self._enrolments.draws.ask(names, draw)

    def left_out(self) -> set[str]:
        """Devices that are selected only where there are too few others."""
        return set(self._enrolments.draws.left_out())

    def is_outdated(self, names: Collection[str], draw: int, now: float) -> bool:
        """Whether a device was asked in a later draw meanwhile, by another job: it would refuse."""
        return self._enrolments.draws.latest(names, now) > draw

    def select(
        self, round_: int, available: Collection[str], *, count: int, needed: int, now: float
    ) -> TicketSelection:
        """The `count` available devices with the lowest eligible tickets.

        Args:
            round_: number of the round, or a negative one for a comparison.
            available: names of devices that may be invited.
            count: devices to invite.
            needed: minimum number of devices in the sum.
            now: Unix seconds.
        """
        latest = self._enrolments.draws.latest(available, now)
        if self._kept is not None and self._kept[0] == round_:
            # Attempts at a round have one draw, so that they select alike. It is given up before
            # devices refuse it: when it is of another time, also because this clock was wrong then,
            # or when another run has shown them a later one.
            kept = self._kept[1]
            if abs(now - kept) < _KEPT_SECONDS and kept >= latest:
                selection = self._draw(kept, available, count, needed)
                if not selection.shortage:
                    return selection
        # Draws are seconds, and devices accept those of the near future: their clocks differ as
        # well.
        first = max(int(now), latest)
        for draw in range(first, first + _DRAWS_TRIED):
            selection = self._draw(draw, available, count, needed)
            if not selection.shortage:
                self._kept = round_, draw
                break
        return selection

    def select_groups(
        self,
        round_: int,
        available: Collection[str],
        *,
        each: int,
        groups: int,
        least: int,
        smallest: int,
        needed: int,
        now: float,
    ) -> TicketSelection:
        """Up to `each` devices of every random group, those with the lowest tickets in it.

        Args:
            round_: number of the round.
            available: names of devices that may be invited.
            each: devices to invite in each group.
            groups: into how many the draw divides the devices.
            least: fewest devices in the sum of one, and
            smallest: fewest that have to be invited for it.
            needed: minimum number of devices in all of them together.
            now: Unix seconds.
        """
        latest = self._enrolments.draws.latest(available, now)
        first = max(int(now), latest)
        draws = list(range(first, first + _DRAWS_TRIED))
        if self._kept is not None and self._kept[0] == round_:
            kept = self._kept[1]
            if abs(now - kept) < _KEPT_SECONDS and kept >= latest:
                draws.insert(0, kept)
        for draw in draws:
            selection = self._draw(
                draw, available, len(available), least * groups, groups=groups, each=each
            )
            sizes = map(len, self.groups_of(selection.names, draw, groups).values())
            if sum(size for size in sizes if size >= smallest) >= needed:
                self._kept = round_, draw
                return dataclasses.replace(selection, shortage="")
        few = (
            f"of {len(available)} available devices, too few are eligible for {groups} random "
            f"groups of at least {least} with a quorum of {needed}"
        )
        return dataclasses.replace(selection, shortage=few)

    def groups_of(self, names: Collection[str], draw: int, groups: int) -> dict[str, list[str]]:
        """The devices of each random group of a draw, by the name of the group; none is empty."""
        enrolments = self._enrolments.current
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            group = RandomGroup.of(enrolments[name].lottery, draw, groups)
            found.setdefault(group.name, []).append(name)
        return dict(sorted(found.items()))

    def accepts(self, names: Collection[str], selected_ppm: int, needed: int) -> bool:
        """Whether devices accept that share of all for a sum over at least `needed` of them."""
        enrolments = self._enrolments.current
        found = [enrolments[name].population for name in names if name in enrolments]
        population = max(found, default=1)
        return selected_ppm <= largest_share(SELECTION_SLACK, needed, population)

    def restate(self, names: Collection[str], draw: int, needed: int) -> TicketSelection | None:
        """The selection of exactly these devices in an earlier draw, or None if it is not valid."""
        selection = self._draw(draw, names, len(names), needed)
        return selection if len(selection.names) == len(names) else None

    def repeat(
        self,
        number: int,
        names: Collection[str],
        draw: int,
        needed: int,
        *,
        now: float,
        same_draw: bool = False,
    ) -> TicketSelection | None:
        """The selection of exactly these devices: in their earlier draw, or else in a new one.

        After a restart of the server devices may have seen later draws, of other runs: a new draw
        is better then.

        Returns None if devices would accept neither. With `same_draw`, on which random groups
        depend, there is no new one. The other arguments are those of `select`.
        """
        draws = self._enrolments.draws
        latest = draws.latest(names, now)
        first = max(int(now), latest)
        earlier = [draw] if draw >= latest and abs(now - draw) < _KEPT_SECONDS else []
        later = range(first, first if same_draw else first + _DRAWS_TRIED)
        for candidate in (*earlier, *later) if draws.is_known(names) else (*later, *earlier):
            again = self.restate(names, candidate, needed)
            if again is not None:
                self._kept = number, candidate
                return again
        return None

    def _draw(
        self,
        draw: int,
        available: Collection[str],
        count: int,
        needed: int,
        *,
        groups: int = 0,
        each: int = 0,
    ) -> TicketSelection:
        enrolments = self._enrolments.current
        found = {name: enrolments[name] for name in available if name in enrolments}
        population = max((enrolment.population for enrolment in found.values()), default=1)
        allowed = largest_share(SELECTION_SLACK, needed, population)
        tickets: Mapping[str, float] = {
            name: drawn
            for name, enrolment in found.items()
            if (drawn := ticket(enrolment.lottery, draw)) * MILLION < allowed
        }
        # The lowest tickets: the stated share has to contain all that are selected, and devices
        # refuse one that is wider than the round needs.
        names = sorted(tickets, key=lambda name: (tickets[name], name))[:count]
        if groups:
            order = {name: at for at, name in enumerate(names)}
            divided = self.groups_of(names, draw, groups).values()
            lowest = [sorted(members, key=order.__getitem__)[:each] for members in divided]
            names = [name for members in lowest for name in members]
        shortage = ""
        if len(names) < needed:
            shortage = (
                f"of {len(available)} available devices, {len(names)} are eligible in draw {draw}: "
                f"with {population} enrolled devices, the devices accept a selection from "
                f"{allowed} millionths of them for a sum over {needed} ([privacy] "
                "selection_slack in their policy.toml)"
            )
        share = min(allowed, smallest_share([tickets[name] for name in names])) if names else 1
        return TicketSelection(sorted(names), draw, share, shortage)
