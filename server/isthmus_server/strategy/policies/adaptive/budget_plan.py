"""What time and budget still allow, for the adaptive policy: rounds with devices, their price."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection

from isthmus_server.strategy.policy import Forecast, Observation


def rounds_with_devices(observation: Observation) -> tuple[float, float]:
    """Estimate how many rounds with devices the time allows, and how many the budget allows too."""
    share = observation.forecast.get("federated", Forecast()).share
    rounds_left = observation.rounds - observation.round + 1
    by_time = rounds_left * share
    durations = _round_durations(observation)
    # Time limits the rounds too, as soon as the duration of one is known.
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


def has_device_hours(observation: Observation) -> bool:
    """Return whether the devices' availability changes with the job's windows."""
    return observation.forecast.get("federated", Forecast()).changes_in is not None


def datacenter_available(observation: Observation, excluded: Collection[str] = ()) -> bool:
    """Return whether a datacenter is connected and within its window, other than `excluded`."""
    names = observation.datacenter_names
    used = not names or not set(names) <= set(excluded)
    return used and observation.datacenter_ready and observation.open("datacenter")
