"""Observations for tests of policies, and a simulated run of a policy."""

import dataclasses
import json

from isthmus.job import StrategySection
from isthmus_server.strategy import Compare, Observation, Plan, load_policy
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.gradients import GradientMeasurement
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


def past_round(round_, regime, price=1.0, gradients=None, **metrics):
    return PastRound(
        round=round_,
        regime=regime,
        metrics=metrics,
        seconds=1.0,
        price=price,
        accepted=1,
        gradients=gradients,
    )


def gradients_of(ratio, devices=1.0, cosine=0.5):
    """A measurement in which the datacenter's gradient is `ratio` times as long as the devices'."""
    return GradientMeasurement(
        devices_norm=devices,
        datacenter_norm=ratio * devices,
        cosine=cosine,
        examples=80,
        scale=1.0,
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


def simulate(
    strategy,
    rounds,
    changes=lambda round_: {},
    judge=None,
    losses=lambda round_: 1.0,
    device_losses=lambda round_: 1.0,
    public=True,
):
    """Return the answers of a policy, round after round; its state passes through JSON.

    `changes(round_)` overrides values of a round's observation. `judge(models)` returns the
    differences that devices report, a comparison, or a sentence if the comparison is refused.
    Without `public` the task has no public held-out data.
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
                exact = isinstance(differences, Comparison)
                result = differences if exact else comparison_of(answer.models, differences)
                comparisons.append(result)
                state = answer.state
        plans.append(answer)
        if not isinstance(answer, Plan):
            break
        kept |= answer.keep.keys()
        state = answer.state
        spent += observation.price(answer.regime, answer.cohort, answer.datacenter_steps)
        metrics = {"loss": losses(round_)} | ({"public_loss": losses(round_)} if public else {})
        measured = gradients_of(2.0) if answer.measure_gradients else None
        past = past_round(round_, answer.regime, gradients=measured, **metrics)
        training = {"federated": {"loss": device_losses(round_)}}
        history = [*history, dataclasses.replace(past, training=training)]
    return plans


def strategy_of(policy, settings=None, **more):
    return StrategySection(policy=policy, settings=settings or {}, **more)


def initials(plans):
    return "".join(plan.regime[0] for plan in plans)


ROOM_FOR_WARM_START = {"budget": 400.0}
"""Pays for 50 rounds of 8 devices, which leaves room for a warm start in 120 rounds."""


def adaptive(**settings):
    return strategy_of("adaptive", settings)


def adapt(rounds=120, judge=lambda models: [0.0] * (len(models) - 1), changes=None, **more):
    strategy = more.pop("strategy", None) or adaptive()
    return simulate(
        strategy, rounds, changes or (lambda round_: ROOM_FOR_WARM_START), judge, **more
    )


HALF = strategy_of("adaptive", target_edge_share=0.5)
"""The devices hold half of the target."""
