"""Select the regime by the declared target, without any measurement."""

from __future__ import annotations

from isthmus.job import StrategySection
from isthmus_server.strategy.policy import Kind, Observation, Plan, no_settings


class Rule:
    """Federated if the whole target is on the devices, transfer if part of it is."""

    def __init__(self, strategy: StrategySection) -> None:
        no_settings(strategy)
        self.share = strategy.target_edge_share
        self.weight = transfer_weight(strategy)
        kinds: dict[float, Kind] = {0: "datacenter", 1: "federated"}
        self.regimes = (kinds.get(self.share, "hybrid"),)

    def plan(self, observation: Observation) -> Plan:
        """Plan the same round every time."""
        reason = f"the devices hold {self.share:.0%} of the target"
        if self.share == 0:
            return Plan("datacenter", reason)
        if self.share == 1:
            return Plan("federated", reason)
        return Plan(
            "hybrid",
            f"{reason}, and take the datacenter's gradient for the rest, with weight "
            f"{self.weight:.3g}",
            merge="transfer",
            transfer_weight=self.weight,
        )


def transfer_weight(strategy: StrategySection) -> float:
    """Return lambda, the weight of the gradient transfer: (1 - pi)/pi, bounded by the job's.

    A weight above about 1.2/(client learning rate x local steps) diverges. The server does not know
    that rate, so `strategy.transfer_weight` is the bound.
    """
    share = strategy.target_edge_share
    return min((1 - share) / share, strategy.transfer_weight) if share else 0.0
