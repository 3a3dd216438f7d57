"""A plan from the declared target and budget, with a test before each step that could do harm.

The share of the target that lives on the devices (`strategy.target_edge_share`, pi) chooses the
regime, and what devices and held-out public data say decides what a declaration cannot promise::

    pi = 0        datacenter rounds
    0 < pi < 1    hybrid rounds by one-way gradient transfer (Augenstein et al. 2022), with a
                  weight by pi, bounded by how long the devices' own first step is; once public
                  data are seen to lie apart every other round by parallel training, and every
                  round where devices also undo what others of them taught
    pi = 1        federated rounds, after a warm start in the datacenter if that displaces none:

    start --slack, dark-> warm --beats the initial model--> warm on --plateau or limit--> edge
      |                    +-----does not: back to the initial model, no more datacenter---^
      +--neither-------------------------------------------------------------------------> edge

    edge, probation   after some rounds the served model must not lose to the warm one; else back to
                      that, momentum zeroed, half steps; twice: quarter steps, and no more tests
    edge, of use      once what devices learn holds for public data too, or devices forget what
                      others of them taught, they take the datacenter's gradient along; those that
                      forget go on with half steps
    edge, dark        it waits
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
from isthmus.job.section import Section
from isthmus_server.strategy import evidence, outlook
from isthmus_server.strategy.policy import (
    CURRENT,
    INITIAL,
    SERVED,
    Answer,
    Compare,
    Comparison,
    Observation,
    Plan,
    settings_of,
)

WARM = "warm"
"""Kept: the model at the end of a warm start."""
SETTLES = 1.2
"""What `strategy.transfer_weight` times the devices' learning rate and steps is at most."""


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
    transfer_share: Annotated[float, Field(gt=0)] = 0.05
    """What the datacenter's gradient may cost at most, as part of what the devices of a round do:
    with dearer steps it is the mean of fewer batches."""
    transfer_part: Annotated[float, Field(gt=0, le=1)] = 0.33
    """The gradient's weight as part of (1 - pi)/pi: devices add it whole to each of their steps,
    over which their own gradients shrink."""
    transfer_pull: Annotated[float, Field(gt=0)] = 0.55
    """How long what devices add may be at most, as part of their own first step."""
    alike: Annotated[float, Field(ge=0, lt=1)] = 0.667
    """Public data are like the devices' if rounds with these bring the held-out loss below so much
    of what it was after the first round; 0: never."""
    alike_rounds: Annotated[int, Field(ge=1)] = 3
    """Rounds with devices before that is asked; after a warm start three times as many."""
    forgotten: Annotated[float, Field(gt=1)] = 2.5
    """Devices forget what others of them taught if their loss in a round is more than so many times
    that of the first. Then they rehearse public data, and the server takes shorter steps."""
    damped: Annotated[float, Field(gt=0, le=1)] = 0.5
    """How long these are, of those before."""
    apart: Annotated[float, Field(gt=0)] = 0.175
    """Public data that hold a part of the target alone lie apart from the devices' if by more than
    this (`evidence.apartness`); then the datacenter trains beside them in every other round."""
    undone: Annotated[float, Field(gt=1)] = 1.33
    """As `forgotten`, for it to do so in every round."""
    parallel_share: Annotated[float, Field(gt=0)] = 0.33
    """What the datacenter's training may cost at most in such a round, as part of what the devices
    do: with dearer steps it makes fewer."""


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
    """The datacenter is of no use."""
    edge: int = 0
    """Rounds with devices since the phase began, or since going back."""
    tested: bool = False
    """Probation is over."""
    strikes: int = 0
    """Probations failed."""
    scale: float = 1.0
    """Of the devices' steps."""
    lent: bool = False
    """Devices take the gradient along, though all of the target is theirs."""
    asking: str = ""
    """What the comparison under way is about: warm, probation."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> State:
        """As it was put into the last answer."""
        return cls(**state)

    def write(self) -> dict[str, Any]:
        """For the next answer."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Help:
    """What the datacenter does in a round with devices."""

    said: str
    weight: float = 0.0
    """Of its gradient, where devices take that along."""
    trains: bool = False
    """It trains beside them instead."""


