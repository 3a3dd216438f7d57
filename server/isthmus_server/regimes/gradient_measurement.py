"""Measure the mean gradients of devices and datacenters at the model that a round starts from.

Devices send their gradient with the update, in the same fixed-point encoding, whose range is chosen
for updates. So the gradient is multiplied by a public power of two before it is encoded, and the
measurement divides by it.

Shape legend: N = float32 elements of the exchange set.

>>> devices, datacenter = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])
>>> measured = measurement(devices, datacenter, examples=20, scale=0.5)
>>> measured.devices_norm, measured.datacenter_norm, measured.cosine
(10.0, 5.0, 0.96)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from isthmus_server.model import merge
from isthmus_server.strategy.gradients import DatacenterGradient, GradientMeasurement

MAX_ERROR = 0.05
"""Largest part of the devices' norm that may be lost in the encoding."""

HEADROOM = 64.0
"""How many times larger than the datacenter's largest element those of a device may be."""

_NORM_HEADROOM = 4.0
"""How many times larger than the norm of the last mean the elements of a device may be."""
_FIRST_BOUND = 16.0
"""Largest element that fits if nothing is known of the gradients."""
_MIN_LEFT = 2.0**-20
"""Smallest part of a norm that is taken to have remained after clipping."""
_FINER = 2.0**-10
"""Factor of the largest element that fits after a measurement that was lost in rounding."""
_MAX_EXPONENT = 100
"""Largest exponent of the scale: the product is to be a normal float32."""


def scale_for(
    clip: float, datacenter: torch.Tensor | None, last: GradientMeasurement | None
) -> float:
    """The factor with which devices multiply their gradients, a power of two.

    Args:
        clip: largest element that the encoding of updates can represent.
        datacenter: mean gradient of the datacenters at the same model, float32 (N), finite; None
            without a datacenter.
        last: the last measurement of the run; None if there is none.
    """
    bound = _FIRST_BOUND
    # The last one could not be used, and says in which direction its scale was wrong: clipped
    # values need a wider range, and values that were lost in rounding a finer one.
    if last is not None and last.devices_norm is None:
        coarser = HEADROOM / max(1 - last.lost, _MIN_LEFT)
        bound = clip / last.scale * (coarser if last.lost > MAX_ERROR else _FINER)
    elif datacenter is not None and bool(datacenter.any()):
        bound = HEADROOM * max(abs(float(end)) for end in torch.aminmax(datacenter))
    elif last is not None and last.devices_norm:
        bound = _NORM_HEADROOM * last.devices_norm
    # A power of two, by which floats are multiplied and divided without rounding.
    exponent = math.floor(math.log2(clip) - math.log2(bound))
    return 2.0 ** max(-_MAX_EXPONENT, min(exponent, _MAX_EXPONENT))


def measurement(
    devices: torch.Tensor,
    datacenter: torch.Tensor | None,
    by_datacenter: Mapping[str, tuple[torch.Tensor, int]] | None = None,
    *,
    examples: int,
    scale: float,
    lost: float = 0.0,
    rounding: float = 0.0,
) -> GradientMeasurement:
    """The norms of both mean gradients and their cosine.

    Args:
        devices: mean gradient of the devices times `scale`, float32 (N).
        datacenter: mean gradient of the datacenters, float32 (N); None without a datacenter.
        by_datacenter: mean gradient and examples of each datacenter, by its name.
        examples: weight of the devices' mean.
        scale: the factor.
        lost: part of the devices' norms that was lost in clipping.
        rounding: bound on the standard deviation of the error of an element of `devices`.
    """
    vectors = {"devices": devices}
    if datacenter is not None:
        vectors["datacenter"] = datacenter
    norms, cosine = merge.norms_and_cosine(vectors)
    lost = max(0.0, min(lost, 1.0))  # it was rounded too
    error = rounding * math.sqrt(len(devices))
    relative = min(1.0, error / norms["devices"]) if norms["devices"] else float(error > 0)
    usable = max(lost, relative) <= MAX_ERROR
    return GradientMeasurement(
        devices_norm=norms["devices"] / scale if usable else None,
        datacenter_norm=norms.get("datacenter"),
        cosine=cosine if usable else None,
        examples=examples,
        scale=scale,
        lost=lost,
        rounding=relative,
        datacenters={
            name: _of_datacenter(vector, count, devices if usable else None)
            for name, (vector, count) in (by_datacenter or {}).items()
        },
    )


def _of_datacenter(
    gradient: torch.Tensor, examples: int, devices: torch.Tensor | None
) -> DatacenterGradient:
    """The figures of one datacenter; `devices` is None if theirs are not usable."""
    vectors = {"datacenter": gradient} | ({} if devices is None else {"devices": devices})
    norms, cosine = merge.norms_and_cosine(vectors)
    return DatacenterGradient(norm=norms["datacenter"], cosine=cosine, examples=examples)
