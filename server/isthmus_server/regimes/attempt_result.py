"""The results of all regimes of one attempt at a round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from isthmus_privacy.slots import GRADIENT_LOST
from isthmus_server.model import merge
from isthmus_server.regimes import gradient_measurement
from isthmus_server.regimes.base import DatacenterResult, FederatedResult
from isthmus_server.storage.records import Receipt, StepFigures, UpdateNoise
from isthmus_server.strategy.gradients import GradientMeasurement, GroupSum


@dataclasses.dataclass
class TrainingResult:
    """The results of all regimes of one attempt."""

    federated: FederatedResult | None = None
    datacenters: list[DatacenterResult] = dataclasses.field(default_factory=list)
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient, if it reached the server."""
    noise: UpdateNoise | None = None
    """What is noise in that of devices."""
    cosine: float | None = None
    """Cosine between the two pseudo-gradients."""
    gradient: torch.Tensor | None = None
    """The gradient that devices added to their own, float32 (N)."""
    datacenter_gradient: torch.Tensor | None = None
    """Mean gradient of the datacenters at the round's model, float32 (N)."""
    gradient_by_datacenter: dict[str, tuple[torch.Tensor, int]] = dataclasses.field(
        default_factory=dict
    )
    """Gradient of each datacenter at the round's model, float32 (N), and its examples; only of
    plans that need them."""
    gradients: GradientMeasurement | None = None
    """Norms and cosine of the gradients at the round's model, if they were requested."""
    groups: dict[str, GroupSum] = dataclasses.field(default_factory=dict)
    """The sum of each group of devices, in a round that was summed by group."""
    earlier: Sequence[Receipt] = ()
    """Receipts of the gradients of datacenters that trained afterwards."""

    @property
    def receipts(self) -> list[Receipt]:
        """Receipts of all invited participants."""
        parts: list[DatacenterResult | FederatedResult] = [*self.datacenters]
        if self.federated is not None:
            parts.append(self.federated)
        return with_earlier(self.earlier, [r for part in parts for r in part.receipts])

    @property
    def training(self) -> dict[str, dict[str, float]]:
        """Figures of the training itself, by regime; the mean of several datacenters."""
        figures = {}
        if self.federated is not None:
            figures["federated"] = dict(self.federated.training)
        if self.datacenters:
            names = set.intersection(*(set(result.training) for result in self.datacenters))
            figures["datacenter"] = {
                name: sum(result.training[name] for result in self.datacenters)
                / len(self.datacenters)
                for name in sorted(names)
            }
        return figures

    @property
    def profile(self) -> dict[str, dict[str, float]]:
        """Rates and memory of each datacenter, by its name."""
        return {result.receipts[0].participant: dict(result.profile) for result in self.datacenters}

    @property
    def step_figures(self) -> dict[str, Sequence[StepFigures]]:
        """Figures of some steps of each datacenter, by its name; empty if it has none."""
        return {
            result.receipts[0].participant: result.step_figures
            for result in self.datacenters
            if result.step_figures
        }


def with_earlier(earlier: Sequence[Receipt], receipts: Sequence[Receipt]) -> list[Receipt]:
    """One receipt of each participant, with the cost of its earlier work in the same attempt."""
    before = {receipt.participant: receipt for receipt in earlier}
    added = []
    for receipt in receipts:
        first = before.pop(receipt.participant, None)
        if first is not None:
            receipt = dataclasses.replace(
                receipt,
                started=first.started or receipt.started,
                steps=first.steps + receipt.steps,
                seconds=first.seconds + receipt.seconds,
            ).with_moved(first.moved + receipt.moved)
        added.append(receipt)
    return [*before.values(), *added]


def vectors_by_name(results: Sequence[DatacenterResult]) -> dict[str, tuple[torch.Tensor, int]]:
    """Vector and examples of each datacenter, by its name."""
    return {
        result.receipts[0].participant: (result.vector, result.examples)
        for result in results
        if result.vector is not None
    }


def group_sums(results: TrainingResult) -> dict[str, GroupSum]:
    """The figures of each group's sum; empty for a round of one sum."""
    groups = {} if results.federated is None else results.federated.groups
    left_out = frozenset[str]() if results.federated is None else results.federated.left_out
    sums = {}
    for name, result in groups.items():
        alone = dataclasses.replace(results, federated=result, gradient_by_datacenter={})
        measured = measured_gradients(alone)
        update = result.pseudo_gradient
        sums[name] = GroupSum(
            devices=sum(receipt.status == "accepted" for receipt in result.receipts),
            examples=int(result.training["examples"]),
            loss=result.training.get("loss"),
            norm=math.sqrt(merge.dot(update, update)),
            gradient_norm=None if measured is None else measured.devices_norm,
            cosine=None if measured is None else measured.cosine,
            left_out=name in left_out,
        )
    return sums


def measured_gradients(results: TrainingResult) -> GradientMeasurement | None:
    """The measurement of the gradients of a round; None if devices have sent none."""
    federated = results.federated
    if federated is None or federated.gradient is None:
        return None
    accepted = (r.examples for r in federated.receipts if r.status == "accepted")
    return gradient_measurement.measurement(
        federated.gradient,
        results.datacenter_gradient,
        results.gradient_by_datacenter,
        examples=int(federated.training.get("examples", sum(accepted))),
        scale=federated.gradient_scale,
        lost=federated.training.get(GRADIENT_LOST.name, 0.0),
        rounding=federated.rounding,
    )
