"""What a job costs by its own prices: under its policy, and if every round is of one regime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isthmus.errors import JobError
from isthmus.job import Job, with_changes
from isthmus.job.planned import EXACT, Figure
from isthmus.printable import counted
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.read.pages.templates import digits
from isthmus_server.strategy.forecast import planned_price
from isthmus_server.strategy.limits import PRICE_TOLERANCE
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policies.fixed import Alternate, Fixed
from isthmus_server.strategy.policies.schedule import Schedule
from isthmus_server.strategy.policy import KINDS, Kind, Observation, Plan, Policy
from isthmus_server.strategy.round_spec import evaluates

UNIT_OF_PRICE = "of the job's unit of price"
WITHOUT_FAILED = "without failed attempts"
"""What the price of rounds leaves out, if it is not known how often attempts fail."""
_EARLIER = "earlier"
"""When a run ends by its budget, if it is not known after how many rounds."""
_OF_A_BUFFER = "at least, of updates that count, and devices that are broken off cost too"
"""How the price of rounds of a buffer is obtained."""


def possible_regimes(job: Job, policy: Policy, *, datacenter: bool) -> tuple[Kind, ...]:
    """The regimes that rounds of a job can have.

    Args:
        job: the job.
        policy: of the job; one that names its regimes uses no others, but for `adaptive`.
        datacenter: whether there is one.
    """
    named: Sequence[Kind] = getattr(policy, "regimes", ())
    if named and job.strategy.policy != "adaptive":
        return tuple(kind for kind in KINDS if kind in named)
    return KINDS if datacenter else ("federated",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostQuestion:
    """What the price of a run follows from."""

    job: Job
    policy: Policy
    """The job's."""
    regimes: Sequence[Kind]
    """Regimes that rounds of the job can have."""
    model_bytes: int

    def prices(self, failed: FailedAttempts | None = None) -> list[Figure]:
        """The price of the run, see `costs`."""
        return costs(self.job, self.policy, self.regimes, self.model_bytes, failed)


def costs(
    job: Job,
    policy: Policy,
    regimes: Sequence[Kind],
    model_bytes: int,
    failed: FailedAttempts | None = None,
) -> list[Figure]:
    """The price of the run by policy and regime, and the range between, if all invited take part.

    Comparisons that a policy asks for cost more. If the policy mixes regimes, other policies may,
    and all regimes that the job can have are among them.

    Args:
        job: the job.
        policy: of the job.
        regimes: that its rounds can have.
        model_bytes: of the model that is exchanged.
        failed: attempts at rounds of devices that fail, whose mean price is added; None if it is
            not known how many do.
    """
    listed = [kind for kind in KINDS if kind in regimes or _can_have(job, kind)]
    if len(regimes) == 1:
        listed = list(regimes)
    runs = {kind: _prices(job, [kind] * job.rounds, model_bytes, failed) for kind in listed}
    prices = [(kind, sum(of_run)) for kind, of_run in runs.items()]
    is_buffered = job.federated.mode == "buffered" and any(kind != "datacenter" for kind in listed)
    exact = f"{EXACT}, {WITHOUT_FAILED}"
    how = _OF_A_BUFFER if is_buffered else exact
    if failed is not None:
        known = _OF_A_BUFFER if is_buffered else EXACT
        added = f"; {digits(failed.price)} a round is for failed attempts" if failed.price else ""
        how = f"{known}; {failed.how}{added}"
    # The mean of failed attempts does not say after which round the budget is spent.
    is_exact = not is_buffered and (failed is None or not failed.price)
    ends = {
        f"all rounds {kind}": _end_within(of_run, job.budget)
        for kind, of_run in runs.items()
        if is_exact or kind == "datacenter"
    }
    found = [
        Figure(
            f"all rounds {kind}",
            price,
            UNIT_OF_PRICE,
            exact if kind == "datacenter" else how,
        )
        for kind, price in prices
    ]
    if len(prices) > 1:
        least = min(price for _, price in prices)
        most = max(price for _, price in prices)
        own = f"the job's policy, {job.strategy.policy}"
        kinds = _planned_kinds(job, policy)
        if kinds is None:
            how_decided = f"{how}; which it chooses is not known before it runs"
            of_policy = [price for kind, price in prices if kind in regimes]
            figure = Figure(own, min(of_policy), UNIT_OF_PRICE, how_decided, most=max(of_policy))
            found.insert(0, figure)
        else:
            of_run = _prices(job, kinds, model_bytes, failed)
            found.insert(0, Figure(own, sum(of_run), UNIT_OF_PRICE, how))
            if is_exact:
                ends[own] = _end_within(of_run, job.budget)
        found.append(Figure("any mixture", least, UNIT_OF_PRICE, how, most=most))
    return [_within(each, job.budget, ends.get(each.name, _EARLIER)) for each in found]


