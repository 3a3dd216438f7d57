"""What the limits still allow, for the adaptive policy: rounds with devices, their price."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection

from isthmus_server.strategy.policy import Forecast, Observation


def rounds_with_devices(observation: Observation) -> tuple[float, float]:
    """Estimate how many rounds with devices the time allows, and how many all limits allow."""
    share = observation.forecast.get("federated", Forecast()).share
    rounds_left = observation.rounds - observation.round + 1
    by_time = rounds_left * share
    durations = _round_durations(observation)
    # Time limits the rounds too, as soon as the duration of one is known.
    if observation.seconds_left is not None and durations:
        fitting = observation.seconds_left * share / max(statistics.median(durations), 1e-9)
        by_time = min(rounds_left, fitting)
    affordable = rounds_by_epsilon(observation)
    if observation.budget_left is not None:
        price = max(observation.price("federated"), 1e-9)
        affordable = min(affordable, observation.budget_left // price)
    if observation.bytes_left is not None:
        moved = observation.invited() * observation.client_bytes
        affordable = min(affordable, max(0.0, observation.bytes_left) // max(moved, 1e-9))
    return by_time, min(by_time, affordable)


def rounds_by_epsilon(observation: Observation) -> float:
    """Estimate how many more rounds the privacy budget of the devices allows.

    Infinity without one, and before any of it is spent. Each round is taken to cost a device as
    much as those before it, on average; in truth later ones cost less. At least 1: a device that
    has too little left for a round may not be invited.
    """
    left = observation.epsilon_left
    devices = observation.clients_ready + observation.clients_ineligible
    if left is None or not observation.epsilon_spent or not devices:
        return math.inf
    rounds = sum(past.regime != "datacenter" for past in observation.history)
    # Devices are asked in turn: one of many is in few rounds, and the budget is that of one.
    asked = max(1.0, rounds * observation.invited() / devices)
    again = left / (observation.epsilon_spent / asked)
    return max(1, math.floor(again * max(devices / observation.invited(), 1.0)))


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
