"""The tables of differential privacy.

`[privacy]` is for what devices send; `[datacenter.privacy]` and `[federated.privacy]` are for the
examples of a datacenter and of each device.
"""

from isthmus.job.privacy.bounds import (
    LARGEST_CLIP,
    LARGEST_NOISE,
    MAX_CORRELATED_ROUNDS,
    SMALLEST_CLIP,
)
from isthmus.job.privacy.devices import PrivacySection
from isthmus.job.privacy.examples import DatacenterPrivacy, FederatedPrivacy

__all__ = [
    "LARGEST_CLIP",
    "LARGEST_NOISE",
    "MAX_CORRELATED_ROUNDS",
    "SMALLEST_CLIP",
    "DatacenterPrivacy",
    "FederatedPrivacy",
    "PrivacySection",
]
