"""A policy that begins a round only when a whole cohort is ready, not just its quorum."""

from isthmus.job import StrategySection
from isthmus_server.strategy.policy import Answer, Observation, Plan, Wait


class WholeCohort:
    def __init__(self, strategy: StrategySection) -> None:
        pass

    def plan(self, observation: Observation) -> Answer:
        if observation.clients_ready < observation.cohort:
            return Wait(0.5, "some devices are not ready")
        return Plan("federated", reason="the whole cohort is ready")
