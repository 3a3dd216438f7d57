"""Observations as a run would make them, for tests of policies."""

import json

from isthmus_server.strategy import Compare, Observation, Plan, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.policy import Comparison, PastRound

MODELS = ("current", "served", "initial")


def observe(round_=1, history=(), **changes):
    seen = {
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
    return Observation(**{**seen, **changes})


def past(round_, regime, price=1.0, **metrics):
    return PastRound(
        round=round_, regime=regime, metrics=metrics, seconds=1.0, price=price, accepted=1
    )


def compared(models, differences, error=0.01):
    """A comparison in which each model but the first differs from it by so much."""
    difference = dict(zip(models, (0.0, *differences), strict=True))
    return Comparison(
        models=models,
        devices=8,
        score={name: 0.5 + found for name, found in difference.items()},
        difference=difference,
        standard_error=dict.fromkeys(models, error),
        price=0.5,
    )


def play(strategy, rounds, see=lambda round_: {}, judge=None, losses=lambda round_: 1.0):
    """What a policy plans round after round, with everything it remembers going through JSON.

    `see` gives what is special about a round, and `judge(models)` the differences that devices
    find, or a sentence if none can be asked.
    """
    state, history, kept, plans = {}, [], set(), []
    spent = 0.0
    for round_ in range(1, rounds + 1):
        comparisons, refused = [], []
        while True:
            seen = observe(
                round_,
                history,
                rounds=rounds,
                state=json.loads(json.dumps(state)),
                models=(*MODELS, *sorted(kept)),
                comparisons=tuple(comparisons),
                refused=tuple(refused),
                **{"spent": spent, **see(round_)},
            )
            # A policy that was just made answers as one that has been there all the time.
            answer = checked_answer(load_policy(strategy), strategy.policy, seen)
            if not isinstance(answer, Compare):
                break
            found = judge(answer.models)
            if isinstance(found, str):
                refused.append(found)
            else:
                comparisons.append(compared(answer.models, found))
                state = answer.state
        plans.append(answer)
        if not isinstance(answer, Plan):
            break
        kept |= answer.keep.keys()
        state = answer.state
        spent += seen.price(answer.regime, answer.cohort, answer.datacenter_steps)
        history = [*history, past(round_, answer.regime, loss=losses(round_))]
    return plans