def beyond(figure: Figure, budget: float | None, ends: str = _EARLIER) -> str:
    """A clause that a price goes beyond the budget of the job; empty if it does not.

    Args:
        figure: the price.
        budget: of the job; None for none.
        ends: when the run ends then.
    """
    if budget is None or figure.highest <= budget:
        return ""
    part = "" if figure.value > budget else "its highest "
    return f"{part}beyond budget={budget:.15g}, where the run ends {ends}"


def _end_within(prices: Sequence[float], budget: float | None) -> str:
    """After how many rounds of these prices a run ends by its budget, and what they cost.

    >>> _end_within([3.0, 3.0, 3.0], 7.0)
    'after 2 of 3 rounds, for 6'
    """
    spent = 0.0
    count = 0
    for price in prices:
        if budget is not None and spent + price > budget + PRICE_TOLERANCE:
            break
        spent += price
        count += 1
    return f"after {count} of {counted(len(prices), 'round')}, for {digits(spent)}"


def _within(figure: Figure, budget: float | None, ends: str) -> Figure:
    """The figure, with a mark if it goes beyond the budget."""
    mark = beyond(figure, budget, ends)
    return dataclasses.replace(figure, how=f"{figure.how}; {mark}") if mark else figure


def _can_have(job: Job, kind: Kind) -> bool:
    """Whether a job whose policy mixes regimes can be changed to one with all rounds of a kind."""
    try:
        with_changes(job, {"strategy.policy": kind, "strategy.settings": {}})
    except JobError:
        return False
    return True


def _planned_kinds(job: Job, policy: Policy) -> list[Kind] | None:
    """The regime of each round by the job's policy; None if it depends on the run or the hour."""
    if isinstance(policy, Schedule) and any(phase.hours for phase in policy.phases):
        return None
    if not isinstance(policy, Fixed | Alternate | Schedule):
        return None
    kinds: list[Kind] = []
    seen = _observed(job, ("datacenter-0",), model_bytes=0)
    for number in range(1, job.rounds + 1):
        plan = policy.plan(dataclasses.replace(seen, round=number))
        assert isinstance(plan, Plan)
        kinds.append(plan.regime)
        seen = dataclasses.replace(seen, state=plan.state)
    return kinds


def _prices(
    job: Job, kinds: Sequence[Kind], model_bytes: int, failed: FailedAttempts | None
) -> list[float]:
    """The prices of rounds of these regimes, each with the mean of failed attempts if known."""
    of_failed = 0.0 if failed is None else failed.price
    found = []
    of_round: dict[tuple[Kind, int], float] = {}
    for number, kind in enumerate(kinds, 1):
        devices = job.evaluation.devices if evaluates(job, number) else 0
        if (kind, devices) not in of_round:
            of_round[kind, devices] = _price_of_round(job, kind, devices, model_bytes)
        found.append(of_round[kind, devices] + (of_failed if kind != "datacenter" else 0.0))
    return found


def _price_of_round(job: Job, kind: Kind, evaluation_devices: int, model_bytes: int) -> float:
    datacenters = () if kind == "federated" else ("datacenter-0",)
    observed = _observed(job, datacenters, model_bytes)
    seen = dataclasses.replace(observed, evaluation_devices=evaluation_devices)
    return planned_price(Plan(kind, reason="it is planned"), seen)


def _observed(job: Job, datacenters: Sequence[str], model_bytes: int) -> Observation:
    """What a policy sees before the first round, if all invited devices are ready."""
    return observe(
        job,
        (),
        spent=0.0,
        device_bytes=0,
        state={},
        clients_ready=job.federated.invited,
        datacenters=datacenters,
        model_bytes=model_bytes,
        now=0.0,
        elapsed=0.0,
    )
