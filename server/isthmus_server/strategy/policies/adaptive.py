"""A plan from the declared target and budget, with a test before each step that could do harm.

The share of the target that lives on the devices (`strategy.target_edge_share`, pi) chooses the
regime, and visits to devices decide what data cannot promise::

    pi = 0        datacenter rounds
    0 < pi < 1    hybrid rounds by one-way gradient transfer (Augenstein et al. 2022)
    pi = 1        federated rounds, after a warm start in the datacenter if that displaces none:

    start --slack, dark-> warm --beats the initial model--> warm on --plateau or limit--> edge
      |                    +-----does not: back to the initial model, no more datacenter---^
      +--neither-------------------------------------------------------------------------> edge

    edge, probation   after some rounds the served model must not lose to the warm one; else back to
                      that, momentum zeroed, half steps; twice: quarter steps, and no more tests
    edge, dark        nothing, by default; with `branches` the datacenter trains one while the
                      devices are away, if there is money that they cannot spend; it is merged,
                      whole or half, only if it wins a comparison, and given up after losing twice
    privacy spent     the datacenter alone goes on

Greedy gain per cost is not among the things it looks at (docs/strategy.md says why). Phases go one
way, so it cannot thrash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from isthmus.job import StrategySection
from isthmus.section import Section
from isthmus_server.strategy.outlook import flat_rounds, rounds_with_devices
from isthmus_server.strategy.policies.rule import transfer_weight
from isthmus_server.strategy.policy import (
    CURRENT,
    INITIAL,
    SERVED,
    Answer,
    Compare,
    Comparison,
    Forecast,
    Observation,
    Plan,
    settings_of,
)

WARM = "warm"
"""Kept: the model at the end of a warm start."""
DAY = "day"
"""Kept: the model that was served when the devices' window closed."""


class Settings(Section):
    """`[strategy.settings]` of this policy."""

    z: Annotated[float, Field(ge=0)] = 1.0
    """Standard errors by which a comparison must be won or lost to count."""
    devices: Annotated[int, Field(ge=2)] | None = None
    """Devices in a comparison. Default: the cohort."""
    warm_test: Annotated[int, Field(ge=1)] = 5
    """Datacenter rounds before the warm model is compared with the initial one."""
    warm_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Part of the budget that a warm start and its test may take; 0 for none."""
    warm_length: Annotated[float, Field(ge=0)] = 0.3
    """Most rounds of a warm start, as part of the rounds with devices that the budget buys."""
    plateau: Annotated[int, Field(ge=1)] = 8
    """Datacenter rounds without a fall of the held-out loss by 1 % that end a warm start."""
    probation: Annotated[int, Field(ge=1)] = 5
    """Edge rounds after which the served model is compared with the warm one."""
    probation_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Part of what is left of the budget that this comparison may take; else it is left out."""
    transfer_share: Annotated[float, Field(gt=0)] = 0.1
    """What the datacenter's gradient may cost at most, as part of what the devices of a round do:
    with dearer steps it is the mean of fewer batches."""
    transfer_caution: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of the job's `transfer_weight` that is used at most. The gradient is that of the public
    data, and nobody can tell from here whether these are as the target is."""
    branches: bool = False
    """Whether the datacenter may train while the devices are away. Off: what such a branch wins at
    the start of the devices' hours, their rounds mostly win without it by the end of them."""


