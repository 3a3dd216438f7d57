"""Settings and state of the adaptive policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from isthmus.job.section import Section
from isthmus_server.strategy.policy import INITIAL

WARM = "warm"
"""Name under which the model at the end of a warm start is kept."""
COLD = "cold"
"""Name of the last model without a datacenter, from which a late warm start goes on."""
FORK = "fork"
"""Name of the model from which both branches of a race begin."""
WITH_GRADIENT = "with-gradient"
"""Name of the model at the end of the branch that takes the gradient."""


class AdaptiveSettings(Section):
    """`[strategy.settings]` of the adaptive policy."""

    error: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Probability that a comparison decides wrongly: that a model which is not better is taken for
    better, or a harmful gradient for harmless."""
    margin: Annotated[float, Field(gt=0)] = 0.1
    """The gradient does no harm if the score of the branch with it is at most this much worse."""
    devices: Annotated[int, Field(ge=2)] | None = None
    """Devices in a comparison. Default: the cohort."""
    warm_test: Annotated[int, Field(ge=1)] = 5
    """Datacenter rounds before the warm model is compared with the initial one."""
    warm_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Part of the budget that a warm start and its test may take; 0 for no warm start."""
    warm_length: Annotated[float, Field(ge=0)] = 0.3
    """Maximum length of a warm start, as a part of the rounds with devices that the budget buys."""
    plateau: Annotated[int, Field(ge=1)] = 8
    """Datacenter rounds in which the held-out loss does not fall by 1 % that end a warm start."""
    probation: Annotated[int, Field(ge=1)] = 5
    """Edge rounds after which the served model is compared with the warm one."""
    probation_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Part of the remaining budget that this comparison may take; otherwise it is left out."""
    transfer_share: Annotated[float, Field(gt=0)] = 0.05
    """Maximum price of the datacenter's gradient, as a part of what the devices of a round cost;
    with expensive steps the gradient is the mean of fewer batches."""
    transfer_part: Annotated[float, Field(gt=0, le=1)] = 0.33
    """The gradient's weight as a part of (1 - pi)/pi: devices add the whole gradient to each of
    their steps, during which their own gradients shrink."""
    gradient_pull: Annotated[float, Field(gt=0)] = 0.5
    """Maximum norm of what devices add to their gradient, as a part of its own norm, where part of
    the target is only in the public data."""
    overshoot: Annotated[float, Field(gt=0)] = 1.5
    """The weight of the gradient is halved after each round in which the devices' update along it
    was longer than this multiple of their first update, which had no gradient in it."""
    rehearsal_pull: Annotated[float, Field(gt=0)] = 0.25
    """Maximum norm, as of `gradient_pull`, where the whole target is the devices'."""
    alike: Annotated[float, Field(ge=0, lt=1)] = 0.667
    """Public data resemble the devices' if rounds with devices lower the held-out loss below this
    part of its value after the first round; 0: never."""
    alike_rounds: Annotated[int, Field(ge=1)] = 3
    """Rounds with devices before that is checked; three times as many after a warm start."""
    forgotten: Annotated[float, Field(gt=1)] = 2.0
    """Devices forget what others taught if their loss in a round exceeds this multiple of the
    first. They then rehearse public data, and the server takes shorter steps."""
    damped: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the length of these shorter steps. Devices with several windows a day have them
    until it is seen that those of another window forgot little (`undone`)."""
    apart: Annotated[float, Field(gt=0)] = 1.7
    """Public data differ from the devices' if `evidence.gradient_divergence` exceeds this; the
    datacenter then trains in parallel in every other round."""
    undone: Annotated[float, Field(gt=1)] = 1.33
    """Like `forgotten`, for parallel training in every round where public data differ, and for
    short steps of devices with several windows a day."""
    race_rounds: Annotated[int, Field(ge=0)] = 3
    """Rounds of each branch of a race; 0: the gradient is used without one."""
    race_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the rounds with devices that are left that both branches may take."""
    trial_rounds: Annotated[int, Field(ge=1)] = 2
    """Evaluated rounds of a trial, with `objective = "time"` or `"cost"`."""
    trial_share: Annotated[float, Field(gt=0)] = 0.2
    """Maximum time or price of a trial, as a part of what the side on which training goes on took
    since it began."""
    sure: Annotated[float, Field(gt=0.5, le=1)] = 0.8
    """With `objective = "time"` or `"cost"`, the part of the forecasts in which a plan for the rest
    of the run has to be the better one before it is preferred to trials; 1: never."""
    parallel_share: Annotated[float, Field(gt=0)] = 0.33
    """Maximum price of the datacenter's training in such a round, as a part of what the devices
    cost; with expensive steps it makes fewer."""


TrainingSide = Literal["datacenter", "devices"]


