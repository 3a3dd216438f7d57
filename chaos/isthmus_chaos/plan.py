"""The plan of faults: a pure function of the seed, the duration and the participants.

Kinds and targets are dealt from shuffled decks, so that a plan of a few minutes has every kind of
fault on every role.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

KILL = "kill"
STOP = "stop"
CUT = "cut"
RESET = "reset"
HALF_OPEN = "half-open"
DELAY = "delay"
FULL_DISK = "full-disk"
IO_ERROR = "io-error"
TORN_WRITE = "torn-write"
CLOCK_JUMP = "clock-jump"

SERVER = "server"
STANDBY = "standby"
"""The second server of a deployment with aggregators."""
MIRROR = "mirror"
"""The web server there, from which devices get models."""
TRUSTED = "trusted.pem"
"""The file of a deployment with the authority that devices trust at the mirror."""
RANK = "/rank"
"""Ends the target of a fault of a datacenter's rank; its number is the fault's amount."""

_DECK = {
    KILL: 3,
    STOP: 2,
    CUT: 2,
    RESET: 1,
    HALF_OPEN: 1,
    DELAY: 1,
    FULL_DISK: 1,
    IO_ERROR: 1,
    TORN_WRITE: 1,
    CLOCK_JUMP: 1,
}
"""Faults of each kind in one deck."""

_PART = {
    KILL: "process",
    STOP: "process",
    CUT: "link",
    RESET: "link",
    HALF_OPEN: "link",
    DELAY: "link",
    FULL_DISK: "disk",
    IO_ERROR: "disk",
    TORN_WRITE: "disk",
    CLOCK_JUMP: "clock",
}
"""What a fault affects. One part of a target has one fault at a time."""

_LEASE = 10.0
_JUMPS = (10.0, 12 * 3600.0)
"""Bounds of a jump of the clock in seconds; one by days invalidates certificates, as documented."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; times in seconds from the begin of the plan."""

    at: float
    kind: str
    target: str
    seconds: float
    """Duration. After a kill: the pause until the process is started again."""
    amount: float = 0.0
    """Clock jump: seconds. Delay: seconds added to each chunk. Fault of a rank: which one."""

    @property
    def part(self) -> tuple[str, str]:
        """The target and the part of it that the fault affects."""
        return self.target, _PART[self.kind]

    def describe(self) -> str:
        """Kind, target and figures in one line.

        >>> Fault(at=1.0, kind="delay", target="phone-1", seconds=3.0, amount=0.2).describe()
        'delay       phone-1         3.0 s  200 ms each way'
        """
        extra = {DELAY: f"  {1000 * self.amount:.0f} ms each way"}.get(self.kind, "")
        if self.kind == CLOCK_JUMP:
            extra = f"  by {self.amount:+.0f} s"
        return f"{self.kind:<11} {self.target:<14} {self.seconds:4.1f} s{extra}"


def device_names(count: int) -> list[str]:
    """The names of the deployment's devices."""
    return [f"phone-{index}" for index in range(count)]


def datacenter_names(count: int) -> list[str]:
    """The names of the deployment's datacenters."""
    return [f"cluster-{index}" for index in range(count)]


def aggregator_names(count: int) -> list[str]:
    """The names of the processes of the deployment's aggregators."""
    return [f"sums-{index}" for index in range(count)]


def make_plan(seed: int, minutes: float, devices: int, datacenters: int, ranks: int) -> list[Fault]:
    """The faults of a plan in order of time; all end before its end. `ranks`: of each datacenter.

    >>> make_plan(1, 0.5, 3, 0, 0) == make_plan(1, 0.5, 3, 0, 0)
    True
    """
    about = f"isthmus/chaos/{seed}/{minutes}/{devices}/{datacenters}/{ranks}"
    draw = random.Random(about)  # noqa: S311 - repeatable, not secret
    kinds = _Deck(draw, [kind for kind, count in _DECK.items() for _ in range(count)])
    targets = {
        part: _targets(draw, part, devices, datacenters) for part in sorted({*_PART.values()})
    }
    end = 60.0 * minutes
    at = 0.5
    busy: dict[tuple[str, str], float] = {}
    plan: list[Fault] = []
    while at < end - 1.0:
        kind = next(kinds)
        target = next(targets[_PART[kind]])
        seconds, amount = _figures(draw, kind, ranks if target.endswith(RANK) else 0)
        begin = max(at, busy.get((target, _PART[kind]), 0.0))
        if begin < end - 1.0:
            fault = Fault(
                at=round(begin, 2),
                kind=kind,
                target=target,
                seconds=round(min(seconds, end - begin), 2),
                amount=amount,
            )
            busy[fault.part] = fault.at + fault.seconds + 0.5
            plan.append(fault)
        at += draw.uniform(0.5, 3.0) + draw.choice((0.0, 0.5, 1.0)) * min(seconds, _LEASE)
    return sorted(plan, key=lambda fault: fault.at)


class _Deck(Generic[_T]):
    """Deals from a shuffled deck, again and again."""

    def __init__(self, draw: random.Random, cards: Sequence[_T]) -> None:
        self._draw = draw
        self._cards = list(cards)
        self._left: list[_T] = []

    def __next__(self) -> _T:
        if not self._left:
            self._left = self._draw.sample(self._cards, len(self._cards))
        return self._left.pop()

    def __iter__(self) -> Iterator[_T]:
        return self


def _targets(draw: random.Random, part: str, devices: int, datacenters: int) -> _Deck[str]:
    """Half as often the server as all devices, and sometimes a datacenter or one of its ranks."""
    names = device_names(devices)
    cards = [*names, *[SERVER] * max(1, (len(names) + 1) // 2)]
    for name in datacenter_names(datacenters):
        cards += [name] * max(1, len(names) // 3)
        cards += [name + RANK] * (2 if part == "process" else 0)
    return _Deck(draw, cards)


def _figures(draw: random.Random, kind: str, ranks: int) -> tuple[float, float]:
    """Duration and amount; one long fault in four outlasts the lease of a participant."""
    longer = draw.uniform(_LEASE + 1, _LEASE + 4) if draw.random() < 0.25 else 0.0
    short = draw.uniform(0.3, 4.0)
    if ranks:
        return short, float(draw.randrange(ranks))
    if kind in (STOP, CUT, HALF_OPEN):
        return longer or short, 0.0
    if kind == DELAY:
        return short + 2, round(draw.uniform(0.02, 0.4), 3)
    if kind == CLOCK_JUMP:
        sign = draw.choice((-1, 1))
        size = math.exp(draw.uniform(*map(math.log, _JUMPS)))
        return 2 * short, round(sign * size, 0)
    return {RESET: 0.0}.get(kind, short), 0.0


def summary_of(plan: Sequence[Fault]) -> Mapping[str, int]:
    """How many faults of each kind a plan has."""
    return {kind: sum(fault.kind == kind for fault in plan) for kind in _DECK}
