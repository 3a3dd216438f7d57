"""How long an attempt at a round may take, from what its devices took before.

A job that says `time.round_seconds` has it. Otherwise the limit follows the devices that are
invited: one of which nothing is known has the usual time, and one that has delivered three times
what it mostly took. A device that was not ready in time gets twice as long the next two times, so
that a slow one is found out without anybody's help. Then it rests: rounds are no longer for it,
four at first and twice as many after each further one that was longer in vain. So one that never
delivers makes the limit of fewer and fewer rounds longer, and one that is back, or whose work has
grown, is not left out for ever.

>>> from isthmus.job.tables import TimeSection
>>> times = RoundTimes(TimeSection())
>>> times.seconds(["hospital-1", "hospital-2"])
600.0
>>> times.took("hospital-1", 100.0)
>>> times.took("hospital-2", 20.0)
>>> times.seconds(["hospital-1", "hospital-2"]), times.seconds(["hospital-2"])
(300.0, 120.0)
>>> times.late("hospital-1", after=300.0)
>>> times.seconds(["hospital-1", "hospital-2"])
600.0
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from isthmus.printable import in_a_line
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.storage.events import Event, ParticipantUnready

if TYPE_CHECKING:
    from isthmus.job.tables import TimeSection
    from isthmus_server.storage.records import Receipt
    from isthmus_server.transport.link import Link

SHORTEST_SECONDS = 120.0
"""Limit of a round whose devices took less than a third of it: how long they take varies."""
LONGEST_SECONDS = 3600.0
"""Longest limit in a job that does not say."""
_MARGIN = 3.0
_KEPT = 10
"""Latest times of a device that count."""
_QUANTILE = 0.9
_FACTOR = 2.0
"""By which the limit is longer for a device that was not ready in time."""
_IN_VAIN = 2
"""Longer rounds in a row for a device that then does not deliver, until it rests."""
_RESTS = 4
"""Rounds that a device rests the first time; each further time they are twice as many."""
_ALONE = 10.0
"""How many times as long as the others a device takes that rounds wait for alone."""
_COMPARED = 256
"""Most other devices that a device is compared with."""
_LASTING = 3
"""Such rounds from which on it is a warning."""

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Unready:
    """What is known of a device that did not deliver the last time."""

    limit: float
    """Seconds of the next round that may be longer for it."""
    in_vain: int = 0
    """Rounds that were longer for it than for others, or that it held up and then failed."""
    rests: int = 0
    """Rounds in which it is not waited for, from now on."""


class RoundTimes:
    """What the devices of a run took, and what that makes the next limit.

    Guarantees:
      * a job's own limit is kept as it is;
      * no other limit is above an hour, or below two minutes or two leases;
      * of n rounds with a device that never delivers, at most 3 + log2(1 + n / 4) have a longer
        limit for it, if a quorum of others does not rest; it may still use up that of the others;
      * whatever a device did, a later limit is longer for it again, up to an hour;
      * a resumed run goes on with the rests of devices: each change of them is an event.
    """

    def __init__(
        self, limits: TimeSection, *, publish: Callable[[Event], None] = lambda event: None
    ) -> None:
        """Nothing is known yet; `publish` receives an event when that of a device changes."""
        self._publish = publish
        self._given = limits.round_seconds
        # Also three quarters of it, for training, are more than a lease.
        self._shortest = max(SHORTEST_SECONDS, 2 * limits.lease_seconds)
        self._first = max(self._shortest, limits.first_round_seconds)
        self._took: dict[str, collections.deque[float]] = {}
        """Seconds in which each device delivered the last times, oldest first."""
        self._unready: dict[str, _Unready] = {}
        self._alone: collections.Counter[str] = collections.Counter()
        """Rounds that waited for each device when the others had long been ready."""

    def restore(self, receipts: Iterable[Receipt], share: float) -> None:
        """Know what devices took in an earlier process of this run.

        `share` is that of a round which is for training.
        """
        for receipt in receipts:
            if receipt.regime == "federated" and receipt.status == "accepted" and receipt.seconds:
                self._note(receipt.participant, receipt.seconds / share)

    def restore_unready(self, events: Iterable[Event]) -> None:
        """Know which devices did not deliver in an earlier process; the last event of each counts.

        Otherwise each restart would begin to find out anew that a device hangs.
        """
        for event in events:
            if not isinstance(event, ParticipantUnready):
                continue
            self._unready.pop(event.participant, None)
            if event.in_vain > 0:
                limit = min(LONGEST_SECONDS, event.limit)
                known = _Unready(limit, event.in_vain, event.rests)
                self._unready[event.participant] = known

    def seconds(self, names: Collection[str], needed: int = 0) -> float:
        """The limit of an attempt with these devices, of which `needed` are the quorum, in seconds.

        As many of those that rest as the quorum lacks are waited for all the same, those that need
        least: without them the attempt cannot succeed.
        """
        if self._given is not None:
            return self._given
        resting = sorted(
            unready.limit
            for name in names
            if (unready := self._unready.get(name)) is not None and unready.rests
        )
        lacking = max(0, needed - (len(names) - len(resting)))
        limits = [*map(self._seconds_for, names), *resting[:lacking]]
        return max(limits, default=self._first)

    def took(self, name: str, seconds: float) -> None:
        """A device has trained; `seconds` are those of a round in which it is just in time.

        Whether that was of use is another matter, see `used` and `failed`.
        """
        self._note(name, seconds)
        unready = self._unready.get(name)
        if unready is not None and not unready.rests:
            unready.limit = self._known(name)

    def used(self, name: str) -> None:
        """What a device trained is in the round's sum."""
        if self._unready.pop(name, None) is not None:
            self._publish(ParticipantUnready(participant=name))
        self._warn_if_alone(name)

    def failed(self, name: str, after: float) -> None:
        """A device has failed, or what it sent was refused, when it had a round up `after` seconds.

        Less than any round has time holds up none.
        """
        if self._given is not None or after <= self._shortest:
            return
        unready = self._unready.setdefault(name, _Unready(self._known(name)))
        if not unready.rests:
            self._count(name, unready, f"held up a round for {after:.0f} s and then failed")

    def late(self, name: str, after: float) -> None:
        """A device was not ready when a round of `after` seconds was over."""
        if self._given is not None:
            return
        unready = self._unready.setdefault(name, _Unready(self._known(name)))
        longer = min(LONGEST_SECONDS, _FACTOR * after)
        if unready.rests:
            unready.limit = max(unready.limit, longer)
            unready.rests -= 1
            self._tell(name, unready)
            return
        unready.limit = longer
        self._count(name, unready, f"was not ready within a round of {after:.0f} s")

    def _count(self, name: str, unready: _Unready, what: str) -> None:
        """A round was longer for a device in vain."""
        unready.in_vain += 1
        more = unready.in_vain - _IN_VAIN
        if more > 0:
            unready.rests = _RESTS * 2 ** (more - 1)
        self._tell(name, unready)
        if more <= 0:
            log.info("%s %s; its next one has %.0f s", in_a_line(name), what, unready.limit)
            return
        log.warning(
            "%s %s, as in the rounds before; the next %d are no longer for it than for others; set "
            "time.round_seconds if it needs more",
            in_a_line(name),
            what,
            unready.rests,
        )

    def _tell(self, name: str, unready: _Unready) -> None:
        """Have the log keep what is known of a device."""
        self._publish(ParticipantUnready(participant=name, **dataclasses.asdict(unready)))

    def _note(self, name: str, seconds: float) -> None:
        if self._given is None and math.isfinite(seconds):
            self._took.setdefault(name, collections.deque(maxlen=_KEPT)).append(seconds)

    def _seconds_for(self, name: str) -> float:
        unready = self._unready.get(name)
        if unready is None:
            return self._known(name)
        return self._shortest if unready.rests else unready.limit

    def _known(self, name: str) -> float:
        """The limit for a device that has delivered, and for one of which nothing is known."""
        past = self._took.get(name)
        if past is None:
            return self._first
        return min(LONGEST_SECONDS, max(self._shortest, _MARGIN * _mostly(past)))

    def _warn_if_alone(self, name: str) -> None:
        """Warn once of a device that takes many times as long as the others."""
        past = self._took.get(name)
        # Before the others are looked at: this is asked once for each device of a round.
        if past is None or past[-1] <= self._shortest:
            self._alone.pop(name, None)
            return
        others = (times for other, times in self._took.items() if other != name)
        some = [_mostly(times) for times in itertools.islice(others, _COMPARED)]
        if not some:
            return
        usual = statistics.median(some)
        if past[-1] <= _ALONE * usual:
            self._alone.pop(name, None)
            return
        self._alone[name] += 1
        if self._alone[name] == _LASTING:
            log.warning(
                "rounds wait for %s, which takes %.0f s where half of the others take at most %.0f "
                "s; set time.round_seconds to go on without it, or federated.over_selection",
                in_a_line(name),
                past[-1],
                usual,
            )


def _mostly(past: Collection[float]) -> float:
    """What a device mostly took: nine of ten times at most."""
    ordered = sorted(past)
    return ordered[math.ceil(_QUANTILE * len(ordered)) - 1]


class TrainingTime:
    """How long a device has had a request, without the time in which its model was on its way."""

    def __init__(self, link: Link, name: str, least_rate: float) -> None:
        """It is asked now."""
        self._allowance = TransferAllowance(link, [name], least_rate)
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._asked = self._loop.time()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        moved = self._allowance.seconds(self._name, time.monotonic())
        return max(0.0, self._loop.time() - self._asked - moved)
