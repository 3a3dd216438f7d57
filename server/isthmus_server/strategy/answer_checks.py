"""The contract between a run and its policy: what of its answers can be done, and what cannot.

What a policy sees and may answer is in `policy`; whether the job's limits allow what it wants is
for `constraints`.
"""

from __future__ import annotations

import dataclasses
import json
import math

from isthmus.errors import JobError
from isthmus_server.strategy.policy import (
    CURRENT,
    INITIAL,
    KINDS,
    MAX_KEPT,
    SERVED,
    Answer,
    Compare,
    Observation,
    Plan,
    Policy,
    Stop,
    Wait,
)


def checked_answer(policy: Policy, name: str, observation: Observation) -> Answer:
    """Ask a policy, and hold it to its contract.

    Its state comes back as it will be read after a crash, so that a resumed run sees no other.

    Raises:
        JobError: it raised, or answered something that cannot be done; says which policy.
    """
    where = f"the policy {name!r}"
    try:
        answer = policy.plan(observation)
    except Exception as error:  # it may be anybody's code
        raise JobError(
            f"{where} failed in round {observation.round}: {type(error).__name__}: {error}"
        ) from error
    wrong = _what_is_wrong(answer, observation)
    if wrong:
        raise JobError(f"{where} answered {answer!r} in round {observation.round}, {wrong}")
    if isinstance(answer, Stop | Wait):
        return answer
    try:
        return dataclasses.replace(answer, state=json.loads(json.dumps(dict(answer.state))))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"{where} answered with the state {answer.state!r} in round "
            f"{observation.round}, which is not a JSON object: {error}"
        ) from error


def _what_is_wrong(answer: object, observation: Observation) -> str:
    """Why an answer cannot be used, completing a sentence; empty if it can."""
    if not isinstance(answer, Plan | Compare | Wait | Stop):
        return "which is not a Plan, a Compare, a Wait or a Stop"
    if not isinstance(answer.reason, str) or not answer.reason:
        return "which has no reason in words"
    if isinstance(answer, Plan):
        return _wrong_plan(answer, observation)
    if isinstance(answer, Compare):
        asked = {part for name in answer.models for part in name.split("+")}
        if not 2 <= len(answer.models) <= 4 or not asked <= set(observation.models):
            return f"which must name two to four models of {', '.join(observation.models)}"
        if not _whole(answer.devices, least=1):
            return "which must ask at least one device"
        if observation.refused:
            return f"though it was refused in this round already: {observation.refused[-1]}"
    if isinstance(answer, Wait) and not _number(answer.seconds, above=0.0):
        return "which must wait for a number of seconds above 0"
    return ""


def _wrong_plan(plan: Plan, observation: Observation) -> str:
    if plan.regime not in KINDS:
        return f"whose regime is none of {', '.join(KINDS)}"
    if not set(plan.start.split("+")) <= set(observation.models):
        return f"which starts from a model that is none of {', '.join(observation.models)}"
    if plan.merge not in (None, "weighted", "projected", "transfer"):
        return "whose merge is none of weighted, projected, transfer"
    for name, least in (("datacenter_steps", 1), ("cohort", 1)):
        value = getattr(plan, name)
        if value is not None and not _whole(value, least):
            return f"whose {name} is not a whole number above 0"
    if plan.transfer_weight is not None and not _number(plan.transfer_weight, least=0.0):
        return "whose transfer_weight is not a number from 0"
    if not _number(plan.step_scale, above=0.0):
        return "whose step_scale is not a number above 0"
    return _wrong_kept(plan, observation)


def _wrong_kept(plan: Plan, observation: Observation) -> str:
    fixed = {CURRENT, SERVED, INITIAL}
    for name, model in plan.keep.items():
        if not isinstance(name, str) or name in fixed or not name or "+" in name:
            return f"which keeps a model as {name!r}; a name of its own is wanted, without +"
        if model not in (CURRENT, SERVED, ""):
            return f"which keeps {model!r} as {name!r}, where only current or served can be kept"
    dropped = {name for name, model in plan.keep.items() if not model}
    kept = (set(observation.models) | set(plan.keep)) - fixed - dropped
    if len(kept) > MAX_KEPT:
        return f"which makes {len(kept)} kept models, and at most {MAX_KEPT} are kept"
    return ""


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object, *, least: float = -math.inf, above: float = -math.inf) -> bool:
    return (
        isinstance(value, int | float) and math.isfinite(value) and value >= least and value > above
    )
