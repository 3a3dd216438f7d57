"""Which regime does the work of a round, with whom, and why."""

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
