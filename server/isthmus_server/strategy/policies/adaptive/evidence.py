"""What measurements say of the public data and of training, for the adaptive policy.

How far the public data resemble the devices' (losses, gradient norms and cosines of past rounds),
whether training still helps, and whether devices forget. All are functions of the observation.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection

from isthmus_server.strategy.policy import Observation

SIMILARITY_ROUNDS = 6
"""Hybrid rounds that are needed before `gradient_divergence` is estimated."""


def flat_rounds(observation: Observation) -> int:
    """Count the latest datacenter rounds since the held-out loss last fell by 1 %."""
    best = math.inf
    flat = 0
    for past in observation.history:
        loss = past.metrics.get("loss")
        if past.regime != "datacenter":
            best = math.inf
            flat = 0
        elif loss is not None:
            flat = 0 if loss < 0.99 * best else flat + 1
            best = min(best, loss)
    return flat


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


def overshoots(observation: Observation, limit: float) -> int:
    """Count the rounds in which the datacenter's gradient carried devices too far.

    In them the component of the devices' update along that gradient was longer than `limit` times
    their update in the first round, in which they took none. 0 if the norms are not known.
    """
    own = [past.norms for past in observation.history if past.regime == "federated"]
    first = own[0].get("federated") if own else None
    if not first:
        return 0
    return sum(
        past.norms.get("federated", 0.0) * past.cosine > limit * first
        for past in observation.history
        if past.regime == "hybrid" and past.cosine is not None
    )


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


def gradient_divergence(observation: Observation, ratio: float) -> float:
    """Estimate how much public data differ from the devices', from the first hybrid rounds.

    It is ratio x the mean cosine between the datacenter's gradient and what devices sent, over the
    rounds after the first, x the gradient's first norm divided by its mean norm. Where the data are
    alike, what devices learn from their own examples also serves the public ones, and the gradient
    turns away from their step; where they differ, it is long, keeps pulling in the same direction,
    and shrinks because it is followed.

    Args:
        observation: with the history.
        ratio: norm of the datacenter's first gradient divided by the devices'.

    Returns:
        The estimate; 0 until `SIMILARITY_ROUNDS` hybrid rounds were committed.
    """
    first = [past for past in observation.history if past.regime == "hybrid"]
    first = first[:SIMILARITY_ROUNDS]
    cosines = [past.cosine for past in first[1:] if past.cosine is not None]
    norms = [norm for past in first if (norm := past.norms.get("datacenter"))]
    if len(first) < SIMILARITY_ROUNDS or not cosines or not norms:
        return 0.0
    return ratio * statistics.fmean(cosines) * norms[0] / statistics.fmean(norms)
