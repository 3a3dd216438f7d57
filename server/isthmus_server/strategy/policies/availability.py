"""Whoever can work now."""

from __future__ import annotations

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.policy import Forecast, Observation, Plan, Wait, settings_of


class Settings(Section):
    """`[strategy.settings]` of this policy."""

    both: RegimeName = "federated"
    """The regime while both sides can work."""


class Availability:
    """The side that is here and within its window; a setting where both are."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, Settings)

    def plan(self, observation: Observation) -> Plan | Wait:
        """See who is here; wait for a window if nobody is within theirs."""
        devices, needed = observation.clients_ready, observation.needed
        edge = observation.open("federated") and devices >= needed
        center = observation.open("datacenter") and observation.datacenter_ready
        if edge and center:
            return Plan(self.settings.both, f"{devices} devices and the datacenter can work")
        if edge:
            return Plan("federated", f"{devices} devices can work and the datacenter cannot")
        if center:
            return Plan("datacenter", f"it can work, and {_no_edge(observation)}")
        opening = [
            found.changes_in
            for found in (observation.forecast.get(side) for side in ("datacenter", "federated"))
            if found is not None and not found.ready and found.changes_in is not None
        ]
        if opening:
            return Wait(min(opening), f"{_no_edge(observation)}, and the datacenter cannot work")
        # Nobody is here whose hours these are: the round waits for them, as long as the job says.
        return Plan(
            "federated" if observation.open("federated") else "datacenter",
            "nobody is here yet, and these are its hours",
        )


def _no_edge(observation: Observation) -> str:
    if not observation.forecast.get("federated", Forecast()).ready:
        return "the devices are outside of their window"
    return f"{observation.clients_ready} devices are ready of the {observation.needed} needed"
