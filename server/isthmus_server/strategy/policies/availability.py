"""Select the regime of the sides that are available now."""

from __future__ import annotations

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.policy import Forecast, Observation, Plan, Wait, settings_of


class AvailabilitySettings(Section):
    """`[strategy.settings]` of the availability policy."""

    both: RegimeName = "federated"
    """The regime while both sides are available."""


class Availability:
    """The regime of the available side; a setting decides if both are available."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, AvailabilitySettings)

    def plan(self, observation: Observation) -> Plan | Wait:
        """Plan for the available sides; wait for a window if there is none."""
        devices = observation.clients_ready
        quorum = observation.quorum
        edge = observation.open("federated") and devices >= quorum
        center = observation.open("datacenter") and observation.datacenter_ready
        if edge and center:
            return Plan(self.settings.both, f"{devices} devices and the datacenter can work")
        if edge:
            return Plan("federated", f"{devices} devices can work and the datacenter cannot")
        if center:
            return Plan("datacenter", f"it can work, and {_why_no_devices(observation)}")
        forecasts = (observation.forecast.get(side) for side in ("datacenter", "federated"))
        openings = [
            forecast.changes_in
            for forecast in forecasts
            if forecast is not None and not forecast.ready and forecast.changes_in is not None
        ]
        if openings:
            reason = f"{_why_no_devices(observation)}, and the datacenter cannot work"
            return Wait(min(openings), reason)
        # Within the windows, but nothing is connected: the round waits as long as the job allows.
        return Plan(
            "federated" if observation.open("federated") else "datacenter",
            "no participant is connected yet, and its window is open",
        )


def _why_no_devices(observation: Observation) -> str:
    if not observation.forecast.get("federated", Forecast()).ready:
        return "the devices are outside of their window"
    return f"{observation.clients_ready} devices are ready of the {observation.quorum} needed"
