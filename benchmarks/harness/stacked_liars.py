"""Rounds of devices of which some lie, with the training of all of them stacked in one tensor.

A round costs a hundredth of one of `isthmus simulate`, whose sums and rule it has: the means of
random groups, without the encoding of a secure sum, go to the product's `RobustRule`. Devices train
as in a job with plain SGD: so many steps, each on random examples of their own part.

Liars that know the rule (`KNOWING`) also know each other, the honest updates of the round before,
and, as the roster of a sum says, who is in their group. Those of a group have its mean point
against the honest one, as long as a rule over groups lets it be (`REACH`).

Shape legend: D = devices, E = examples of a device, F = inputs, N = parameters.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.liars import DEVIATIONS, DEVICES_STEPS, SCALE, liars_of
from harness.liars_task import SETS, ManyDevices, rows_of
from torch import nn

from isthmus.job import parse_job
from isthmus_server.regimes.secure_sums.robust_rule import RobustRule

KNOWING = "knowing"
REACH = 2.5
"""How many times as long as the shortest mean of honest groups liars that know the rule make the
mean of theirs; groups that are more than 3 times as long as the reference are left out."""
JOB = 'name = "robust"\n[task]\nsource = "harness.liars_task:ManyDevices"'
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One update, float32 (N), of all (D, N) and the group of each device (D)."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The parts of a data set, and a model for it."""

    inputs: torch.Tensor
    """(D, E, F)."""
    target: torch.Tensor
    """(D, E)."""
    test: tuple[torch.Tensor, torch.Tensor]
    shapes: Sequence[tuple[int, ...]]
    start: torch.Tensor
    """The first model, float32 (N)."""
    rate: float

    @classmethod
    def of(cls, folder: Path, name: str, count: int, seed: int, flipped: Sequence[int]) -> Devices:
        """Divide a data set; the labels of some devices are flipped."""
        settings = {"set": name, "data": str(folder), "devices": count, "seed": seed}
        task = ManyDevices({**settings, "flipped": flipped})
        parts = [task.part(index) for index in range(count)]
        _, test = rows_of(name, str(folder))
        torch.manual_seed(seed)
        parameters = list(task.model().parameters())
        return cls(
            inputs=torch.stack([inputs for inputs, _ in parts]),
            target=torch.stack([target for _, target in parts]),
            test=(test.inputs, test.target),
            shapes=[tuple(each.shape) for each in parameters],
            start=torch.cat([each.detach().flatten() for each in parameters]),
            rate=SETS[name].rate,
        )

    def train(self, model: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
        """Start minus end of the training of each device, float32 (D, N)."""
        steps, batch = DEVICES_STEPS
        devices, examples = self.target.shape
        stacked = model.expand(devices, -1).clone()
        every = torch.arange(devices)[:, None]
        for _ in range(steps):
            order = torch.rand(devices, examples, generator=dice).argsort(1)[:, :batch]
            stacked.requires_grad_()
            output = self._forward(stacked, self.inputs[every, order])
            losses = nn.functional.cross_entropy(
                output.flatten(0, 1), self.target[every, order].flatten(), reduction="sum"
            )
            (gradient,) = torch.autograd.grad(losses / order.shape[1], stacked)
            stacked = stacked.detach() - self.rate * gradient
        return model - stacked

    def accuracy(self, model: torch.Tensor) -> float:
        """In percent, on the test rows."""
        inputs, target = self.test
        output = self._forward(model[None], inputs[None])[0]
        return 100 * float((output.argmax(1) == target).float().mean())

    def _forward(self, models: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs (D, rows, classes) of models (D, N) on inputs (D, rows, F)."""
        at = 0
        values = inputs
        for number, shape in enumerate(self.shapes):
            size = int(np.prod(shape))
            part = models[:, at : at + size]
            at += size
            if len(shape) == 2:
                values = values.relu() if number else values
                values = values @ part.view(-1, *shape).transpose(1, 2)
            else:
                values = values + part[:, None]
        return values


class _Conspiracy:
    """What liars that know the rule and each other learn, and what they send."""

    def __init__(self, lies: torch.Tensor) -> None:
        """`lies`: whether each device does, bool (D)."""
        self._lies = lies
        self._mean: torch.Tensor | None = None
        self._aim: torch.Tensor | None = None

    def apply(self, updates: torch.Tensor, groups: torch.Tensor) -> None:
        """Replace the updates of the liars, and learn from those of the others."""
        honest = updates[~self._lies]
        if self._mean is not None and self._aim is not None:
            for group in groups[self._lies].unique():
                members = groups == group
                liars = members & self._lies
                others = int(members.sum() - liars.sum())
                total = int(members.sum()) * self._aim - others * self._mean
                updates[liars] = total / liars.sum()
        each = int((groups == 0).sum())
        self._mean = honest.mean(0)
        whole = honest[: len(honest) // each * each].view(-1, each, honest.shape[1])
        shortest = whole.mean(1).norm(dim=1).min()
        self._aim = -REACH * shortest * self._mean / self._mean.norm()


def trained_with_liars(
    folder: Path,
    name: str,
    *,
    devices: int,
    each: int,
    rounds: int,
    attack: str,
    share: float,
    combine: Combine,
    seed: int = 0,
) -> tuple[float, float]:
    """Accuracy in percent after some rounds, and the median norm of a group's mean.

    Args:
        folder: with the data sets.
        name: of the data set.
        devices: all of them take part in each round.
        each: devices of a group.
        rounds: their number.
        attack: of `ATTACKS` or `KNOWING`; empty for none.
        share: of the devices that lie.
        combine: the rule.
        seed: of the split, the first model and all draws.
    """
    liars = liars_of(devices, share) if attack else []
    fleet = Devices.of(folder, name, devices, seed, liars if attack == "label" else [])
    lies = torch.zeros(devices, dtype=torch.bool)
    lies[liars] = True
    dice = torch.Generator().manual_seed(seed)
    conspiracy = _Conspiracy(lies)
    crafted = None
    model = fleet.start
    norms = []
    for _ in range(rounds):
        updates = fleet.train(model, dice)
        groups = torch.randperm(devices, generator=dice) % (devices // each)
        honest = updates[~lies]
        little = honest.mean(0) - DEVIATIONS * honest.std(0)
        if attack == "sign":
            updates[lies] *= -1
        elif attack == "scale":
            updates[lies] *= SCALE
        elif attack == "little" and crafted is not None:
            updates[lies] = crafted
        elif attack == KNOWING:
            conspiracy.apply(updates, groups)
        crafted = little
        norms.append(float(group_means(updates, groups).norm(dim=1).median()))
        model = model - combine(updates, groups)
    return fleet.accuracy(model), float(np.median(norms))


def group_means(updates: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mean of each group (groups, N); all groups have about equally many devices."""
    count = int(groups.max()) + 1
    sums = torch.zeros(count, updates.shape[1]).index_add_(0, groups, updates)
    return sums / groups.bincount(minlength=count)[:, None]


def mean(updates: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """What one secure sum gives."""
    return updates.mean(0)


def robust(settings: Sequence[str]) -> Combine:
    """The product's rule over the means of groups."""
    rule = RobustRule(parse_job(JOB, settings).federated)

    def combine(updates: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        means = group_means(updates, groups)
        sizes = groups.bincount().tolist()
        named = {str(at): (means[at], size) for at, size in enumerate(sizes)}
        return rule.combine(1, named).vector

    return combine


def flower(strategy: str, options: dict[str, Any]) -> Combine:
    """A rule of Flower on single updates."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp import strategy as strategies

    logging.getLogger("flwr").setLevel(logging.WARNING)  # a line for each round
    rule = getattr(strategies, strategy)(**options)

    def combine(updates: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        replies = [
            _Reply(
                RecordDict(
                    {
                        "arrays": ArrayRecord({"update": Array(update.numpy())}),
                        "metrics": MetricRecord({"num-examples": 1}),
                    }
                )
            )
            for update in updates
        ]
        arrays, _ = rule.aggregate_train(1, replies)
        return torch.from_numpy(arrays["update"].numpy().astype(np.float32))

    return combine


@dataclasses.dataclass(frozen=True)
class _Reply:
    """What a strategy reads of a message: here nothing is sent."""

    content: Any

    def has_error(self) -> bool:
        return False

    def has_content(self) -> bool:
        return True