@dataclasses.dataclass(frozen=True)
class TargetState:
    """Progress towards a target metric, with `objective = "time"` or `"cost"`."""

    side: TrainingSide
    """The side that trains now."""
    since: int
    """The last round before it began to."""
    trial: bool = False
    """Whether it is on trial."""
    trials: int = 0
    """Trials so far, this one included."""
    progress: float = 0.0
    """Part of what was missing that a round of the other side closed just before the trial."""
    instead: bool = False
    """Whether the datacenter trains only until the devices, which proved faster, are back."""
    untried: bool = False
    """Whether the devices train because no datacenter was there, so that they proved nothing."""
    planned: str = ""
    """The plan for the rest of the run that is followed, and its forecast; empty if none is."""
    until: int = 0
    """The last round before that plan is made again; 0 without one."""
    checked: int = 0
    """The last round for which the rest of the run was planned; 0 before any."""
    seen: int = 0
    """The last round that the planner planned."""
    before_others: int = 0
    """The last round before others that began with earlier models: those of a race. 0: none."""
    last_other: int = 0
    """The last of these."""

    def in_words(self) -> str:
        """Which side trains, and why."""
        if self.planned:
            return f"{self._side_in_words()}; the plan for the rest of the run: {self.planned}"
        return self._side_in_words()

    def _side_in_words(self) -> str:
        since = f"the {self.side} train" + ("s" if self.side == "datacenter" else "")
        since += f" since round {self.since + 1}"
        if self.trial:
            return f"{since}, on trial"
        if self.untried:
            return f"{since}, because no datacenter was there"
        if self.instead:
            return f"{since}, until the devices are back"
        return f"{since}; {self.trials} trials so far"


@dataclasses.dataclass(frozen=True)
class RaceState:
    """Progress of the races of a run."""

    branch: Literal["", "fork", "with", "without"] = ""
    """The branch that trains now; fork: the next round is the first of a race."""
    rounds: int = 0
    """Rounds of that branch so far."""
    not_before: int = 0
    """The round with devices before which no race begins: after one without an answer."""
    vetoed: bool = False
    """Whether a race has shown that the gradient does harm."""


@dataclasses.dataclass(frozen=True)
class AdaptiveState:
    """State of the policy between rounds."""

    phase: str = "start"
    """start, warm or edge."""
    warm_rounds: int = 0
    """Warm rounds so far."""
    max_warm_rounds: int = 0
    """Limit on warm rounds; after an interruption those that were left, and 0 before any."""
    min_warm_rounds: int = 0
    """Warm rounds before a plateau can end the warm start."""
    before_devices: bool = False
    """Whether the warm start began before the devices' window; it ends when that opens."""
    missed_warm_start: bool = False
    """Whether no datacenter is there for a warm start, or its rest; it goes on once one is."""
    warm_reference: str = INITIAL
    """The model that the warm one has to beat: the initial one, or `COLD`."""
    warm_accepted: bool = False
    """Whether the warm model beat that one."""
    edge_rounds: int = 0
    """Rounds with devices since the phase began, or since training returned to the warm model."""
    probation_over: bool = False
    failed_probations: int = 0
    step_scale: float = 1.0
    """Factor on the devices' steps."""
    windows: tuple[str, ...] = ()
    """Windows in which devices trained while no other one was open, if they have several a day."""
    excluded: tuple[str, ...] = ()
    """Datacenters whose gradient a race has shown to do harm, while others are still used."""
    uses_gradient: bool = False
    """Whether devices apply the datacenter's gradient although the whole target is theirs."""
    gradient_since: int = 0
    """The round since which they do; 0 if not, or if it is not known."""
    race: RaceState = dataclasses.field(default_factory=RaceState)
    target: TargetState | None = None
    """None before the first round, and without a target metric."""
    pending_comparison: str = ""
    """The purpose of the requested comparison: warm, probation or race."""

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> AdaptiveState:
        """Restore the state from the last answer."""
        target = state.get("target")
        return cls(
            **{
                **state,
                "race": RaceState(**state.get("race", {})),
                "excluded": tuple(state.get("excluded", ())),
                "windows": tuple(state.get("windows", ())),
                "target": None if target is None else TargetState(**target),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state for the next answer."""
        return dataclasses.asdict(self)

    def in_words(self) -> list[str]:
        """What the policy keeps in mind, in sentences, for `isthmus why`."""
        sentences = [self._phase()]
        if self.missed_warm_start:
            sentences.append("no datacenter was there for a warm start; it begins once one is")
        if self.warm_accepted:
            sentences.append("devices found the model of the warm start better")
        if self.failed_probations:
            sentences.append(
                f"rounds with devices made the warm model worse {self.failed_probations} times, so "
                f"steps are {self.step_scale:g} times as long"
            )
        if self.windows:
            sentences.append(f"devices have trained in the windows {', '.join(self.windows)}")
        if self.uses_gradient:
            since = f" since round {self.gradient_since}" if self.gradient_since else ""
            sentences.append(f"devices apply the datacenter's gradient{since}")
        if self.excluded:
            names = ", ".join(self.excluded)
            sentences.append(f"a test showed that the gradient of {names} does harm")
        if self.race.vetoed:
            sentences.append("a test showed that the datacenter's gradient does harm")
        if self.race.branch:
            branches = {
                "fork": "begins with the next round",
                "with": f"has made {self.race.rounds} rounds with it",
                "without": f"has made {self.race.rounds} rounds without it",
            }
            sentences.append(f"a test of the datacenter's gradient {branches[self.race.branch]}")
        if self.target is not None:
            sentences.append(self.target.in_words())
        return sentences

    def _phase(self) -> str:
        if self.phase == "start":
            return "no round was planned yet"
        if self.phase == "warm":
            before = " before the devices' hours" if self.before_devices else ""
            return (
                f"a warm start{before} has made {self.warm_rounds} of at most "
                f"{self.max_warm_rounds} rounds"
            )
        if self.target is not None:
            return "the side that comes closer to the target trains"
        return f"rounds with devices so far: {self.edge_rounds}"
