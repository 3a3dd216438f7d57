"""The policy interface: what a policy observes, and what it may answer.

A policy is a pure function: `plan(observation) -> Plan | Compare | Wait | Stop`. It keeps no state
of its own; what it wants to remember it puts into the `state` of its answer and reads from the next
`Observation.state`, also after a crash and a resume.

A policy of your own, named in a job as ``policy = "my_module:Greedy"``::

    class Greedy:
        def __init__(self, strategy):           # the job's [strategy] table
            pass

        def plan(self, observation):
            better = observation.last_gain("federated") > observation.last_gain("datacenter")
            return Plan("federated" if better else "datacenter", reason="it gained more last time")

A policy that needs to know which of several models is better answers `Compare` before it plans:
devices score the models, and the policy is called again for the same round with the result in
`Observation.comparisons`, or with the reason in `Observation.refused` if there is no result.

The job's limits take precedence over every answer: see `isthmus_server.strategy.limits`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from isthmus.job import StrategySection, TargetMetric, parse_settings
from isthmus.job.measurements import BestModel
from isthmus.job.section import S, Section
from isthmus_server.strategy.gradients import GradientMeasurement, GroupSum

Kind = Literal["datacenter", "federated", "hybrid"]
KINDS: tuple[Kind, ...] = ("datacenter", "federated", "hybrid")

Side = Literal["datacenter", "federated"]


CURRENT = "current"
"""The model that training continues from."""
SERVED = "served"
"""The model that is delivered: an average of the iterates, or the current one."""
INITIAL = "initial"
"""The model that the run began with."""
BEST = "best"
"""The model with the best metric so far, with `evaluation.keep_best`."""
MAX_KEPT = 4
"""Models that plans may keep at a time, under names of their own."""


TIGHTEST_DEVICES = 10
"""Devices at which the interval of a comparison is the tightest: a usual number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Scores of several models from the same devices, securely summed.

    Every device scores every model, so a difference of two scores has a much smaller standard error
    than either score (a paired test).
    """

    models: tuple[str, ...]
    """Names of the models; differences are to the first."""
    devices: int
    """How many devices answered."""
    score: Mapping[str, float]
    """Mean over devices of a bounded loss, 0 (best) to 1, by model."""
    difference: Mapping[str, float]
    """Mean over devices of the model's score minus the first one's; below 0 is better."""
    standard_error: Mapping[str, float]
    """Standard error of each difference."""
    price: float
    """What the comparison cost, in the job's unit of price."""

    def radius(self, model: str, error: float = 0.05) -> float:
        """Half the length of the confidence interval of a model's difference from the first.

        The interval belongs to an asymptotic confidence sequence: it holds at any number of
        devices, so that asking more of them later, or asking again, does not make it wrong
        (Waudby-Smith et al., "Time-uniform central limit theory and asymptotic confidence
        sequences", Annals of Statistics 2024, theorem 2.2). It needs the mean and the standard
        error only, which is what a secure sum reveals.

        Args:
            model: a model after the first.
            error: probability, at each side and at any number of devices, that the interval misses
                the difference.
        """
        shape = -2 * math.log(error) + math.log(1 - 2 * math.log(error))  # equation 22 of the paper
        scaled = self.devices * shape / TIGHTEST_DEVICES
        factor = 2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / error)
        return self.standard_error[model] * math.sqrt(factor)

    def beats(self, model: str, error: float = 0.05) -> bool:
        """Return whether a model is better than the first one, with this probability of error."""
        return self.difference[model] + self.radius(model, error) < 0

    def loses(self, model: str, error: float = 0.05) -> bool:
        """Return whether a model is worse than the first one, with this probability of error."""
        return self.difference[model] - self.radius(model, error) > 0

    def is_no_worse(self, model: str, margin: float, error: float = 0.05) -> bool:
        """Return whether a model is at most `margin` worse than the first (non-inferiority)."""
        return self.difference[model] + self.radius(model, error) < margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRound:
    """Results and costs of a committed round."""

    round: int
    regime: Kind
    metrics: Mapping[str, float]
    """Central held-out figures; empty if the round was not evaluated."""
    seconds: float
    """Wall time."""
    price: float
    """Cost in the job's unit of price, comparisons made for it included."""
    accepted: int
    """Updates that went into the model."""
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_each: int = 0
    """Largest number of bytes that one device sent and received."""
    device_seconds: float = 0.0
    datacenter_seconds: float = 0.0
    datacenter_steps: int = 0
    training: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Figures of the training itself (loss), by regime."""
    norms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient, if the server saw it. In a transfer round, the
    datacenter's is the norm of its gradient times the weight with which devices applied it."""
    cosine: float | None = None
    """Cosine between the two pseudo-gradients of a hybrid round."""
    gradients: GradientMeasurement | None = None
    """Gradients at the model that the round started from; None unless the plan requested them."""
    groups: Mapping[str, GroupSum] = dataclasses.field(default_factory=dict)
    """The sum of each group of devices, if the plan was `by_group` and they could be summed so;
    `REST` is that of all other devices. With `federated.robust`, those of random groups, of which
    some may be `left_out`."""
    comparisons: Sequence[Comparison] = ()
    """Comparisons that the policy requested before it planned the round."""
    elapsed: float = 0.0
    """Duration of the run in seconds when the round was committed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """When one side can work, by the windows that the job declares; always, without windows."""

    ready: bool = True
    """Whether now is within a window."""
    changes_in: float | None = None
    """Seconds until that changes; None if it never does."""
    share: float = 1.0
    """Part of the remaining time (of a week, without a time limit) that is within a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The input of a policy's decision: configuration and measured values."""

    round: int
    """The round to plan, from 1."""
    rounds: int
    """The job's limit on rounds."""
    history: Sequence[PastRound]
    """Committed rounds, oldest first."""
    clients_ready: int
    """Edge devices that are connected, have opened the run and may be invited now."""
    datacenter_ready: bool
    """Whether a datacenter is connected and has opened the run."""
    spent: float
    """Price of everything so far, failed attempts included."""
    budget: float | None
    """The job's limit on the price; None without one."""
    state: Mapping[str, Any]
    """The state of the policy's last committed plan."""
    clients_ineligible: int = 0
    """Edge devices that are connected but may not be invited now: outside of their hours, or at
    the participation limit."""
    seconds_until_quorum: float | None = None
    """Seconds until enough connected devices for a quorum may be invited; None if never."""
    others_may_come: bool = False
    """Whether there may be a quorum all the same, with devices that are known and not connected."""
    datacenters: int = 1
    """Connected datacenters; each makes the steps of a datacenter round."""
    datacenter_names: Sequence[str] = ()
    """Names of the connected datacenters, sorted."""
    cohort: int = 8
    """Updates that the job wants from a federated round."""
    over_selection: float = 1.0
    """cohort x this many devices are invited."""
    quorum: int = 3
    """Fewest updates with which a federated round can be committed."""
    datacenter_steps: int = 50
    """Optimizer steps that the job wants from a datacenter round."""
    merge: str = "weighted"
    """How a hybrid round merges the two sides, unless the plan overrides it."""
    can_measure_gradients: bool = True
    """Whether a plan may set `measure_gradients`: not in buffered mode, with Flower, another
    aggregation than the mean, a codec or control variates, or with `[privacy]`."""
    can_compare: bool = True
    """Whether a policy may ask for comparisons: with `[privacy]` only if `measurements` is set, and
    never with `[federated.privacy]`."""
    can_sum_by_group: bool = False
    """Whether a plan may set `by_group`: the job has `federated.groups`."""
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Devices that may be invited now, by the group that they have declared; `REST` for none."""
    client_price: float = 1.0
    """Price of one device taking part in a round."""
    step_price: float = 0.01
    """Price of one optimizer step of the datacenter."""
    evaluation_devices: int = 0
    """Devices that will evaluate the round's model, each for the price of scoring one model."""
    comparison_price: float = 0.02
    """Price of one device scoring one model."""
    client_bytes: float = 0.0
    """Bytes that one device sends and receives in a round: the recent maximum, at least two
    models."""
    model_bytes: float = 0.0
    """Size of the encoded model."""
    now: float = 0.0
    """Seconds since 1970-01-01 00:00 UTC."""
    elapsed: float = 0.0
    """Duration of the run in seconds, without the time in which it was stopped."""
    seconds_left: float | None = None
    """Seconds until the job's limit on the run's duration; None without one."""
    bytes_left: float | None = None
    """Rest of the job's limit on bytes to and from devices; None without one."""
    forecast: Mapping[Side, Forecast] = dataclasses.field(default_factory=dict)
    """Availability of each side by the job's windows, whether it is connected or not."""
    target: TargetMetric | None = None
    """The held-out metric at which the run ends; None without one."""
    keep_best: BestModel | None = None
    """The metric by which the run keeps its best model; None if it keeps none."""
    patience: int | None = None
    """Evaluated rounds without a better model after which the run ends; None without that limit."""
    models: Sequence[str] = (CURRENT,)
    """Models to compare and start from: current, served, initial, best with `keep_best`, and what
    plans have kept."""
    comparisons: Sequence[Comparison] = ()
    """Comparisons made for this round so far."""
    refused: Sequence[str] = ()
    """Why comparisons requested in this round were not made; requesting again ends the run."""
    epsilon: float | None = None
    """The job's privacy budget for each device; None without one."""
    epsilon_spent: float = 0.0
    """Epsilon of the device that was asked most. A device that has none left counts as not
    eligible."""

    def open(self, side: Side) -> bool:
        """Return whether a side is within its windows now."""
        return self.forecast.get(side, Forecast()).ready

    def invited(self, cohort: int | None = None) -> int:
        """Return how many devices a federated round invites."""
        return math.ceil((cohort or self.cohort) * self.over_selection)

    def price(
        self,
        regime: Kind,
        cohort: int | None = None,
        steps: int | None = None,
        *,
        measured: bool = False,
    ) -> float:
        """Return the price of a round in which every invited device takes part.

        With `measured`, the datacenters compute a gradient of as many steps that the round would
        not need otherwise.
        """
        devices = 0 if regime == "datacenter" else self.invited(cohort)
        each = steps or self.datacenter_steps
        total_steps = 0 if regime == "federated" else each * max(self.datacenters, 1)
        total_steps += each * self.datacenters if measured else 0
        return devices * self.client_price + total_steps * self.step_price

    @property
    def epsilon_left(self) -> float | None:
        """Rest of the privacy budget of the device that was asked most; None without one."""
        return None if self.epsilon is None else max(0.0, self.epsilon - self.epsilon_spent)

    @property
    def budget_left(self) -> float | None:
        """Rest of the budget; None without one."""
        return None if self.budget is None else self.budget - self.spent

    def last_gain(self, regime: Kind, metric: str = "loss") -> float:
        """Return how much `metric` fell in the last evaluated round of a regime; 0 if unknown."""
        evaluated = [past for past in self.history if metric in past.metrics]
        for before, after in zip(reversed(evaluated[:-1]), reversed(evaluated[1:]), strict=True):
            if after.regime == regime:
                return before.metrics[metric] - after.metrics[metric]
        return 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Train the next round in a regime."""

    regime: Kind
    reason: str
    """One clause for the user, completing "because ..."."""
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """State for the policy's next decision, as JSON data."""
    _: dataclasses.KW_ONLY
    datacenter_steps: int | None = None
    """Optimizer steps of the datacenter; overrides the job's."""
    cohort: int | None = None
    """Updates of a federated round; overrides the job's."""
    merge: Literal["weighted", "projected", "transfer"] | None = None
    """How a hybrid round merges the two sides; overrides the job's."""
    transfer_weight: float | None = None
    """lambda of `transfer`; overrides the job's."""
    datacenter_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Weights of single datacenters by name, in place of the one weight of all: the lambda of
    `transfer`, else `strategy.datacenter_weight`. A datacenter is left out with the weight 0. Each
    also counts by its examples, so equal weights give the same as one weight of all."""
    start: str = CURRENT
    """The model to train from: one of `Observation.models`, or `a+b` for the mean of two. With any
    model but the current one, the served average begins again."""
    reset_optimizer: bool = False
    """Reset the server optimizer's momentum first."""
    step_scale: float = 1.0
    """Factor on the merged pseudo-gradient; a round of a single datacenter has none."""
    measure_gradients: bool = False
    """Have devices send their mean gradient at the round's model, summed like their updates, and
    datacenters compute theirs over `datacenter_steps` batches; see `PastRound.gradients`. It
    doubles the devices' uploads."""
    by_group: bool = False
    """Have the devices of each group summed by themselves; see `PastRound.groups`. Groups that are
    too small are summed with `REST`, and if that is too small, there is one sum of all devices."""
    group_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Factor of a group's examples in the mean of the groups, by its name; 1 for the others."""
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Models to keep when the round is committed: a name of the policy's choice, mapped to current
    or served. At most four are kept; a repeated name replaces its model, and "" drops it."""


@dataclasses.dataclass(frozen=True)
class Compare:
    """Have devices score several models before the round is planned."""

    models: tuple[str, ...]
    """Two to four of `Observation.models`; differences are to the first. `a+b` is the mean of
    two."""
    devices: int
    """How many devices score them."""
    reason: str
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """State for the policy's next call."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait, then call the policy again."""

    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run: no further work is worth its price, or allowed."""

    reason: str


Answer = Plan | Compare | Wait | Stop


class Policy(Protocol):
    """Decides each round."""

    def plan(self, observation: Observation) -> Answer:
        """Answer for the next round; the same observation always gets the same answer."""
        ...


class NoSettings(Section):
    """Settings of a policy without settings."""


def settings_of(strategy: StrategySection, kind: type[S]) -> S:
    """Parse a policy's own settings, `[strategy.settings]` of the job.

    Raises:
        JobError: one sentence that names the key, the value and what is allowed.
    """
    return parse_settings(kind, strategy.settings, "strategy.settings")


def no_settings(strategy: StrategySection) -> None:
    """Check that the job sets no settings for a policy that has none.

    Raises:
        JobError: it does.
    """
    settings_of(strategy, NoSettings)