class Adaptive:
    """The gated policy; read the module first."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, Settings)
        self.share = strategy.target_edge_share
        self.bound = strategy.transfer_weight

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
            return self._wait(seen, state)
        if state.edge >= self.settings.probation and not state.tested:
            return self._probation(seen, state)
        return self._edge(seen, state)

    # -- the warm start ----------------------------------------------------------------------------

    def _begin(self, seen: Observation, state: State) -> Answer:
        """Whether there is room for a warm start: slack, or the hours before devices come."""
        edge = dataclasses.replace(state, phase="edge")
        open_ = seen.open("federated")
        if self.share < 1:
            return self._edge(seen, edge) if open_ else self._wait(seen, edge)
        capable, fillable = outlook.rounds_with_devices(seen)
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
            return self._wait(seen, edge)
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
        flat = outlook.flat_rounds(seen)
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
        state = dataclasses.replace(state, asking="")
        if not (seen.datacenter_ready and seen.open("datacenter")):
            help_ = Help(", and the datacenter is not here")
        elif self.share < 1:
            help_ = self._help_by_share(seen, state)
        else:
            state, help_ = self._help_if_of_use(seen, state)
        said = f"the devices hold {self.share:.0%} of the target" + help_.said
        settings, transfer = self.settings, help_.weight > 0
        share = settings.transfer_share if transfer else settings.parallel_share
        scale, rose = state.scale, evidence.theirs_rose(seen)
        if rose > settings.forgotten:
            scale *= settings.damped
            said += f"; their loss rose to {rose:.2g} times the first: steps {scale:g} as long"
        both = transfer or help_.trains
        return Plan(
            "hybrid" if both else "federated",
            f"{why}; {said}" if why else said,
            dataclasses.replace(state, edge=state.edge + 1).write(),
            merge="transfer" if transfer else "weighted" if help_.trains else None,
            transfer_weight=help_.weight if transfer else None,
            datacenter_steps=outlook.steps_within(seen, share) if both else None,
            start=start,
            reset_optimizer=start in (WARM, INITIAL),
            step_scale=scale,
        )

    def _help_by_share(self, seen: Observation, state: State) -> Help:
        """Where the datacenter holds a part of the target alone.

        By the target, and by how long its gradient is beside the devices' own step: one task's
        gradient beside another's (Chen et al. 2018). Rows that lie apart are not taught by one
        gradient in a round. Whether more of them helps the target nobody can observe, so parallel
        training takes turns; but devices that undo each other's work need it in every round.
        """
        settings = self.settings
        weight = min(settings.transfer_part * (1 - self.share) / self.share, self.bound)
        first = min(weight, self.bound / 2)  # until both lengths are known
        gradient, step = evidence.first_lengths(seen, first)
        if not gradient or not step:
            return Help(f", and take {first:.3g} of the datacenter's gradient for the rest", first)
        apart = evidence.apartness(seen, gradient / step, 1 - self.share)
        undone = (rose := evidence.theirs_rose(seen)) > settings.undone
        if apart > settings.apart and (undone or state.edge % 2):
            said = f", and the datacenter trains beside them: public data lie apart ({apart:.2g})"
            also = (
                f", and devices undo what others of them taught ({rose:.2g} times the first loss)"
            )
            return Help(said + also if undone else said, trains=True)
        weight = min(weight, settings.transfer_pull * step / gradient * self.bound / SETTLES)
        said = (
            f", and take {weight:.3g} of the datacenter's gradient for the rest (at first that was "
            f"{gradient:.3g} long, and their own step {step:.3g})"
        )
        return Help(said, weight)

    def _help_if_of_use(self, seen: Observation, state: State) -> tuple[State, Help]:
        """Where all of the target is the devices': more data like theirs, or rehearsal."""
        said = "; it was found to be of use to them"
        if not state.lent and not state.barred:
            settings = self.settings
            wanted = settings.alike_rounds * (3 if state.warm else 1)
            fell = evidence.public_loss_fell(seen) if state.edge >= wanted else math.inf
            rose, enough, much = evidence.theirs_rose(seen), settings.alike, settings.forgotten
            if fell < enough:
                said = (
                    f"; public data are like theirs (the held-out loss fell to {fell:.2g} of the "
                    f"first, {enough:g} is enough)"
                )
            elif rose > much:
                said = (
                    f"; they forget what others of them taught (their loss rose to {rose:.2g} "
                    f"times the first, {much:g} is too much)"
                )
            state = dataclasses.replace(state, lent=fell < enough or rose > much)
        if not state.lent:
            return state, Help("")
        said = f"{said}, so they take {self.bound:.3g} of the public gradient"
        return state, Help(said, self.bound)

    def _probation(self, seen: Observation, state: State) -> Answer:
        """The served model must not have become worse than the warm one.

        Where devices have hours, those who are here are not those who trained: a model of others'
        classes would lose for nothing. And nothing ends work with devices, which hold the target.
        """
        done = dataclasses.replace(state, tested=True)
        dear = self._test_price(seen) > self.settings.probation_share * (seen.left or math.inf)
        if dear or WARM not in seen.models or outlook.has_hours(seen):
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

    # -- small things ------------------------------------------------------------------------------

    def _alone(self, state: State, why: str) -> Plan:
        return Plan("datacenter", why, state.write())

    def _wait(self, seen: Observation, state: State) -> Plan:
        """A round with devices: it waits for their window by itself."""
        return self._edge(seen, state, "the devices are away")

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
        }
        state = dataclasses.replace(state, asking=about)
        return Compare(models, self._devices(seen), reasons[about], state.write())

    def _devices(self, seen: Observation) -> int:
        return min(self.settings.devices or seen.cohort, max(seen.clients_ready, 2))

    def _test_price(self, seen: Observation) -> float:
        """Of a comparison of two models."""
        return 2 * self._devices(seen) * seen.visit_price


def _result(found: Comparison, model: str, before: str) -> str:
    """One comparison in words."""
    names = {CURRENT: "the new model", INITIAL: "the initial model", SERVED: "the served model"}
    names[WARM] = "the warm model"
    difference, error = found.difference[model], found.standard_error[model]
    than = "better" if difference < 0 else "worse"
    return (
        f"{found.devices} devices found {names[model]} {abs(difference):.4f} "
        f"{than} than {names[before]} (standard error {error:.4f})"
    )
