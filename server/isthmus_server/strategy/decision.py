"""Decide one round: observe, call the policy, run its comparisons, enforce the limits.

::

    observe -> policy -> enforce_limits --Plan, Stop--> Decision
      ^                        |
      |                        +--Compare--> devices score models --+
      |                        +--Wait-----> sleep -----------------+
      +-------------------------------------------------------------+
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from isthmus.errors import JobError, RoundFailed
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.limits import LimitRefusal, enforce_limits
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
class Decision:
    """What is done next, and the data it was decided on."""

    answer: Plan | Stop
    observation: Mapping[str, Any]
    """The last observation as JSON data, without the history, which is in the log anyway. Three
    keys are added: the comparisons that the policy `asked` for, how it `waited`, and the limits'
    `adjustments`."""

    @classmethod
    def from_log(cls, plan: Mapping[str, Any], observation: Mapping[str, Any]) -> Decision:
        """Restore a decision that was logged before a crash; limits are enforced again later."""
        names = {field.name for field in dataclasses.fields(Plan) if field.init}
        return cls(
            answer=Plan(**{name: value for name, value in plan.items() if name in names}),
            observation=observation,
        )


Observe = Callable[[], Observation]
"""Takes a new observation, with the comparisons made for this round and their price, and the
policy's state."""
CompareModels = Callable[[Compare], Awaitable[None]]
"""Has devices score models. The next observation has the result and `Compare.state`. Raises
`RoundFailed` if too few devices answer."""
Pause = Callable[[Wait], Awaitable[None]]
"""Publishes that the run waits, and waits."""


async def decide(
    policy: Policy,
    name: str,
    observe: Observe,
    compare_models: CompareModels,
    pause: Pause,
) -> Decision:
    """Decide the next round.

    Args:
        policy: the job's policy.
        name: the policy's name in the job, for error messages.
        observe: see `Observe`.
        compare_models: see `CompareModels`.
        pause: see `Pause`.

    Raises:
        JobError: the policy raised, or gave an invalid answer.
    """
    refused: list[str] = []
    requests: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    while True:
        observation = dataclasses.replace(observe(), refused=tuple(refused))
        proposed = checked_answer(policy, name, observation)
        constrained = enforce_limits(proposed, observation)
        answer = constrained.answer
        if isinstance(proposed, Compare):
            if len(requests) == MAX_COMPARISONS:
                raise JobError(
                    f"the policy {name!r} asked for more than {MAX_COMPARISONS} comparisons in "
                    f"round {observation.round}"
                )
            requests.append({**dataclasses.asdict(proposed), "refused": None})
        if isinstance(answer, Compare):
            try:
                await compare_models(answer)
                continue
            except RoundFailed as error:
                answer = LimitRefusal(str(error))
        if isinstance(proposed, Compare):
            requests[-1]["refused"] = answer.reason  # also if a limit ends the run
        if isinstance(answer, LimitRefusal):
            refused.append(answer.reason)
        elif isinstance(answer, Wait):
            wait = {"seconds": answer.seconds, "reason": answer.reason}
            waits.append({**wait, "by_limit": not isinstance(proposed, Wait)})
            await pause(answer)
            refused.clear()
        else:
            logged = {
                **dataclasses.asdict(dataclasses.replace(observation, history=())),
                "history": None,
                "asked": requests,
                "waited": waits,
                "adjustments": list(constrained.adjustments),
            }
            return Decision(answer=answer, observation=logged)
