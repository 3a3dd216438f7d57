"""What a policy sees and what it answers.

A policy is a pure function: `plan(observation) -> Plan | Compare | Wait | Stop`. It keeps nothing;
what it wants to remember it puts into its answer's `state` and finds again in the next
`Observation.state`, after a crash and a resume as well.

A policy of your own, named in a job as ``policy = "my_module:Greedy"``::

    class Greedy:
        def __init__(self, strategy):           # the job's [strategy] table
            pass

        def plan(self, observation):
            better = observation.last_gain("federated") > observation.last_gain("datacenter")
            return Plan("federated" if better else "datacenter", reason="it gained more last time")

A policy that must know which of two models is better asks before it plans: it answers `Compare`,
devices score the models in one visit, and it is called again for the same round with the result in
`Observation.comparisons`, or with the reason in `Observation.refused` if that cannot be had.

Whatever a policy answers, the job's limits win: see `isthmus_server.strategy.limits`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from isthmus.job import StrategySection, parse_settings
from isthmus.job.section import S, Section

Kind = Literal["datacenter", "federated", "hybrid"]
KINDS: tuple[Kind, ...] = ("datacenter", "federated", "hybrid")

Side = Literal["datacenter", "federated"]


CURRENT = "current"
"""The model that training goes on from."""
SERVED = "served"
"""The model that is handed out: an average of the iterates, or the current one."""
INITIAL = "initial"
"""The model that the run began with."""
MAX_KEPT = 4
"""Models that plans may keep at a time, by names of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several models scored by the same devices in one visit, securely summed.

    The same devices score every model, so a difference of two has a much smaller standard error
    than either score (a paired test).
    """

    models: tuple[str, ...]
    """Their names; differences are to the first."""
    devices: int
    """How many answered."""
    score: Mapping[str, float]
    """Mean over devices of a bounded loss, 0 (best) to 1, by model."""
    difference: Mapping[str, float]
    """Mean over devices of the model's score minus the first one's; below 0 is better."""
    standard_error: Mapping[str, float]
    """Of each difference."""
    price: float
    """What the visit cost."""

    def beats(self, model: str, z: float = 1.0) -> bool:
        """Whether a model is better than the first by more than `z` standard errors."""
        return self.difference[model] < -z * self.standard_error[model]

    def loses(self, model: str, z: float = 1.0) -> bool:
        """Whether it is worse by more than `z` standard errors."""
        return self.difference[model] > z * self.standard_error[model]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRound:
    """What a committed round came to."""

    round: int
    regime: Kind
    metrics: Mapping[str, float]
    """Central held-out figures; empty where the round was not evaluated."""
    seconds: float
    """Wall time."""
    price: float
    """Cost in the job's unit of price, comparisons made for it included."""
    accepted: int
    """Updates that went into the model."""
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_each: int = 0
    """The most that one device sent and was sent."""
    device_seconds: float = 0.0
    datacenter_seconds: float = 0.0
    datacenter_steps: int = 0
    training: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """The training's own figures (loss), by regime."""
    norms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient, where the server saw it; of what devices took along,
    which is the datacenter's gradient times its weight, where they did."""
    cosine: float | None = None
    """Between the two pseudo-gradients of a hybrid round."""
    comparisons: Sequence[Comparison] = ()
    """What the policy had asked for before it planned the round."""
    elapsed: float = 0.0
    """Seconds that the run had gone on for when it was done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """When one side can work: as the job declares its windows, or always."""

    ready: bool = True
    """Within a window now."""
    changes_in: float | None = None
    """Seconds until that changes; None if it never does."""
    share: float = 1.0
    """The part of the time that is left (of a week, without a limit) within a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Everything a policy may know when it plans a round: only what was honestly measured."""

    round: int
    """The round to plan, from 1."""
    rounds: int
    """The job's limit."""
    history: Sequence[PastRound]
    """Committed rounds, oldest first."""
    clients_ready: int
    """Edge devices that are here, have opened the run and may be asked now."""
    datacenter_ready: bool
    """A datacenter is here and has opened the run."""
    spent: float
    """Price of everything so far, failed attempts included."""
    budget: float | None
    """The job's limit on it."""
    state: Mapping[str, Any]
    """What the policy put into its last committed plan."""
    clients_resting: int = 0
    """Edge devices that are here and may not be asked now: outside of their hours, or at the most
    rounds that one is asked for."""
    enough_in: float | None = None
    """Seconds until as many as the quorum may be asked; None if that is never, of those here."""
    datacenters: int = 1
    """Those that are here; each makes the steps of a datacenter round."""
    cohort: int = 8
    """Updates that the job wants from a federated round."""
    over_selection: float = 1.0
    """cohort x this are invited."""
    needed: int = 3
    """The quorum: fewest updates that a federated round can be committed with."""
    datacenter_steps: int = 50
    """Optimizer steps that the job wants from a datacenter round."""
    client_price: float = 1.0
    """What it costs that one device takes part in a round."""
    step_price: float = 0.01
    """What one optimizer step of the datacenter costs."""
    visit_price: float = 0.02
    """What it costs that one device scores one model."""
    client_bytes: float = 0.0
    """What one device in one round sends and is sent: the most of late, or two models."""
    model_bytes: float = 0.0
    """Size of the model as it is sent."""
    now: float = 0.0
    """Seconds since 1970-01-01 00:00 UTC."""
    elapsed: float = 0.0
    """Seconds that the run has gone on for, without the time in which it was stopped."""
    seconds_left: float | None = None
    """Until the job's limit on the run's time; None without one."""
    bytes_left: float | None = None
    """Of the job's limit on bytes to and from devices; None without one."""
    epsilon_left: float | None = None
    """Of the privacy budget; None without one."""
    forecast: Mapping[Side, Forecast] = dataclasses.field(default_factory=dict)
    """What the job's windows say of each side, here or not."""
    models: Sequence[str] = (CURRENT,)
    """What may be compared and started from: current, served, initial, and what plans have kept."""
    comparisons: Sequence[Comparison] = ()
    """Asked for in this round so far."""
    refused: Sequence[str] = ()
    """Why comparisons asked for in this round could not be made; asking again ends the run."""

    def open(self, side: Side) -> bool:
        """Whether a side is within its windows now."""
        return self.forecast.get(side, Forecast()).ready

    def invited(self, cohort: int | None = None) -> int:
        """Devices that a federated round invites."""
        return math.ceil((cohort or self.cohort) * self.over_selection)

    def price(self, regime: Kind, cohort: int | None = None, steps: int | None = None) -> float:
        """What a round costs if every device it wants takes part."""
        devices = 0 if regime == "datacenter" else self.invited(cohort)
        made = 0 if regime == "federated" else steps or self.datacenter_steps
        made *= max(self.datacenters, 1)
        return devices * self.client_price + made * self.step_price

    @property
    def left(self) -> float | None:
        """Of the budget; None without one."""
        return None if self.budget is None else self.budget - self.spent

    def last_gain(self, regime: Kind, metric: str = "loss") -> float:
        """By how much `metric` fell over the last evaluated round of a regime; 0 if unknown."""
        evaluated = [past for past in self.history if metric in past.metrics]
        for before, after in zip(reversed(evaluated[:-1]), reversed(evaluated[1:]), strict=True):
            if after.regime == regime:
                return before.metrics[metric] - after.metrics[metric]
        return 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Who trains the next round, and why."""

    regime: Kind
    reason: str
    """One clause for a person, completing "because ..."."""
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For the policy's next decision; JSON data."""
    _: dataclasses.KW_ONLY
    datacenter_steps: int | None = None
    """Instead of the job's."""
    cohort: int | None = None
    """Instead of the job's."""
    merge: Literal["weighted", "projected", "transfer"] | None = None
    """How a hybrid round joins the two sides, instead of the job's."""
    transfer_weight: float | None = None
    """lambda of `transfer`, instead of the job's."""
    start: str = CURRENT
    """The model to train from: one of `Observation.models`, or `a+b` for half of each of two. The
    served average begins anew with any but the current one."""
    reset_optimizer: bool = False
    """Forget the server optimizer's momentum first."""
    step_scale: float = 1.0
    """What the merged pseudo-gradient is multiplied with; a round of one datacenter has none."""
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Models to keep when the round is committed: a name of the policy's own to current or served.
    At most four are kept; keeping a name again replaces it, and mapping it to "" drops it."""


@dataclasses.dataclass(frozen=True)
class Compare:
    """Ask some devices to score several models before the round is planned."""

    models: tuple[str, ...]
    """Two to four of `Observation.models`; differences are to the first. `a+b` is half of each."""
    devices: int
    """How many to visit."""
    reason: str
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For the next call."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Do nothing for a while, then ask again."""

    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run here: nothing that is left to do is worth it, or allowed."""

    reason: str


Answer = Plan | Compare | Wait | Stop


class Policy(Protocol):
    """Decides, round by round."""

    def plan(self, observation: Observation) -> Answer:
        """Answer for the next round; the same observation always gets the same answer."""
        ...


class NoSettings(Section):
    """Of a policy that has none."""


def settings_of(strategy: StrategySection, kind: type[S]) -> S:
    """A policy's own settings, `[strategy.settings]` of the job.

    Raises:
        JobError: one sentence naming the key, the value and what is allowed.
    """
    return parse_settings(kind, strategy.settings, "strategy.settings")


def no_settings(strategy: StrategySection) -> None:
    """Refuse settings where there are none."""
    settings_of(strategy, NoSettings)
