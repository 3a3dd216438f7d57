"""Measured gradients and sums of groups of devices, as policies and reports see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

REST = "*"
"""Name of the sum of the devices whose group is not summed by itself, or that have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSum:
    """The sum of one group of devices."""

    devices: int
    """Updates in it, at least `federated.groups.minimum`, or `federated.robust_minimum`."""
    examples: int
    """Weight of the group in the mean, unless the plan weighs the groups."""
    loss: float | None
    """Mean training loss over its examples."""
    norm: float
    """2-norm of its mean update."""
    gradient_norm: float | None = None
    """2-norm of its mean gradient at the round's model, if that was measured with a small error."""
    cosine: float | None = None
    """Cosine of that with the datacenters' mean gradient; None if one is missing or zero."""
    left_out: bool = False
    """Whether a robust rule has left it out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatacenterGradient:
    """Mean gradient of one datacenter."""

    norm: float
    """2-norm of the mean over its examples."""
    cosine: float | None
    """Cosine with the devices' mean gradient; None if that is not known, or either is zero."""
    examples: int
    """Weight in the mean of all datacenters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientMeasurement:
    """Mean gradients of both sides at the model that a round started from, before any training.

    The ratio of the norms and the cosine depend neither on learning rates and numbers of steps nor
    on the scale of the loss.
    """

    devices_norm: float | None
    """2-norm of the mean over the devices' examples; None if too much was lost in its encoding,
    after which the next measurement is encoded with another scale."""
    datacenter_norm: float | None
    """2-norm of the mean over the datacenters' examples; None without a datacenter."""
    cosine: float | None
    """Cosine between the two; None if one is missing or zero."""
    examples: int
    """Weight of the devices' mean: examples of the devices in it."""
    scale: float
    """Factor with which devices encoded their gradients."""
    lost: float = 0.0
    """Part of the devices' norms that was lost in clipping, with secure aggregation."""
    rounding: float = 0.0
    """Bound on the error of the encoding relative to the norm, with secure aggregation."""
    datacenters: Mapping[str, DatacenterGradient] = dataclasses.field(default_factory=dict)
    """The gradient of each datacenter, by its name."""
