"""The privacy ledger of a run: its own chain, whom each charge names, and what they add up to."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Collection

from isthmus_verify.chain import BEFORE_FIRST, parsed
from isthmus_verify.fields import Fields
from isthmus_verify.violation import Violation, shown

DEVICE = "device"
ROUND = "round"
_TOLERANCE = 1e-6
"""Relative: the run's own figure is from another method, and no smaller than the exact one."""


@dataclasses.dataclass
class Charge:
    """One line that reserves."""

    run: str
    unit: str
    what: str
    round: int
    attempt: int
    population: str
    devices: frozenset[str]
    event: Fields
    outcome: str | None = None
    """None while it is open."""

    @property
    def is_spent(self) -> bool:
        """Whether somebody may have accepted what was charged."""
        return self.outcome != "released"


class Charges:
    """The lines of a run's ledger."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._lines = [BEFORE_FIRST]
        self._charges: dict[int, Charge] = {}
        self._of_round: dict[tuple[int, int], list[Charge]] = {}
        self.count = 0
        self.of_examples = False
        """Whether charges name no devices, but the examples of a datacenter."""

    def add(self, content: Fields) -> None:
        """Check one line.

        Raises:
            Violation: it does not follow the one before, or is none of a ledger.
        """
        content.only("line")
        text = content.text("line")
        where = f"the line of {content.where}"
        line = text.encode("utf-8", "replace")
        table = parsed(line, where)
        fields = Fields(table, where)
        number = len(self._lines)
        if fields.count("number") != number or fields.digest("previous") != self._lines[-1]:
            raise Violation(f"{where} does not follow the line of the privacy ledger before it")
        self._lines.append(hashlib.sha256(line).hexdigest())
        self.count += 1
        if "charge" in table:
            fields.only("charge", "number", "previous")
            charge = _charge(fields.table("charge"))
            self._charges[number] = charge
            self.of_examples |= charge.unit != DEVICE
            if (charge.run, charge.unit, charge.what) == (self._run_id, DEVICE, ROUND):
                self._of_round.setdefault((charge.round, charge.attempt), []).append(charge)
            return
        fields.only("number", "outcome", "previous", "settles")
        settled = self._charges.get(fields.count("settles"))
        if settled is None or settled.outcome is not None:
            raise Violation(f"{where} is about a charge that is not there, or has ended before")
        settled.outcome = fields.text("outcome")
        if settled.outcome not in ("committed", "failed", "released"):
            raise Violation(f"{where} has the outcome {shown(settled.outcome)}")

    def check_head(self, head: str, where: str) -> None:
        """Check that the ledger has the line that a commit remembers.

        Raises:
            Violation: it has not.
        """
        if not head:
            return
        number, _, digest = head.partition(":")
        known = number.isdecimal() and len(number) < 10 and 0 < int(number) < len(self._lines)
        if not known or self._lines[int(number)] != digest:
            raise Violation(f"{where} remembers a line of the privacy ledger that is not there")

    def check_round(
        self,
        round_: int,
        attempt: int,
        *,
        invited: Collection[str],
        answered: Collection[str],
        where: str,
    ) -> None:
        """Check that those who were asked were charged for it.

        Args:
            round_: of the attempt.
            attempt: its number.
            invited: devices of the plan.
            answered: those whose receipts say that they sent a result.
            where: for sentences.

        Raises:
            Violation: they were not.
        """
        found = [
            charge
            for charge in self._of_round.get((round_, attempt), [])
            if charge.devices == frozenset(invited)
        ]
        if not found:
            raise Violation(f"{where} asked devices without a charge that names just these")
        if answered and not any(charge.is_spent for charge in found):
            raise Violation(f"the charge of {where} was released, although a device has answered")

    def check_budget(self, privacy: Fields) -> bool:
        """Check that no device was asked for more than the job allows.

        Returns:
            Whether epsilon could be computed here.

        Raises:
            Violation: one was.
        """
        budget = privacy.number("epsilon")
        delta = privacy.number("delta")
        if not (budget > 0 and 0 < delta < 1):
            raise Violation(f"{privacy.where} has a budget that is none")
        spent = [
            charge
            for charge in self._charges.values()
            if charge.unit == DEVICE
            and charge.is_spent
            and charge.population == privacy.text("population")
        ]
        if privacy.has("participations"):
            most = privacy.count("participations")
            rounds = Counter[str]()
            for charge in spent:
                if charge.run == self._run_id and charge.what == ROUND:
                    rounds.update(charge.devices)
            for name, count in rounds.items():
                if count > most:
                    raise Violation(
                        f"{shown(name)} was asked for {count} rounds, and the job allows {most}"
                    )
        by_device: dict[str, _Spent] = {}
        for charge in spent:
            for name in charge.devices or {""}:
                if not by_device.setdefault(name, _Spent()).add(charge.event):
                    return False
        everybody = by_device.pop("", _Spent())
        sums = {(one.rho, one.precision): name for name, one in by_device.items()} or {
            (0.0, 0.0): ""
        }
        for (rho, precision), name in sums.items():
            epsilon = _epsilon(rho + everybody.rho, precision + everybody.precision, delta)
            if epsilon > budget * (1 + _TOLERANCE):
                raise Violation(
                    f"{shown(name)} has spent epsilon {epsilon:.6g}, and the job allows "
                    f"{budget:.6g}"
                )
        return True


@dataclasses.dataclass
class _Spent:
    """What one device was asked for."""

    rho: float = 0.0
    """Sum of the zero-concentrated guarantees."""
    precision: float = 0.0
    """Sum of 1 / noise multiplier^2 of Gaussian ones."""
    runs: set[tuple[str, float]] = dataclasses.field(default_factory=set)
    """Runs with correlated noise, of which all rounds are one Gaussian mechanism."""

    def add(self, event: Fields) -> bool:
        """Add an event; returns whether it is of a kind that can be added up here."""
        kind = event.text("kind")
        if kind == "zero-concentrated":
            self.rho += _positive(event, "rho")
        elif kind in ("gaussian", "correlated"):
            multiplier = _positive(event, "noise_multiplier")
            run = (event.text("run"), multiplier) if kind == "correlated" else None
            if run is None or run not in self.runs:
                self.precision += 1 / multiplier**2
            if run is not None:
                self.runs.add(run)
        else:
            return False
        return True


def _positive(event: Fields, key: str) -> float:
    value = event.number(key)
    if not 1e-100 < value < 1e100:
        raise Violation(f"{key!r} of {event.where} is {shown(value)}, out of its range")
    return value


def _charge(table: Fields) -> Charge:
    table.only(
        "adjacency",
        "attempt",
        "devices",
        "event",
        "mechanism",
        "population",
        "round",
        "run",
        "unit",
        "what",
    )
    return Charge(
        run=table.text("run"),
        unit=table.text("unit"),
        what=table.text("what"),
        round=table.count("round"),
        attempt=table.count("attempt"),
        population=table.text("population"),
        devices=frozenset(table.texts("devices")),
        event=table.table("event"),
    )


def _epsilon(rho: float, precision: float, delta: float) -> float:
    """The least epsilon that follows from what was spent, no larger than that of an accountant.

    Args:
        rho: of zero-concentrated mechanisms.
        precision: 1 / noise multiplier^2 of the one Gaussian mechanism that all others are.
        delta: of the guarantee.
    """
    if rho:
        return _of_concentrated(rho + precision / 2, delta)
    return _of_gaussian(math.sqrt(precision), delta) if precision else 0.0


def _of_concentrated(rho: float, delta: float) -> float:
    """Proposition 12 of Canonne, Kamath and Steinke 2020: the least over the order."""

    def at(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return rho * order + math.log(excess / order) - math.log(delta * order) / excess

    low = -300.0
    high = 30.0
    for _ in range(300):
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        if at(left) < at(right):
            high = right
        else:
            low = left
    return max(0.0, at((low + high) / 2))


def _of_gaussian(mu: float, delta: float) -> float:
    """Theorem 8 of Balle and Wang 2018, for a sensitivity of `mu` standard deviations."""

    def spent(epsilon: float) -> float:
        first = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
        tail = math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2
        # Where the tail is no number any more, what it is multiplied by matters as little.
        second = math.exp(epsilon + math.log(tail)) if tail else 0.0
        return first - second

    if spent(0.0) <= delta:
        return 0.0
    low = 0.0
    high = 1.0
    while spent(high) > delta:
        low = high
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if spent(middle) > delta:
            low = middle
        else:
            high = middle
    return low
