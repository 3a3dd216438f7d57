"""What a device sends of its training, from where it began and where it ended.

Shape legend: N = float32 elements of the exchange set.
"""

from __future__ import annotations

import torch

from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout

_LARGEST = torch.finfo(torch.float32).max


def normalize(
    update: torch.Tensor, layout: TensorLayout, settings: FederatedSection, steps: int
) -> None:
    """Scale an update (N) by the number of its steps, in place, if the job asks for it.

    FedNova (Wang et al. 2020). Running statistics are no sums over steps.
    """
    factor = settings.normalization(steps)
    if factor != 1:
        update[: layout.trained_size].mul_(factor)


def scale_gradient(measured: torch.Tensor, factor: float) -> None:
    """Scale a mean gradient (N) by the factor of a server, in place.

    It stays finite: a factor that a server chooses may not decide whose update is usable.
    """
    measured.mul_(min(factor, _LARGEST)).clamp_(-_LARGEST, _LARGEST)
