"""What an observation lets expect: rounds that time and money allow, and whether more help."""

from __future__ import annotations

import itertools
import math
import statistics

from isthmus_server.strategy.policy import Forecast, Observation


def rounds_with_devices(seen: Observation) -> tuple[float, float]:
    """How many rounds with devices time allows, and how many of these the budget."""
    share = seen.forecast.get("federated", Forecast()).share
    capable = (seen.rounds - seen.round + 1) * share
    lasted = _seconds_of_rounds(seen)
    if seen.seconds_left is not None and lasted:
        by_time = seen.seconds_left * share / max(statistics.median(lasted), 1e-9)
        capable = min(seen.rounds - seen.round + 1, by_time)
    if seen.left is None:
        return capable, capable
    return capable, min(capable, seen.left // max(seen.price("federated"), 1e-9))


def _seconds_of_rounds(seen: Observation) -> list[float]:
    """What rounds took with all around them; of those with devices, if there were any."""
    spans = [
        (after.regime, max(after.seconds, after.elapsed - before.elapsed))
        for before, after in itertools.pairwise(seen.history)
    ]
    spans = spans or [(past.regime, past.seconds) for past in seen.history]
    return [span for regime, span in spans if regime != "datacenter"] or [s for _, s in spans]


def steps_within(seen: Observation, share: float) -> int:
    """Of the datacenter beside devices, that cost at most such a share of what these do."""
    step = (seen.price("datacenter") / seen.datacenter_steps) or 1e-9
    return max(1, int(min(seen.datacenter_steps, share * seen.price("federated") / step)))


def flat_rounds(seen: Observation) -> int:
    """Datacenter rounds at the end of the history since the held-out loss last fell by 1 %."""
    best, flat = math.inf, 0
    for past in seen.history:
        loss = past.metrics.get("loss")
        if past.regime != "datacenter":
            best, flat = math.inf, 0
        elif loss is not None:
            flat = 0 if loss < 0.99 * best else flat + 1
            best = min(best, loss)
    return flat


def has_hours(seen: Observation) -> bool:
    """Whether devices come and go by windows."""
    return seen.forecast.get("federated", Forecast()).changes_in is not None
