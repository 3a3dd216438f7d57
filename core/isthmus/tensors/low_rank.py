"""The matrices of an exchange set that devices change by products of factors.

>>> from types import SimpleNamespace
>>> layout = TensorLayout.from_shapes({"head.bias": (3,), "head.weight": (3, 8)})
>>> adapted_matrices(layout, SimpleNamespace(include=["*.weight"], rank=2))
('head.weight',)
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout

KEY = "exchange.low_rank"


class LowRankRules(Protocol):
    """The job's table `[exchange.low_rank]`, see `isthmus.job.exchange.LowRankSection`."""

    @property
    def include(self) -> Sequence[str]:
        """Patterns of the matrices."""
        ...

    @property
    def rank(self) -> int:
        """The rank of the products, unless the task chooses another for a device."""
        ...


def adapted_matrices(exchanged: TensorLayout, rules: LowRankRules | None) -> tuple[str, ...]:
    """The names of the exchanged matrices that match the rules, in the order of the vector.

    Raises:
        JobError: a pattern matches no exchanged parameter or one that is not a matrix, or the rank
            is above the smaller side of a matrix.
    """
    if rules is None:
        return ()
    parameters = [entry for entry in exchanged.entries if not entry.statistic]
    chosen = []
    for pattern in rules.include:
        matching = [entry for entry in parameters if fnmatchcase(entry.name, pattern)]
        if not matching:
            shown = ", ".join(entry.name for entry in parameters[:8])
            raise JobError(
                f"{KEY}.include: {pattern!r} matches no exchanged parameter of the model; these "
                f"are {shown}{', ...' if len(parameters) > 8 else ''}"
            )
        for entry in matching:
            if len(entry.shape) != 2:
                raise JobError(
                    f"{KEY}.include: {pattern!r} matches {entry.name!r} of shape {entry.shape}, "
                    "which is not a matrix; use patterns of matrices only"
                )
        chosen += matching
    for entry in chosen:
        if rules.rank > min(entry.shape):
            raise JobError(
                f"{KEY}.rank={rules.rank} is above {min(entry.shape)}, the smaller side of "
                f"{entry.name!r} of shape {entry.shape}; lower it, or do not include that matrix"
            )
    return tuple(sorted({entry.name for entry in chosen}))
