"""The adaptive policy: plan from the declared target and budget, test what could harm the model."""

from isthmus_server.strategy.policies.adaptive.policy import Adaptive

__all__ = ["Adaptive"]
