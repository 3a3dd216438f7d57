"""The privacy ledger of a run: its own chain, whom each charge names, and what they add up to."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping

from isthmus_verify.chain import BEFORE_FIRST, parsed
from isthmus_verify.fields import Fields
from isthmus_verify.violation import Violation, shown

DEVICE = "device"
ROUND = "round"
TOLERANCE = 1e-6
"""Relative: the run's own figure is from another method, and no smaller than the exact one."""
_EVENTS = {
    "zero-concentrated": ("kind", "rho"),
    "gaussian": ("kind", "noise_multiplier"),
    "correlated": ("kind", "noise_multiplier", "run"),
    "sampled-gaussian": ("kind", "noise_multiplier", "sampling_probability", "steps"),
}
"""What is charged, and what each kind has."""
_MECHANISMS = {
    "distributed": "zero-concentrated",
    "gaussian": "gaussian",
    "correlated": "correlated",
}
"""Mechanisms of the noise in devices' updates, and what a round with each is charged as."""
_UNITS = {"device": "zero-out", "example": "add-or-remove"}
"""What neighbouring data differ in, and how."""
_EXAMPLES_EVENT = "sampled-gaussian"
"""The only kind of event that examples are charged with, and devices never."""
_KINDS_OF_CHARGES = ("round", "evaluation", "comparison", "training")


def check_terms(privacy: Fields) -> None:
    """Check the budget of a job before it is used: a search by one that is none has no end.

    Raises:
        Violation: it is none.
    """
    if not (privacy.number("epsilon") > 0 and 0 < privacy.number("delta") < 1):
        raise Violation(f"{privacy.where} has a budget that is none")


@dataclasses.dataclass
class Charge:
    """One line that reserves."""

    number: int
    """Number of the line."""
    run: str
    unit: str
    mechanism: str
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
        self.run_id = run_id
        self._lines = [BEFORE_FIRST]
        self._charges: dict[int, Charge] = {}
        self._of_round: dict[tuple[int, int], list[Charge]] = {}
        self._spent: dict[str, _Spent] = {}
        """By device, as far as `_add_up` has added."""
        self._added = 0
        """The last line that `_add_up` has added."""
        self._most = 0.0
        """Epsilon of the device that was asked most, by then."""
        self._last_head = 0
        self.count = 0
        self._own = False
        """Whether an attempt was charged by this run."""
        self.of_others = 0
        """Attempts that were charged by another run alone."""
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
        if not text.isascii():
            raise Violation(f"{where} is not a JSON object in its canonical form")
        line = text.encode()
        table = parsed(line, where)
        fields = Fields(table, where)
        number = len(self._lines)
        if fields.count("number") != number or fields.digest("previous") != self._lines[-1]:
            raise Violation(f"{where} does not follow the line of the privacy ledger before it")
        self._lines.append(hashlib.sha256(line).hexdigest())
        self.count += 1
        if "charge" in table:
            fields.only("charge", "number", "previous")
            charge = _charge(number, fields.table("charge"))
            self._charges[number] = charge
            self.of_examples |= charge.unit != DEVICE
            if (charge.unit, charge.what) == (DEVICE, ROUND):
                self._of_round.setdefault((charge.round, charge.attempt), []).append(charge)
            return
        fields.only("number", "outcome", "previous", "settles")
        settled = self._charges.get(fields.count("settles"))
        if settled is None or settled.outcome is not None:
            raise Violation(f"{where} is about a charge that is not there, or has ended before")
        settled.outcome = fields.text("outcome")
        if settled.outcome not in ("committed", "failed", "released"):
            raise Violation(f"{where} has the outcome {shown(settled.outcome)}")

    def check_head(self, head: str, where: str) -> int:
        """Check that the ledger has the line that a commit remembers.

        Returns:
            Its number; 0 for none.

        Raises:
            Violation: it has not, or an earlier commit remembers a later line.
        """
        line = 0
        if head:
            number, _, digest = head.partition(":")
            known = number.isdecimal() and len(number) < 10 and 0 <= int(number) < len(self._lines)
            if not known or self._lines[int(number)] != digest or head != f"{int(number)}:{digest}":
                raise Violation(f"{where} remembers a line of the privacy ledger that is not there")
            line = int(number)
        if line < self._last_head:
            raise Violation(
                f"{where} remembers line {line} of the privacy ledger, and an earlier commit line "
                f"{self._last_head}"
            )
        self._last_head = line
        return line

    def check_round(
        self,
        round_: int,
        attempt: int,
        *,
        invited: Collection[str],
        answered: Collection[str],
        privacy: Fields,
        where: str,
    ) -> list[Charge]:
        """Check that those who were asked were charged for it, and return the charges.

        Args:
            round_: of the attempt.
            attempt: its number.
            invited: devices of the plan.
            answered: those whose receipts say that they sent a result.
            privacy: the table of the job.
            where: for sentences.

        Raises:
            Violation: they were not.
        """
        asked = frozenset(invited)
        found = [
            charge
            for charge in self._of_round.get((round_, attempt), [])
            if charge.devices == asked
        ]
        own = [charge for charge in found if charge.run == self.run_id]
        # A branch has the rounds and the charges of the run that it began with, before its own.
        if found and not own:
            if self._own:
                raise Violation(
                    f"{where} was charged by the run {shown(found[0].run)}, and an earlier one by "
                    "this run"
                )
            self.of_others += 1
        self._own = self._own or bool(own)
        found = own or found
        if not found:
            raise Violation(f"{where} asked devices without a charge that names just these")
        if answered and not any(charge.is_spent for charge in found):
            raise Violation(f"the charge of {where} was released, although a device has answered")
        mechanism = privacy.text("mechanism")
        for charge in found:
            if charge.population != privacy.text("population"):
                raise Violation(
                    f"{where} was charged to the population {shown(charge.population)}, and the "
                    f"job's is {shown(privacy.text('population'))}"
                )
            kind = charge.event.text("kind")
            if charge.mechanism != mechanism or kind != _MECHANISMS.get(mechanism):
                raise Violation(
                    f"{where} was charged as {shown(kind)} of {shown(charge.mechanism)}, and the "
                    f"job's mechanism is {shown(mechanism)}"
                )
        return found

    def epsilon_at(self, line: int, privacy: Fields) -> float:
        """The least epsilon that the device that was asked most had spent by a line.

        Args:
            line: of the ledger; no smaller than in the call before.
            privacy: the table of the job.
        """
        changed = self._add_up(line, privacy)
        # What a device has spent only grows; most devices of a fleet are in few rounds.
        spent = {name: self._spent[name] for name in changed}
        found = _epsilons(spent, privacy.number("delta"))
        self._most = max(self._most, max(found.values(), default=0.0))
        return self._most

    def _add_up(self, line: int, privacy: Fields) -> set[str]:
        """Add what devices had spent by a line; returns the names that have spent more."""
        changed: set[str] = set()
        for number in range(self._added + 1, line + 1):
            charge = self._charges.get(number)
            if charge is None or not self._counts(charge, privacy):
                continue
            for name in charge.devices:
                self._spent.setdefault(name, _Spent()).add(charge.event)
            changed |= charge.devices
        self._added = max(line, self._added)
        return changed

    def _counts(self, charge: Charge, privacy: Fields) -> bool:
        population = privacy.text("population")
        return charge.unit == DEVICE and charge.is_spent and charge.population == population

    def check_budget(self, privacy: Fields) -> None:
        """Check that no device was asked for more than the job allows.

        Raises:
            Violation: one was.
        """
        budget = privacy.number("epsilon")
        delta = privacy.number("delta")
        if privacy.has("participations"):
            most = privacy.count("participations")
            rounds = Counter[str]()
            for charge in self._charges.values():
                if charge.run == self.run_id and charge.what == ROUND and charge.is_spent:
                    rounds.update(charge.devices)
            for name, count in rounds.items():
                if count > most:
                    raise Violation(
                        f"{shown(name)} was asked for {count} rounds, and the job allows {most}"
                    )
        self._add_up(len(self._lines) - 1, privacy)
        # Others may have been asked for more by runs with a larger budget, of which a branch has
        # the charges.
        own = frozenset[str]().union(
            *(charge.devices for charge in self._charges.values() if charge.run == self.run_id)
        )
        asked = {name: each for name, each in self._spent.items() if name in own}
        for name, epsilon in _epsilons(asked, delta).items():
            if epsilon > budget * (1 + TOLERANCE):
                raise Violation(
                    f"{shown(name)} has spent epsilon {epsilon:.6g}, and the job allows "
                    f"{budget:.6g}"
                )


