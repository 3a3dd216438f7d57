"""Strategy policies: decide which regime trains each round, with which participants, and why."""

from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.policy import (
    Compare,
    Observation,
    Plan,
    Policy,
    Stop,
    Wait,
)

__all__ = ["Compare", "Observation", "Plan", "Policy", "Stop", "Wait", "load_policy"]
