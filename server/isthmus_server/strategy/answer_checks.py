"""Call a policy and validate its answer.

`policy` defines what a policy observes and may answer. Whether a valid answer fits the job's limits
is checked afterwards, in `limits`.
"""

from __future__ import annotations

import dataclasses
import json
import math

from isthmus.errors import JobError, UserError
from isthmus_server.strategy.gradients import REST
from isthmus_server.strategy.policy import (
    BEST,
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
    """Call a policy and validate its answer.

    The answer's state is returned as it would be read from the log after a crash, so a resumed run
    sees the same state.

    Raises:
        JobError: the policy raised, or its answer is invalid; the message names the policy.
    """
    where = f"the policy {name!r}"
    try:
        answer = policy.plan(observation)
    except UserError as error:  # a sentence for users
        raise JobError(f"{where} failed in round {observation.round}: {error}") from error
    except Exception as error:  # third-party code may raise anything
        raise JobError(
            f"{where} failed in round {observation.round}: {type(error).__name__}: {error}"
        ) from error
    problem = _problem_with(answer, observation)
    if problem:
        raise JobError(f"{where} answered {answer!r} in round {observation.round}, {problem}")
    if isinstance(answer, Stop | Wait):
        return answer
    try:
        return dataclasses.replace(answer, state=json.loads(json.dumps(dict(answer.state))))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"{where} answered with the state {answer.state!r} in round "
            f"{observation.round}, which is not a JSON object: {error}"
        ) from error


def _problem_with(answer: object, observation: Observation) -> str:
    """Return why an answer is invalid, as a clause that completes a sentence; empty if valid."""
    if not isinstance(answer, Plan | Compare | Wait | Stop):
        return "which is not a Plan, a Compare, a Wait or a Stop"
    if not isinstance(answer.reason, str) or not answer.reason:
        return "which has no reason in words"
    if isinstance(answer, Plan):
        return _problem_with_plan(answer, observation)
    if isinstance(answer, Compare):
        models = {part for name in answer.models for part in name.split("+")}
        if not 2 <= len(answer.models) <= 4 or not models <= set(observation.models):
            return f"which must name two to four models of {', '.join(observation.models)}"
        if not _is_integer(answer.devices, minimum=1):
            return "which must ask at least one device"
        # A policy that repeats a refused question would go on for ever.
        if observation.refused:
            return f"though it was refused in this round already: {observation.refused[-1]}"
    if isinstance(answer, Wait) and not _is_number(answer.seconds, above=0.0):
        return "which must wait for a number of seconds above 0"
    return ""


def _problem_with_plan(plan: Plan, observation: Observation) -> str:
    if plan.regime not in KINDS:
        return f"whose regime is none of {', '.join(KINDS)}"
    if not set(plan.start.split("+")) <= set(observation.models):
        return f"which starts from a model that is none of {', '.join(observation.models)}"
    if plan.merge not in (None, "weighted", "projected", "transfer"):
        return "whose merge is none of weighted, projected, transfer"
    for name, minimum in (("datacenter_steps", 1), ("cohort", 1)):
        value = getattr(plan, name)
        if value is not None and not _is_integer(value, minimum):
            return f"whose {name} is not a whole number above 0"
    if plan.transfer_weight is not None and not _is_number(plan.transfer_weight, minimum=0.0):
        return "whose transfer_weight is not a number from 0"
    # What depends on other fields of the plan comes after these were found valid.
    problem = _problem_with_datacenter_weights(plan, observation)
    if problem:
        return problem
    if not _is_number(plan.step_scale, above=0.0):
        return "whose step_scale is not a number above 0"
    if not isinstance(plan.measure_gradients, bool):
        return "whose measure_gradients is neither True nor False"
    if plan.measure_gradients and plan.regime == "datacenter":
        return "which measures gradients of devices in a round without devices"
    if plan.measure_gradients and not observation.can_measure_gradients:
        return (
            'which measures gradients, and with federated.mode="buffered" or federated.flower '
            "devices cannot do that (Observation.can_measure_gradients)"
        )
    return _problem_with_groups(plan, observation) or _problem_with_kept_models(plan, observation)


def _problem_with_groups(plan: Plan, observation: Observation) -> str:
    if not isinstance(plan.by_group, bool):
        return "whose by_group is neither True nor False"
    if plan.by_group and plan.regime == "datacenter":
        return "which sums devices by group in a round without devices"
    if plan.by_group and not observation.can_sum_by_group:
        return "which sums devices by group, and the job has no [federated.groups]"
    weights = plan.group_weights
    if weights and not plan.by_group:
        return "which weighs groups in a round that is not summed by group"
    unknown = sorted(set(weights) - set(observation.groups) - {REST})
    if unknown:
        known = ", ".join(observation.groups) or "none"
        return f"which weighs the group {unknown[0]!r}, where devices have declared: {known}"
    for name, weight in weights.items():
        if not _is_number(weight, minimum=0.0):
            return f"whose weight of the group {name!r} is not a number from 0"
    if weights and not any(weights.get(name, 1.0) > 0 for name in (*observation.groups, REST)):
        return "which gives the weight 0 to each group"
    return ""


def _problem_with_datacenter_weights(plan: Plan, observation: Observation) -> str:
    names = observation.datacenter_names
    weights = plan.datacenter_weights
    if not weights:
        return ""
    if plan.regime == "federated":
        return "which weighs datacenters in a round without one"
    unknown = sorted(set(weights) - set(names))
    if unknown:
        ready = ", ".join(names) or "none"
        return f"which weighs {unknown[0]!r}, where the connected datacenters are: {ready}"
    transfers = plan.regime == "hybrid" and (plan.merge or observation.merge) == "transfer"
    # As a factor of a gradient a weight may be any; as a part of a mean it is at most 1.
    largest = math.inf if transfers else 1.0
    for name, weight in weights.items():
        if not _is_number(weight, minimum=0.0) or weight > largest:
            allowed = "from 0" if transfers else "from 0 to 1"
            return f"whose weight of the datacenter {name!r} is not a number {allowed}"
    if not any(weights.get(name, 1.0) > 0 for name in names):
        return "which gives the weight 0 to each connected datacenter"
    return ""


def _problem_with_kept_models(plan: Plan, observation: Observation) -> str:
    reserved = {BEST, CURRENT, SERVED, INITIAL}
    for name, model in plan.keep.items():
        if not isinstance(name, str) or name in reserved or not name or "+" in name:
            return (
                f"which keeps a model as {name!r}; choose another name, without + and none of "
                f"{', '.join(sorted(reserved))}"
            )
        if model not in (CURRENT, SERVED, ""):
            return f"which keeps {model!r} as {name!r}, where only current or served can be kept"
    dropped = {name for name, model in plan.keep.items() if not model}
    kept = (set(observation.models) | set(plan.keep)) - reserved - dropped
    if len(kept) > MAX_KEPT:
        return f"which makes {len(kept)} kept models, and at most {MAX_KEPT} are kept"
    return ""


def _is_integer(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object, *, minimum: float = -math.inf, above: float = -math.inf) -> bool:
    return (
        isinstance(value, int | float)
        and math.isfinite(value)
        and value >= minimum
        and value > above
    )
