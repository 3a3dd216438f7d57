"""Estimates that the adaptive policy derives from an observation.

Two groups: what is still possible (rounds that time and budget allow, affordable datacenter steps),
and how far the public data resemble the devices' (losses, gradient norms and cosines of past
rounds). All of them are functions of the observation only.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection

from isthmus_server.strategy.policy import Forecast, Observation

SIMILARITY_ROUNDS = 6
"""Hybrid rounds that are needed before `gradient_divergence` is estimated."""


# -- what is still possible ------------------------------------------------------------------------


def rounds_with_devices(observation: Observation) -> tuple[float, float]:
    """Estimate how many rounds with devices the time allows, and how many the budget allows too."""
    share = observation.forecast.get("federated", Forecast()).share
    rounds_left = observation.rounds - observation.round + 1
    by_time = rounds_left * share
    durations = _round_durations(observation)
    if observation.seconds_left is not None and durations:
        fitting = observation.seconds_left * share / max(statistics.median(durations), 1e-9)
        by_time = min(rounds_left, fitting)
    if observation.budget_left is None:
        return by_time, by_time
    affordable = observation.budget_left // max(observation.price("federated"), 1e-9)
    return by_time, min(by_time, affordable)


def _round_durations(observation: Observation) -> list[float]:
    """Durations of past rounds with their overhead, of rounds with devices if there were any."""
    durations = [
        (after.regime, max(after.seconds, after.elapsed - before.elapsed))
        for before, after in itertools.pairwise(observation.history)
    ]
    durations = durations or [(past.regime, past.seconds) for past in observation.history]
    with_devices = [seconds for regime, seconds in durations if regime != "datacenter"]
    return with_devices or [seconds for _, seconds in durations]


def affordable_steps(observation: Observation, share: float) -> int:
    """Return the datacenter steps whose price is at most `share` of a federated round's.

    At least 1, and at most what the job sets for a datacenter round.
    """
    step = (observation.price("datacenter") / observation.datacenter_steps) or 1e-9
    limit = share * observation.price("federated") / step
    return max(1, int(min(observation.datacenter_steps, limit)))


def flat_rounds(observation: Observation) -> int:
    """Count the latest datacenter rounds since the held-out loss last fell by 1 %."""
    best, flat = math.inf, 0
    for past in observation.history:
        loss = past.metrics.get("loss")
        if past.regime != "datacenter":
            best, flat = math.inf, 0
        elif loss is not None:
            flat = 0 if loss < 0.99 * best else flat + 1
            best = min(best, loss)
    return flat


def has_device_hours(observation: Observation) -> bool:
    """Return whether the devices' availability changes with the job's windows."""
    return observation.forecast.get("federated", Forecast()).changes_in is not None


# -- how far public data resemble the devices' -----------------------------------------------------


def public_loss_ratio(observation: Observation, since_warm_start: bool = False) -> float:
    """Return the latest public loss divided by that after the first round with devices.

    Infinity if unknown. With `since_warm_start` the first is that after the run's first round.

    If training on devices lowers the public loss, what they learn holds for public data, so the
    reverse is likely too: reverse validation (Zhong et al. 2010) judges a model of the target
    domain on the source domain. Only `Task.public_eval` is known to be public.
    """
    rounds = observation.history
    if not since_warm_start:
        rounds = list(itertools.dropwhile(lambda past: past.regime == "datacenter", rounds))
    losses = [past.metrics["public_loss"] for past in rounds if "public_loss" in past.metrics]
    return losses[-1] / losses[0] if losses and losses[0] > 0 else math.inf


def peak_device_loss_ratio(observation: Observation) -> float:
    """Return the highest training loss of the devices in any round, divided by the first.

    It falls over a run, unless devices that come back find that their examples were forgotten while
    other devices trained. Training on examples of all kinds in every round prevents this
    (rehearsal, Robins 1995). 0 if unknown.
    """
    reported = [past.training.get("federated", {}).get("loss") for past in observation.history]
    losses = [loss for loss in reported if loss is not None]
    return max(losses) / losses[0] if losses and losses[0] > 0 else 0.0


def gradient_ratios(observation: Observation) -> list[float]:
    """Return the norm of the datacenter's gradient divided by that of the devices', oldest first.

    Both are taken at the same model, so the ratio has no units: it changes neither with learning
    rates and numbers of steps nor with the scale of the loss.
    """
    measured = [past.gradients for past in observation.history if past.gradients is not None]
    return [
        each.datacenter_norm / each.devices_norm
        for each in measured
        if each.devices_norm and each.datacenter_norm
    ]


def ratios_by_datacenter(observation: Observation) -> dict[str, list[float]]:
    """Return the same ratio for the gradient of each connected datacenter, by its name."""
    ratios: dict[str, list[float]] = {name: [] for name in observation.datacenter_names}
    for past in observation.history:
        if past.gradients is None or not past.gradients.devices_norm:
            continue
        for name, each in past.gradients.datacenters.items():
            if name in ratios:
                ratios[name].append(each.norm / past.gradients.devices_norm)
    return ratios


def most_opposed(observation: Observation, names: Collection[str]) -> str | None:
    """Return the datacenter whose last gradient had the lowest cosine with the devices'.

    None if that of one of them is not known.
    """
    cosines: dict[str, float] = {}
    for past in observation.history:
        for name, each in past.gradients.datacenters.items() if past.gradients is not None else ():
            if each.cosine is not None:
                cosines[name] = each.cosine
    if not names or not cosines.keys() >= set(names):
        return None
    return min(sorted(names), key=lambda name: cosines[name])


def gradient_divergence(observation: Observation, ratio: float, share: float) -> float:
    """Estimate how much public data differ from the devices', from the first hybrid rounds.

    It is sqrt(share) x ratio x the mean cosine between the datacenter's gradient and what devices
    sent, over the rounds after the first. Where the data are alike, what devices learn from their
    own examples also serves the public ones, and the gradient turns away from their step; where
    they differ, it keeps pulling in the same direction. A gradient over few classes is longer by
    one over the root of their number, which the root of `share` corrects.

    Args:
        observation: with the history.
        ratio: norm of the datacenter's first gradient divided by the devices'.
        share: part of the target that only the public data cover.

    Returns:
        The estimate; 0 until `SIMILARITY_ROUNDS` hybrid rounds were committed.
    """
    first = [past for past in observation.history if past.regime == "hybrid"]
    first = first[:SIMILARITY_ROUNDS]
    cosines = [past.cosine for past in first[1:] if past.cosine is not None]
    if len(first) < SIMILARITY_ROUNDS or not cosines:
        return 0.0
    return math.sqrt(share) * ratio * statistics.fmean(cosines)
