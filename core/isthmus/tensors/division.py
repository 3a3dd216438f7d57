"""How the tensors of a model are divided: exchanged, kept on each device, or frozen.

>>> from types import SimpleNamespace
>>> from torch import nn
>>> rules = SimpleNamespace(include=(), exclude=(), personal=("1.*",), buffers="average",
...                         low_rank=None)
>>> division = divide(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), rules)
>>> [entry.name for entry in division.exchanged.entries], division.personal.size
(['0.bias', '0.weight'], 4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

from isthmus.errors import JobError, TaskError
from isthmus.tensors.exchange_set import TensorLayout, about_brackets, matches
from isthmus.tensors.low_rank import LowRankRules, adapted_matrices
from isthmus.tensors.running_statistics import freeze_statistics, normalisation_layers


class ExchangeRules(Protocol):
    """The job's table `[exchange]`, see `isthmus.job.exchange.ExchangeSection`."""

    @property
    def include(self) -> Sequence[str]:
        """Patterns of what is trained; empty for all."""
        ...

    @property
    def exclude(self) -> Sequence[str]:
        """Patterns of what is frozen."""
        ...

    @property
    def personal(self) -> Sequence[str]:
        """Patterns of what each device trains for itself."""
        ...

    @property
    def buffers(self) -> str:
        """What happens to running statistics."""
        ...

    @property
    def low_rank(self) -> LowRankRules | None:
        """Which matrices devices change by products of factors."""
        ...


@dataclasses.dataclass(frozen=True)
class Division:
    """The tensors of a model that are trained. All others are frozen."""

    exchanged: TensorLayout
    """What participants exchange."""
    personal: TensorLayout
    """What each device trains for itself; often empty."""
    adapted: tuple[str, ...] = ()
    """The exchanged matrices that devices change by products of factors."""

    def check_exchanged_only(self, who: str, advice: str) -> None:
        """Refuse participants that cannot keep a personal state.

        Raises:
            TaskError: the job has personal parameters.
        """
        if self.personal.size:
            raise TaskError(f"{who} cannot keep {self.personal.entries[0].name!r}; {advice}")

    def check_datacenter(self) -> None:
        """Refuse to train in a datacenter what devices normalise by statistics of their own.

        Raises:
            TaskError: running statistics are personal; a datacenter has none but the initial ones,
                with which a layer does not normalise.
        """
        if self.personal.statistics:
            raise TaskError(
                f"the running statistics {self.personal.statistics[0]!r} stay on devices, and a "
                "datacenter cannot train without them; use strategy.policy = 'federated' without "
                "datacenters, or exchange.buffers = 'average'"
            )


def divide(
    model: nn.Module, rules: ExchangeRules, *, on_device: bool = False, unfilled: bool = False
) -> Division:
    """Divide a model's trainable parameters and running statistics, and freeze the rest of them.

    Frozen parameters lose `requires_grad`; layers with frozen statistics normalise by them in
    training too. What is personal is trained only `on_device`, and frozen elsewhere.

    Args:
        model: as the task has built it; it is changed.
        rules: of the job.
        on_device: whether the model is a device's.
        unfilled: see `TensorLayout.of`.

    Raises:
        TaskError: see `TensorLayout.of`; or nothing is left to exchange.
        JobError: a pattern matches nothing, or divides the statistics of one layer; or see
            `adapted_matrices`.
    """
    whole = TensorLayout.of(model, statistics=rules.buffers != "frozen", unfilled=unfilled)
    names = [entry.name for entry in whole.entries]
    for key in ("include", "exclude", "personal"):
        _check_patterns(getattr(rules, key), names, f"exchange.{key}")
    layers = normalisation_layers(model)
    own = {name for tensors in layers.values() for name in tensors}
    if rules.buffers in ("local", "recompute") and not own:
        raise JobError(
            f"exchange.buffers={rules.buffers!r} is about normalisation layers with running "
            "statistics, and this model has none; remove it"
        )
    personal = set()
    frozen = set()
    for name in names:
        if matches(name, rules.exclude):
            frozen.add(name)
        elif matches(name, rules.personal) or (rules.buffers == "local" and name in own):
            personal.add(name)
        elif rules.include and not matches(name, rules.include):
            frozen.add(name)
    for path, tensors in layers.items():
        statistics = set(tensors) & set(whole.statistics)
        if any(0 < len(statistics & part) < len(statistics) for part in (personal, frozen)):
            raise JobError(
                f"the patterns of [exchange] divide the running mean and variance of {path!r}, "
                "which belong together; use a pattern that matches both"
            )
    divided = Division(
        _part(whole, (name for name in names if name not in personal | frozen)),
        _part(whole, personal),
    )
    if not divided.exchanged.trained_size:
        raise JobError("[exchange] leaves no parameter to exchange; change its patterns")
    divided = dataclasses.replace(
        divided, adapted=adapted_matrices(divided.exchanged, rules.low_rank)
    )
    still = frozen if on_device else frozen | personal
    for name, parameter in model.named_parameters():
        if name in still:
            parameter.requires_grad_(False)
    freeze_statistics(model, None if rules.buffers == "frozen" else still)
    return divided


def _part(whole: TensorLayout, names: Iterable[str]) -> TensorLayout:
    chosen = set(names)
    return TensorLayout.from_shapes(
        {entry.name: entry.shape for entry in whole.entries if entry.name in chosen},
        chosen.intersection(whole.statistics),
    )


def _check_patterns(patterns: Sequence[str], names: Sequence[str], key: str) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise JobError(
                f"{key}: {pattern!r} matches no trainable parameter and no running statistic of "
                f"the model{about_brackets(pattern)}; it has {shown}"
            )
