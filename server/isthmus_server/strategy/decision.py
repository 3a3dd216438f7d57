"""Decide one round: observe, call the policy, run its comparisons, enforce the limits.

::

    observe -> policy -> limits.enforce --Plan, Stop--> Decision
      ^                        |
      |                        +--Compare--> devices score models --+
      |                        +--Wait-----> sleep -----------------+
      +-------------------------------------------------------------+
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from isthmus.errors import JobError, RoundFailed
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.forecast import RoundForecast, forecast_round
from isthmus_server.strategy.limits import LimitRefusal, RunLimits
from isthmus_server.strategy.policy import (
    Compare,
    Observation,
    Plan,
    Policy,
    Stop,
    Wait,
)

MAX_COMPARISONS = 3
"""Comparisons that a policy may request in one round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestedComparison:
    """A comparison that the policy requested, made or not."""

    models: tuple[str, ...]
    devices: int
    reason: str
    refused: str | None = None
    """Why it was not made; None if it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidedWait:
    """A wait before the round."""

    seconds: float
    reason: str
    by_limit: bool
    """A limit of the job required it, not the policy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The next action of a run, and the data on which it was decided."""

    answer: Plan | Stop
    observation: Observation
    """The last one, without the history, which is in the log anyway."""
    forecast: RoundForecast | None = None
    """What the planned round will take and achieve; None for a stop."""
    requested: Sequence[RequestedComparison] = ()
    """Comparisons that the policy requested, in order."""
    waits: Sequence[DecidedWait] = ()
    adjustments: Sequence[str] = ()
    """What the job's limits changed in the answer, one sentence each."""


CompareModels = Callable[[Compare], Awaitable[None]]
"""Has devices score models. The next observation has the result and `Compare.state`. Raises
`RoundFailed` if too few devices answer."""


async def decide(
    policy: Policy,
    name: str,
    limits: RunLimits,
    compare_models: CompareModels,
) -> Decision:
    """Decide the next round.

    Args:
        policy: the job's policy.
        name: the policy's name in the job, for error messages.
        limits: of the run, which also observes and pauses it.
        compare_models: see `CompareModels`.

    Raises:
        JobError: the policy raised, or gave an invalid answer.
    """
    refused: list[str] = []
    requested: list[RequestedComparison] = []
    waits: list[DecidedWait] = []
    while True:
        # Anew in each turn: a comparison costs something, and time passes while it is made.
        observation = dataclasses.replace(limits.observe(), refused=tuple(refused))
        proposed = checked_answer(policy, name, observation)
        constrained = limits.enforce(proposed, observation)
        answer = constrained.answer
        if isinstance(proposed, Compare):
            # Whatever the limits say: a policy that never stops asking is wrong.
            if len(requested) == MAX_COMPARISONS:
                raise JobError(
                    f"the policy {name!r} asked for more than {MAX_COMPARISONS} comparisons in "
                    f"round {observation.round}"
                )
            requested.append(
                RequestedComparison(
                    models=proposed.models, devices=proposed.devices, reason=proposed.reason
                )
            )
        if isinstance(answer, Compare):
            try:
                await compare_models(answer)
                continue
            except RoundFailed as error:
                # Devices that did not answer are to the policy like a limit: it decides without the
                # comparison.
                answer = LimitRefusal(str(error))
        if isinstance(proposed, Compare):
            # Also if a limit ends the run.
            requested[-1] = dataclasses.replace(requested[-1], refused=answer.reason)
        if isinstance(answer, LimitRefusal):
            refused.append(answer.reason)
        elif isinstance(answer, Wait):
            waits.append(
                DecidedWait(
                    seconds=answer.seconds,
                    reason=answer.reason,
                    by_limit=not isinstance(proposed, Wait),
                )
            )
            await limits.pause(answer)
            # After a wait other devices may be there, so that it may ask again.
            refused.clear()
        else:
            return Decision(
                answer=answer,
                # The log has the history already, and one in each plan would make it grow with the
                # square of the rounds.
                observation=dataclasses.replace(observation, history=()),
                forecast=forecast_round(answer, observation) if isinstance(answer, Plan) else None,
                requested=requested,
                waits=waits,
                adjustments=constrained.adjustments,
            )
