"""A robust rule over the means of random groups, each of which is a secure sum.

First a group whose mean is much longer than those of the shortest groups is left out: an update
that was scaled up makes that of its whole group long. Then one of the rules for single updates
combines the means that are left, as if each were the update of one device.

One of the shortest and not the middle one is what others are compared with, because most groups may
have a liar: of groups of ten devices, one in ten of which lies, 65 % have one. A liar can make its
group short as well, by a large weight and an update of zeros: liars in all of the shortest groups
would have all others left out, and be alone. So the group that others are compared with is after as
many as the rule withstands, and of those up to it one is honest.

Shape legend: N = float32 elements of the exchange set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from isthmus.errors import JobError, RoundFailed, UserError
from isthmus.job.federated import FederatedSection
from isthmus.printable import counted
from isthmus_server.regimes.aggregation.coordinate_wise import (
    SETTINGS,
    Median,
    NothingTrimmed,
    TrimmedMean,
)
from isthmus_server.regimes.aggregation.loading import load_rule
from isthmus_server.regimes.aggregation.rule import AggregatedRound, AggregationRule, SingleUpdate

LONGEST = 3.0
"""How many times longer than the reference a group's mean may be. Means of honest groups differ by
what is left of the noise of their devices, and by the data of these."""
_SHORTEST = 8
"""The reference is the norm of at least one in so many groups, counted from the shortest."""


@dataclasses.dataclass(frozen=True)
class Combined:
    """What a rule has made of the means of groups."""

    vector: torch.Tensor
    """The pseudo-gradient, float32 (N)."""
    left_out: Mapping[str, str]
    """Why each group that was left out before was; the reason names the group."""


class RobustRule:
    """The rule that `federated.robust` names."""

    def __init__(self, federated: FederatedSection, trained: int | None = None) -> None:
        """Load the rule, and check its settings with the groups that a quorum leaves.

        Args:
            federated: names the rule.
            trained: elements of a mean that are parameters; running statistics follow them. None
                for all.

        Raises:
            JobError: they cannot be used.
        """
        self._federated = federated
        self._trained = trained
        self._name = str(federated.robust)
        plain = federated.robust_rule
        assert plain is not None
        try:
            rule = load_rule(plain)
        except NothingTrimmed as error:
            raise JobError(_nothing_trimmed(federated, error.share)) from error
        except UserError as error:
            reason = str(error).replace(SETTINGS, "federated.robust_settings")
            raise JobError(
                f"federated.robust={self._name!r} over {plain.needed} of {plain.cohort} groups: "
                f"{reason}"
            ) from error
        assert rule is not None
        self._rule: AggregationRule = rule

    @property
    def in_words(self) -> str:
        """What holds and what does not, with all of the job's groups."""
        federated = self._federated
        groups = federated.robust_groups
        bad = self.withstands(groups)
        most = groups - shortest(groups, bad)
        each = federated.cohort // groups
        start = (
            f"federated.robust={self._name!r} over {groups} random groups of "
            f"{counted(each, 'device')}"
        )
        liars = federated.cohort // 10
        odds = chance_of_more(most, groups, each, liars)
        are = "is" if most == 1 else "are"
        have = "has" if most == 1 else "have"
        long = (
            f"up to {counted(most, 'group')} {are} left out whose mean is more than {LONGEST:g} "
            f"times as long as those of the {groups - most} shortest; if a tenth of the devices "
            f"lies, more than {counted(most, 'group')} {have} a liar in {odds:.1%} of the rounds"
        )
        if not bad:
            return f"{start} bounds what each group adds, and withstands no lying device; {long}"
        share = bad / federated.cohort
        they_are = "it is" if bad == 1 else "they are"
        return (
            f"{start} withstands any lies in {counted(bad, 'group')}, so "
            f"{counted(bad, 'lying device')} wherever {they_are} ({share:.1%} of the cohort), if "
            f"no honest group is more than {LONGEST:g} times as long as another; and more of them "
            f"only if their sums are long: {long}"
        )

    def withstands(self, groups: int) -> int:
        """In how many of so many groups any lies are withstood."""
        return tolerated(self._rule, groups)

    def combine(
        self, round_: int, means: Mapping[str, tuple[torch.Tensor, int]], doubted: int = 0
    ) -> Combined:
        """Combine the mean of each group, float32 (N), with its number of devices.

        The vectors are kept as they are. `doubted`: groups that were left out before, of which it
        is known that somebody in them lies or has a fault.

        Raises:
            RoundFailed: the rule cannot combine so many groups.
        """
        left_out = self._long({name: vector for name, (vector, _) in means.items()})
        used = {name: mean for name, mean in means.items() if name not in left_out}
        facts = AggregatedRound(
            round=round_,
            size=len(next(iter(used.values()))[0]),
            cohort={name: devices for name, (_, devices) in used.items()},
            quorum=len(means) + doubted,
            max_updates=len(means),
        )
        try:
            combining = self._rule.begin(facts)
            for name, (vector, devices) in used.items():
                # A rule that uses them one by one may change them.
                own = vector if self._rule.needs_all else vector.clone()
                # Not by the examples that devices claim: one that lies would outweigh the others.
                combining.add(SingleUpdate(device=name, examples=devices, vector=own))
            return Combined(combining.result(), left_out)
        except RoundFailed:
            raise
        except UserError as error:
            raise RoundFailed(f"federated.robust={self._name!r}: {error}") from error

    def _long(self, means: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The groups whose parameters or running statistics are too long, with the reason.

        Apart from each other: running statistics may be far larger, and a long update of parameters
        would not be noticed in the length of both.
        """
        reference = shortest(len(means), self.withstands(len(means)))
        parameters = {name: mean[: self._trained] for name, mean in means.items()}
        left_out = long_groups(parameters, reference)
        if self._trained is not None:
            statistics = {name: mean[self._trained :] for name, mean in means.items()}
            left_out = long_groups(statistics, reference, "running statistics are") | left_out
        return left_out


def _nothing_trimmed(federated: FederatedSection, share: float) -> str:
    """Says why a share of the groups is too small, and what to change.

    Not the cohort: more devices are larger groups, and no more of them.
    """
    needed = federated.needed_groups
    enough = math.ceil(100 / needed) / 100
    return (
        f"federated.robust={federated.robust!r} leaves out federated.robust_settings.share="
        f"{share:g} of the groups at each end, and with a quorum of {federated.needed} devices "
        f"only {needed} of {federated.robust_groups} random groups need be there, of which that "
        f"is less than one; raise the share to {enough:g} or more, or federated.robust_groups"
    )


def check_robust(federated: FederatedSection) -> list[str]:
    """Check the rule that a job names; what it withstands, in words, or nothing without one.

    Raises:
        JobError: its settings cannot be used.
    """
    return [] if federated.robust is None else [RobustRule(federated).in_words]


def long_groups(
    means: Mapping[str, torch.Tensor], reference: int, what: str = "mean is"
) -> dict[str, str]:
    """The groups whose means are too long, each with the reason, in which they are `what`.

    `reference`: which of them, from the shortest, the others are compared with.

    >>> means = {str(n): torch.full((4,), 1.0 + n / 10) for n in range(4)}
    >>> long_groups(means, 2)
    {}
    >>> long_groups(means | {"random-5-of-5": torch.full((4,), -5.0)}, 2)
    {'random-5-of-5': 'the sum of its group random-5-of-5 was left out: its mean is 4.5 times as \
long as that of the shortest groups'}
    """
    norms = {
        name: float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        for name, vector in means.items()
    }
    limit = sorted(norms.values())[reference - 1]
    return {
        name: f"the sum of its group {name} was left out: its {what} {_times(norm, limit)} times "
        "as long as that of the shortest groups"
        for name, norm in norms.items()
        if norm > LONGEST * limit
    }


def shortest(groups: int, withstood: int) -> int:
    """Which of so many groups, from the shortest, others are compared with; at least the second.

    It is after those that the rule withstands: a group that is honest is among those up to it.

    >>> shortest(3, 1), shortest(12, 0), shortest(32, 0), shortest(12, 5)
    (2, 2, 4, 6)
    """
    return min(groups, max(2, math.ceil(groups / _SHORTEST), withstood + 1))


def tolerated(rule: AggregationRule, groups: int) -> int:
    """How many of so many groups may be anything without moving an element beyond the others'.

    >>> tolerated(Median(FederatedSection()), 12)
    5
    """
    if isinstance(rule, Median):
        return (groups - 1) // 2
    if isinstance(rule, TrimmedMean):
        return math.floor(rule.share * groups + 1e-9)
    return 0


def chance_of_more(most: int, groups: int, each: int, liars: int) -> float:
    """With what probability more than `most` random groups of `each` devices have a liar.

    Exact: one liar after the other gets one of the places that are left.

    >>> chance_of_more(0, 3, 4, 1), round(chance_of_more(8, 10, 12, 12), 3)
    (1.0, 0.115)
    """
    chances = {0: 1.0}
    for placed in range(min(liars, groups * each)):
        after: dict[int, float] = {}
        for taken, chance in chances.items():
            among = (taken * each - placed) / (groups * each - placed)
            after[taken] = after.get(taken, 0.0) + chance * among
            after[taken + 1] = after.get(taken + 1, 0.0) + chance * (1 - among)
        chances = after
    return sum(chance for taken, chance in chances.items() if taken > most)


def _times(norm: float, reference: float) -> str:
    """How many times as long, with two digits, and without an exponent if it is readable so.

    >>> _times(4.52, 1), _times(123, 1), _times(1e9, 1), _times(1, 0)
    ('4.5', '120', '1e+09', 'infinitely many')
    """
    if reference <= 0:
        return "infinitely many"
    text = f"{norm / reference:.2g}"
    return f"{float(text):.0f}" if 100 <= float(text) < 1e6 else text