@dataclasses.dataclass(frozen=True)
class State:
    """What is remembered from round to round."""

    phase: str = "start"
    """start, warm, edge."""
    warm: int = 0
    """Warm rounds so far."""
    limit: int = 0
    """Most warm rounds."""
    least: int = 0
    """Fewest of them that a plateau can end."""
    dark: bool = False
    """The warm start began before the devices were there, and ends when they come."""
    proved: bool = False
    """The warm model beat the initial one."""
    barred: bool = False
    """The datacenter alone is of no use."""
    edge: int = 0
    """Rounds with devices since the phase began, or since going back."""
    tested: bool = False
    """Probation is over."""
    strikes: int = 0
    """Probations failed."""
    scale: float = 1.0
    """Of the devices' steps."""
    branch: int = 0
    """Datacenter rounds since the devices left."""
    losses: int = 0
    """Branches that were not merged."""
    asking: str = ""
    """What the comparison under way is about: warm, probation, branch."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> State:
        """As it was put into the last answer."""
        return cls(**state)

    def write(self) -> dict[str, Any]:
        """For the next answer."""
        return dataclasses.asdict(self)


class Adaptive:
    """The gated policy; read the module first."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, Settings)
        self.share = strategy.target_edge_share
        self.weight = min(
            transfer_weight(strategy), self.settings.transfer_caution * strategy.transfer_weight
        )

    def plan(self, observation: Observation) -> Answer:
        """One step of the machine above."""
        seen, state = observation, State.read(observation.state)
        if self.share == 0:
            return self._alone(state, "none of the target lives on the devices")
        if seen.epsilon_left is not None and seen.epsilon_left <= 0:
            return self._alone(state, "the privacy budget is spent, which ends edge work")
        if state.phase == "start":
            return self._begin(seen, state)
        if state.phase == "warm":
            return self._warm(seen, state)
        if not seen.open("federated"):
            return self._dark(seen, state)
        if state.branch:
            return self._end_of_branch(seen, state)
        if state.edge >= self.settings.probation and not state.tested:
            return self._probation(seen, state)
        return self._edge(seen, state)

    # -- the warm start ----------------------------------------------------------------------------

    def _begin(self, seen: Observation, state: State) -> Answer:
        """Whether there is room for a warm start: slack, or the hours before devices come."""
        edge = dataclasses.replace(state, phase="edge")
        open_ = seen.open("federated")
        if self.share < 1:
            return self._edge(seen, edge) if open_ else self._dark(seen, edge)
        capable, fillable = rounds_with_devices(seen)
        slack = (capable if open_ else seen.rounds - seen.round + 1) - fillable
        most = self.settings.warm_share * (seen.left or 0) - self._test_price(seen)
        most /= max(seen.price("datacenter"), 1e-9)
        limit = int(min(slack, most, self.settings.warm_length * fillable))
        helps = seen.datacenter_ready and seen.open("datacenter")
        if limit >= self.settings.warm_test and helps:
            least = int(slack / 2) if open_ else 0
            warm = dataclasses.replace(
                state, phase="warm", limit=limit, least=least, dark=not open_
            )
            return self._warm(seen, warm)
        if not open_:
            return self._dark(seen, edge)
        said = (
            f"the budget fills {fillable:.0f} of the {capable:.0f} rounds in which devices can "
            "work, which leaves no room for a warm start worth its test"
            if helps
            else "no datacenter is here for a warm start"
        )
        return self._edge(seen, edge, said)

    def _warm(self, seen: Observation, state: State) -> Answer:
        """Datacenter rounds, tested against the initial model early on."""
        settings = self.settings
        open_ = seen.open("federated")
        if not state.proved and open_ and (state.dark or state.warm >= settings.warm_test):
            answer = self._ask(seen, state, "warm", (INITIAL, CURRENT))
            if isinstance(answer, Compare):
                return answer
            if isinstance(answer, str) or not answer.beats(CURRENT, settings.z):
                said = answer if isinstance(answer, str) else _result(answer, CURRENT, INITIAL)
                cold = dataclasses.replace(state, phase="edge", barred=True, asking="")
                return self._edge(
                    seen,
                    cold,
                    f"after {state.warm} warm rounds {said}: it begins cold, and without the "
                    "datacenter",
                    start=INITIAL,
                )
            state = dataclasses.replace(state, proved=True, asking="")
        flat = flat_rounds(seen)
        over = flat >= settings.plateau and state.warm >= state.least
        if open_ and (state.dark or WARM in seen.models or not seen.datacenter_ready):
            said = f"the warm start ends after {state.warm} rounds"
            return self._edge(seen, dataclasses.replace(state, phase="edge"), said)
        last = state.proved and (over or state.warm + 1 >= state.limit)
        if not open_ and (state.warm >= state.limit or (state.dark and over)):
            return self._wait(seen, state)
        why = "while the devices are away" if state.dark else "which take nothing from the devices"
        return Plan(
            "datacenter",
            f"warm round {state.warm + 1} of at most {state.limit}, {why}"
            + (f"; the held-out loss has been flat for {flat} rounds" if over else ""),
            dataclasses.replace(state, warm=state.warm + 1).write(),
            keep={WARM: CURRENT} if last else {},
        )

    # -- with devices ------------------------------------------------------------------------------

    def _edge(self, seen: Observation, state: State, why: str = "", start: str = CURRENT) -> Plan:
        """A round with devices, by the declared target."""
        state = dataclasses.replace(state, edge=state.edge + 1, asking="")
        said = f"the devices hold {self.share:.0%} of the target"
        transfer = self.share < 1 and seen.datacenter_ready and seen.open("datacenter")
        if transfer:
            said += f", and take the datacenter's gradient for the rest ({self.weight:.3g} of it)"
        elif self.share < 1:
            said += ", and the datacenter, which holds the rest, is not here"
        return Plan(
            "hybrid" if transfer else "federated",
            f"{why}; {said}" if why else said,
            state.write(),
            merge="transfer" if transfer else None,
            transfer_weight=self.weight if transfer else None,
            datacenter_steps=self._batches(seen) if transfer else None,
            start=start,
            reset_optimizer=start in (WARM, INITIAL),
            step_scale=state.scale,
            keep={DAY: SERVED} if self.settings.branches and _has_hours(seen) else {},
        )

    def _probation(self, seen: Observation, state: State) -> Answer:
        """The served model must not have become worse than the warm one.

        Where devices have hours, those who are here are not those who trained: a model of others'
        classes would lose for nothing. And nothing ends work with devices, which hold the target.
        """
        done = dataclasses.replace(state, tested=True)
        dear = self._test_price(seen) > self.settings.probation_share * (seen.left or math.inf)
        if dear or WARM not in seen.models or _has_hours(seen):
            return self._edge(seen, done)
        answer = self._ask(seen, state, "probation", (WARM, SERVED))
        if isinstance(answer, Compare):
            return answer
        if isinstance(answer, str):
            return self._edge(seen, done, answer)
        said = _result(answer, SERVED, WARM)
        if not answer.loses(SERVED, self.settings.z):
            return self._edge(seen, done, f"probation is over: {said}")
        strikes, scale = state.strikes + 1, state.scale / 2
        struck = dataclasses.replace(
            state, edge=0, strikes=strikes, scale=scale, tested=strikes >= 2
        )
        said = f"probation is lost: {said}; back to it, with steps {scale:g} times as long"
        return self._edge(seen, struck, said, start=WARM)

    # -- while devices are away --------------------------------------------------------------------

    def _dark(self, seen: Observation, state: State) -> Answer:
        """A branch in the datacenter, with money that the devices cannot spend."""
        edge = seen.forecast.get("federated", Forecast())
        capable, _ = rounds_with_devices(seen)
        spare = math.inf if seen.left is None else seen.left - capable * seen.price("federated")
        useless = (
            not self.settings.branches
            or self.share < 1
            or state.barred
            or state.losses >= 2
            or not seen.datacenter_ready
            or not seen.open("datacenter")
            or seen.rounds - seen.round < capable
            or spare < seen.price("datacenter")
            or flat_rounds(seen) >= self.settings.plateau
        )
        ends = (
            seen.seconds_left is not None
            and edge.changes_in is not None
            and edge.changes_in >= seen.seconds_left
        )
        if useless or ends:
            return self._wait(seen, state)
        return Plan(
            "datacenter",
            f"the devices are away, and {spare:.4g} of the budget is more than they can spend: "
            f"round {state.branch + 1} of a branch",
            dataclasses.replace(state, branch=state.branch + 1).write(),
        )

    def _end_of_branch(self, seen: Observation, state: State) -> Answer:
        """The devices are back: merge the branch if it wins."""
        before = DAY if DAY in seen.models else INITIAL
        half = f"{before}+{CURRENT}"
        answer = self._ask(seen, state, "branch", (before, CURRENT, half))
        if isinstance(answer, Compare):
            return answer
        over = dataclasses.replace(state, branch=0, asking="")
        if isinstance(answer, str):
            return self._edge(seen, over, f"{answer}; the branch is dropped", start=before)
        best = min((CURRENT, half), key=lambda model: answer.difference[model])
        said = _result(answer, best, before)
        if answer.beats(best, self.settings.z):
            name = "whole" if best == CURRENT else "half"
            won = dataclasses.replace(over, losses=0)
            return self._edge(seen, won, f"the branch is merged {name}: {said}", start=best)
        lost = dataclasses.replace(over, losses=state.losses + 1)
        return self._edge(seen, lost, f"the branch is dropped: {said}", start=before)

    # -- small things ------------------------------------------------------------------------------

    def _alone(self, state: State, why: str) -> Plan:
        return Plan("datacenter", why, state.write())

    def _wait(self, seen: Observation, state: State) -> Plan:
        """A round with devices: it waits for their window by itself."""
        return self._edge(seen, state, "the devices are away, and the datacenter could not help")

    def _ask(
        self, seen: Observation, state: State, about: str, models: tuple[str, ...]
    ) -> Compare | Comparison | str:
        """The comparison, if it was made in this round; why there is none; or the wish for it."""
        if seen.refused:
            return f"no comparison could be made ({seen.refused[-1]})"
        if state.asking == about and seen.comparisons:
            return seen.comparisons[-1]
        reasons = {
            "warm": "whether the warm model is better for the devices than the initial one",
            "probation": "whether rounds with devices have made the served model worse",
            "branch": "whether what the datacenter trained meanwhile is better for the devices",
        }
        state = dataclasses.replace(state, asking=about)
        return Compare(models, self._devices(seen), reasons[about], state.write())

    def _devices(self, seen: Observation) -> int:
        return min(self.settings.devices or seen.cohort, max(seen.clients_ready, 2))

    def _test_price(self, seen: Observation) -> float:
        """Of a comparison of two models."""
        return 2 * self._devices(seen) * seen.visit_price

    def _batches(self, seen: Observation) -> int:
        """Batches of the gradient that devices take along."""
        step = (seen.price("datacenter") / seen.datacenter_steps) or 1e-9
        most = self.settings.transfer_share * seen.price("federated") / step
        return max(1, int(min(seen.datacenter_steps, most)))


def _has_hours(seen: Observation) -> bool:
    return seen.forecast.get("federated", Forecast()).changes_in is not None


def _result(found: Comparison, model: str, before: str) -> str:
    """One comparison in words."""
    names = {CURRENT: "the new model", INITIAL: "the initial model", SERVED: "the served model"}
    names |= {WARM: "the warm model", DAY: "the model from before"}
    difference, error = found.difference[model], found.standard_error[model]
    than = "better" if difference < 0 else "worse"
    return (
        f"{found.devices} devices found {names.get(model, 'half of each')} {abs(difference):.4f} "
        f"{than} than {names[before]} (standard error {error:.4f})"
    )
