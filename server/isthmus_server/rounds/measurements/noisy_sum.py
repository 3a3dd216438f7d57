"""A sum of what devices measure in a job with `[privacy]`: it is charged, and has noise."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

import torch

from isthmus_privacy.secagg.config import RoundConfig
from isthmus_server.budgets.budget import Measurement, PrivacyBudget
from isthmus_server.regimes.secure_sums.round_configs import measuring_config


@dataclasses.dataclass(frozen=True)
class NoisySum:
    """The sum of one attempt."""

    budget: PrivacyBudget
    what: Measurement
    norm: float
    """Bound on the 2-norm of what one device sends."""

    def config(self, config: RoundConfig) -> RoundConfig:
        """The configuration of a secure sum, with the noise that devices add.

        Raises:
            AttemptFailed: the noise does not fit the ring.
        """
        return measuring_config(config, self.budget.plan, self.norm)

    def charged(
        self, number: int, attempt: int, devices: Collection[str]
    ) -> contextlib.AbstractContextManager[None]:
        """See `PrivacyBudget.charged_measurement`."""
        return self.budget.charged_measurement(self.what, number, attempt, devices)

    def release(self, mean: torch.Tensor, devices: int, config: RoundConfig | None = None) -> float:
        """Add the server's noise to a mean (N), in place, unless the devices have added theirs.

        Args:
            mean: of the devices' numbers.
            devices: in the mean.
            config: of the secure sum, if it was one.

        Returns:
            The standard deviation of the noise of an element.
        """
        if config is not None and config.noise is not None:
            return config.noise.noise_of_mean(config.size, devices)
        return self.budget.release_measurement(mean, self.norm, devices)
