"""The factors of a low-rank training.

Shape legend: m x n = a matrix, r = the rank of this device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from isthmus_clients.training.example_order import number
from isthmus_clients.training.low_rank.rank import LowRank


@dataclasses.dataclass(frozen=True)
class _Adapted:
    """A matrix of the model and its factors."""

    matrix: nn.Parameter
    """m x n, in the model."""
    start: torch.Tensor
    """m x n, where the training began."""
    left: nn.Parameter
    """B, m x r."""
    right: nn.Parameter
    """A, r x n."""


class Factors:
    """The parameters of one training: those of the model, with factors in place of some matrices.

    Guarantees:
      * the matrices differ from those at the start by `alpha / rank` times a product of `rank`;
      * the initial factors depend only on the seed.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Iterable[tuple[str, torch.Tensor]],
        low_rank: LowRank,
        seed: bytes,
    ) -> None:
        """Draw the factors.

        Args:
            model: which has the parameters `start`.
            start: parts of a vector by name; they must not change until the training ends.
            low_rank: the matrices.
            seed: of the device in a round.
        """
        self._scale = low_rank.scale
        self._adapted: list[_Adapted] = []
        self.trained: dict[str, nn.Parameter] = {}
        """What the optimizer may train, by name: `NAME.B` and `NAME.A` in place of a matrix."""
        # With other bytes of the seed than the training has: its random numbers stay what they are
        # without factors.
        generator = torch.Generator().manual_seed(number(seed[8:]))
        starts = dict(start)
        for name, parameter in model.named_parameters():
            if name not in low_rank.names:
                self.trained[name] = parameter
                continue
            parameter.grad = None
            device = parameter.device
            (m, n), r = parameter.shape, low_rank.rank
            # On the CPU, whose numbers are the same with every accelerator.
            drawn = torch.rand(r, n, generator=generator).mul_(2).sub_(1).div_(math.sqrt(n))
            # One factor is zero, so that the training begins at the model; the other is not, or
            # both would have no gradient.
            left = nn.Parameter(torch.zeros(m, r, device=device))
            right = nn.Parameter(drawn.to(device))
            self._adapted.append(_Adapted(parameter, starts[name].to(device), left, right))
            self.trained |= {f"{name}.B": left, f"{name}.A": right}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it only those matrices require gradients whose factors do."""
        others = [
            each.matrix
            for each in self._adapted
            if each.matrix.requires_grad and not each.left.requires_grad
        ]
        for matrix in others:
            matrix.requires_grad_(False)
        try:
            yield
        finally:
            for matrix in others:
                matrix.requires_grad_(True)

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients of matrices to their factors; without one, factors have none."""
        for each in self._adapted:
            gradient = each.matrix.grad
            if gradient is None or not each.left.requires_grad:
                each.matrix.grad = each.left.grad = each.right.grad = None
                continue
            of_matrix = gradient.float() * self._scale
            _add(each.left, of_matrix @ each.right.T)
            _add(each.right, each.left.T @ of_matrix)
            # Zero and not None: terms that are added later need a gradient to be added to, and this
            # one must not count twice.
            gradient.zero_()

    @torch.no_grad()
    def merge(self) -> None:
        """Give the matrices their values after a step of the factors."""
        for each in self._adapted:
            each.matrix.grad = None
            # From the start and not from the last value, whose rounding errors would add up.
            merged = torch.addmm(each.start, each.left, each.right, alpha=self._scale)
            each.matrix.copy_(merged)


def _add(factor: nn.Parameter, gradient: torch.Tensor) -> None:
    factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)
