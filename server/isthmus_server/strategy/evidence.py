"""What rounds with devices told of both sides' data; all of it is in the history anyway."""

from __future__ import annotations

import math
import statistics

from isthmus_server.strategy.policy import Observation

APART_ROUNDS = 6
"""Rounds before it is asked whether public data lie apart."""


def public_loss_fell(seen: Observation) -> float:
    """To what part of its first value devices brought the held-out public loss.

    What they learn holds for public data then, and so probably the other way round: reverse
    validation (Zhong et al. 2010), a model of the target judged on the source.
    """
    losses = [past.metrics["loss"] for past in seen.history if "loss" in past.metrics]
    return losses[-1] / losses[0] if losses and losses[0] > 0 else math.inf


def theirs_rose(seen: Observation) -> float:
    """How high the devices' own loss came in any round, in times of the first.

    It falls, but where those who come find that what they know was forgotten while others trained;
    examples of all kinds in every round are what helps against that (rehearsal, Robins 1995).
    """
    theirs = [past.training.get("federated", {}).get("loss") for past in seen.history]
    losses = [loss for loss in theirs if loss is not None]
    return max(losses) / losses[0] if losses and losses[0] > 0 else 0.0


def first_lengths(seen: Observation, weight: float) -> tuple[float, float]:
    """2-norms in the first hybrid round: of the datacenter's gradient, and of the devices' step.

    `weight` is what devices took of that gradient, which is what was measured.
    """
    first = next((past.norms for past in seen.history if past.regime == "hybrid"), {})
    taken = first.get("datacenter", 0.0)
    return taken / weight if weight else 0.0, first.get("federated", 0.0)


def apartness(seen: Observation, ratio: float, share: float) -> float:
    """How far public data, which hold such a share of the target alone, lie from the devices' own.

    By the first rounds in which devices took the datacenter's gradient along: its length beside
    their step (`ratio`), and its cosine with what they sent, as a mean over those after the first.
    Where the data are alike, what devices learn of their own rows serves the others too, and the
    gradient turns away from their step; where they are not, it goes on to pull them the same way. A
    gradient of few classes is long by itself, by one over the root of their number, whence the
    root. 0 until there were enough rounds.
    """
    first = [past for past in seen.history if past.regime == "hybrid"][:APART_ROUNDS]
    cosines = [past.cosine for past in first[1:] if past.cosine is not None]
    if len(first) < APART_ROUNDS or not cosines:
        return 0.0
    return math.sqrt(share) * ratio * statistics.fmean(cosines)
