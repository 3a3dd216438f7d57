"""Noise that the server adds to the mean of a round, if the job trusts it to."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import UserError
from isthmus.system.private_files import write_private_file
from isthmus_privacy.dp.gaussian import KEY_BYTES, GaussianDraws

if TYPE_CHECKING:
    import torch

    from isthmus_privacy.dp.calibration import NoisePlan

_FLOAT_ROUNDING = 1e-4
"""Part by which a mean of clipped vectors may be longer than their bound in float32."""

KEY_FILE = "privacy.key"
"""In the run directory: the key of the noise of all rounds. Who has it can subtract the noise."""


class ServerNoise:
    """The noise of a run with `gaussian` or `correlated` noise.

    Guarantees:
      * independent noise has a new key in each attempt, which is forgotten;
      * correlated noise has one key for the run, and each attempt a row of its own.
    """

    def __init__(self, plan: NoisePlan, directory: Path, *, used: bool) -> None:
        """Read the key of the run, or make it; `used`: noise was drawn with it before.

        Raises:
            UserError: a key that was used is missing or not a key.
        """
        self._plan = plan
        self._key = b""
        if plan.correlated is None:
            return
        path = directory / KEY_FILE
        if not used and not path.exists():
            write_private_file(path, os.urandom(KEY_BYTES))
        try:
            self._key = path.read_bytes()
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing: without the key of its noise the run cannot be continued; "
                "restore it from a backup"
            ) from None
        if len(self._key) != KEY_BYTES:
            raise UserError(f"{path} is no key of {KEY_BYTES} bytes; restore it from a backup")

    def add(self, mean: torch.Tensor, clip: float, *, row: int, devices: int) -> float:
        """Add the noise of a round to the mean of the devices' updates, in place.

        Args:
            mean: (N) float32.
            clip: bound on the 2-norm of an update in the mean.
            row: number of the attempt with devices in this run, from 0.
            devices: in the mean.

        Returns:
            The standard deviation of the noise of an element.
        """
        scale = self._plan.deviation * clip / devices
        if self._plan.correlated is None:
            noise = fresh_noise(len(mean))
            length = 1.0
        else:
            draws = GaussianDraws(self._key, len(mean))
            noise = self._plan.correlated.noise(row, draws.row)
            length = math.hypot(*self._plan.correlated.coefficients[: row + 1])
        mean.add_(noise.mul_(scale).to(mean.dtype))
        return scale * length


def is_too_long(mean: torch.Tensor, norm: float, deviation: float) -> bool:
    """Whether a mean with the server's noise cannot be one of vectors of honest devices.

    It is asked of the mean with noise, as all that is derived from it: of the exact one, a device
    that has sent a long vector of its choice would learn on which side of a bound the others are.

    Args:
        mean: (N).
        norm: bound on the 2-norm of one device's vector.
        deviation: of the noise of an element.
    """
    import torch  # what only reads a run starts without it

    from isthmus_privacy.dp.distributed import largest_norm

    found = float(torch.linalg.vector_norm(mean, dtype=torch.float64))
    return found > largest_norm(norm, deviation, len(mean)) * (1 + _FLOAT_ROUNDING)


def fresh_noise(size: int) -> torch.Tensor:
    """(N) float64 standard normal numbers from a new key, which is forgotten."""
    return GaussianDraws(os.urandom(KEY_BYTES), size).row(0)