@dataclasses.dataclass
class _Spent:
    """What one device was asked for."""

    rho: float = 0.0
    """Sum of the zero-concentrated guarantees."""
    precision: float = 0.0
    """Sum of 1 / noise multiplier^2 of Gaussian ones."""
    runs: set[tuple[str, float]] = dataclasses.field(default_factory=set)
    """Runs with correlated noise, of which all rounds are one Gaussian mechanism."""

    def add(self, event: Fields) -> None:
        """Add an event of devices."""
        kind = event.text("kind")
        if kind == "zero-concentrated":
            self.rho += _positive(event, "rho")
        else:
            multiplier = _positive(event, "noise_multiplier")
            run = (event.text("run"), multiplier) if kind == "correlated" else None
            if run is None or run not in self.runs:
                self.precision += 1 / multiplier**2
            if run is not None:
                self.runs.add(run)


def _positive(event: Fields, key: str) -> float:
    value = event.number(key)
    if not 1e-100 < value < 1e100:
        raise Violation(f"{key!r} of {event.where} is {shown(value)}, out of its range")
    return value


def _epsilons(spent: Mapping[str, _Spent], delta: float) -> dict[str, float]:
    """The least epsilon of one device of each sum of charges."""
    sums = {(one.rho, one.precision): name for name, one in spent.items()}
    return {name: _epsilon(*each, delta) for each, name in sums.items()}


def _charge(number: int, table: Fields) -> Charge:
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
    unit = table.text("unit")
    if table.text("adjacency") != _UNITS.get(unit):
        raise Violation(
            f"{table.where} has the unit {shown(unit)}, of which neighbours differ "
            f"otherwise than by {shown(table.text('adjacency'))}"
        )
    if table.text("what") not in _KINDS_OF_CHARGES:
        raise Violation(f"{table.where} is for {shown(table.text('what'))}")
    event = table.table("event")
    keys = _EVENTS.get(event.text("kind"))
    if keys is None:
        raise Violation(f"{event.where} has the kind {shown(event.text('kind'))}")
    is_of_examples = event.text("kind") == _EXAMPLES_EVENT
    if is_of_examples != (unit != DEVICE):
        raise Violation(
            f"{event.where} has the kind {shown(event.text('kind'))}, and the unit of the charge "
            f"is {shown(unit)}"
        )
    event.only(*keys)
    devices = frozenset(table.texts("devices"))
    # Of devices no charge is everybody's, which would change what all of them have spent.
    if unit == DEVICE and not devices:
        raise Violation(f"{table.where} is for devices, and names none")
    return Charge(
        number=number,
        run=table.text("run"),
        unit=unit,
        mechanism=table.text("mechanism"),
        what=table.text("what"),
        round=table.count("round"),
        attempt=table.count("attempt"),
        population=table.text("population"),
        devices=devices,
        event=event,
    )


@functools.lru_cache(maxsize=1024)
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
