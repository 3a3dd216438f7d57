"""How one round is decided: observe, ask the policy, make its visits, hold it to the limits.

::

    look -> policy -> constraints --Plan, Stop--> Decision
      ^                    |
      |                    +--Compare--> visit devices --+
      |                    +--Wait-----> sleep ----------+
      +--------------------------------------------------+
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from isthmus.errors import JobError, RoundFailed
from isthmus_server.rounds.clock import Clock
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.limits import LimitRefusal, hold
from isthmus_server.strategy.policy import (
    Compare,
    Observation,
    Plan,
    Policy,
    Stop,
    Wait,
)

MAX_VISITS = 3
"""Comparisons that a policy may ask for in one round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done next, and everything that led to it."""

    answer: Plan | Stop
    seen: Mapping[str, Any]
    """The observation it was decided on, as JSON data, without the history, which is in the log;
    with what the policy `asked` of devices, how long it `waited`, and the limits' `adjustments`.
    """

    @classmethod
    def from_log(cls, plan: Mapping[str, Any], seen: Mapping[str, Any]) -> Decision:
        """One that was written down before a crash: it stands, within the limits of now."""
        names = {field.name for field in dataclasses.fields(Plan) if field.init}
        return cls(
            answer=Plan(**{name: value for name, value in plan.items() if name in names}),
            seen=seen,
        )


Look = Callable[[], Observation]
"""What is so now, with the comparisons made for this round, their price and the policy's state."""
Visit = Callable[[Compare], Awaitable[None]]
"""Has devices score models, and sees to it that the next look has the result and `Compare.state`.
Raises `RoundFailed` where too few answer."""
Note = Callable[[str, Mapping[str, Any]], None]


async def decide(
    policy: Policy, name: str, look: Look, visit: Visit, clock: Clock, note: Note
) -> Decision:
    """Decide on the next round.

    Args:
        policy: the job's.
        name: how the job calls it.
        look: see `Look`.
        visit: see `Visit`.
        clock: what waiting goes by.
        note: told of waits.

    Raises:
        JobError: the policy broke its contract.
    """
    refused: list[str] = []
    asked: list[dict[str, Any]] = []
    waited: list[dict[str, Any]] = []
    while True:
        seen = dataclasses.replace(look(), refused=tuple(refused))
        wanted = checked_answer(policy, name, seen)
        held = hold(wanted, seen)
        answer = held.answer
        if isinstance(wanted, Compare):
            if len(asked) == MAX_VISITS:
                raise JobError(
                    f"the policy {name!r} asked for more than {MAX_VISITS} comparisons in round "
                    f"{seen.round}"
                )
            asked.append({**dataclasses.asdict(wanted), "refused": None})
        if isinstance(answer, Compare):
            try:
                await visit(answer)
                continue
            except RoundFailed as error:
                answer = LimitRefusal(str(error))
        if isinstance(wanted, Compare):
            asked[-1]["refused"] = answer.reason  # of a Stop as well
        if isinstance(answer, LimitRefusal):
            refused.append(answer.reason)
        elif isinstance(answer, Wait):
            wait = {"seconds": answer.seconds, "reason": answer.reason}
            waited.append({**wait, "by_limit": not isinstance(wanted, Wait)})
            note("paused", {"round": seen.round, **wait})
            await clock.sleep(answer.seconds)
            refused.clear()
        else:
            log = {
                **dataclasses.asdict(dataclasses.replace(seen, history=())),
                "history": None,
                "asked": asked,
                "waited": waited,
                "adjustments": list(held.adjustments),
            }
            return Decision(answer=answer, seen=log)
