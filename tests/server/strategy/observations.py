"""Observations for tests of policies, and a simulated run of a policy."""

import json

from isthmus_server.strategy import Compare, Observation, Plan, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.policy import Comparison, PastRound

MODELS = ("current", "served", "initial")


def observe(round_=1, history=(), **changes):
    """An observation with plausible values; `changes` override them."""
    values = {
        "round": round_,
        "rounds": 10,
        "history": history,
        "clients_ready": 8,
        "datacenter_ready": True,
        "spent": 0.0,
        "budget": None,
        "state": {},
        "models": MODELS,
    }
    return Observation(**{**values, **changes})


def past_round(round_, regime, price=1.0, **metrics):
    return PastRound(
        round=round_, regime=regime, metrics=metrics, seconds=1.0, price=price, accepted=1
    )


def comparison_of(models, differences, error=0.01):
    """A comparison in which the models after the first have these differences from it."""
    difference = dict(zip(models, (0.0, *differences), strict=True))
    return Comparison(
        models=models,
        devices=8,
        score={name: 0.5 + value for name, value in difference.items()},
        difference=difference,
        standard_error=dict.fromkeys(models, error),
        price=0.5,
    )


def simulate(strategy, rounds, changes=lambda round_: {}, judge=None, losses=lambda round_: 1.0):
    """Return the answers of a policy, round after round; its state passes through JSON.

    `changes(round_)` overrides values of a round's observation. `judge(models)` returns the
    differences that devices report, or a sentence if the comparison is refused.
    """
    state, history, kept, plans = {}, [], set(), []
    spent = 0.0
    for round_ in range(1, rounds + 1):
        comparisons, refused = [], []
        while True:
            observation = observe(
                round_,
                history,
                rounds=rounds,
                state=json.loads(json.dumps(state)),
                models=(*MODELS, *sorted(kept)),
                comparisons=tuple(comparisons),
                refused=tuple(refused),
                **{"spent": spent, **changes(round_)},
            )
            # A new policy object answers like one that exists since the first round.
            answer = checked_answer(load_policy(strategy), strategy.policy, observation)
            if not isinstance(answer, Compare):
                break
            differences = judge(answer.models)
            if isinstance(differences, str):
                refused.append(differences)
            else:
                comparisons.append(comparison_of(answer.models, differences))
                state = answer.state
        plans.append(answer)
        if not isinstance(answer, Plan):
            break
        kept |= answer.keep.keys()
        state = answer.state
        spent += observation.price(answer.regime, answer.cohort, answer.datacenter_steps)
        history = [*history, past_round(round_, answer.regime, loss=losses(round_))]
    return plans
