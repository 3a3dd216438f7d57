"""What a token costs on each side, if the examples of a job are tokens with a target each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.job.planned import EXACT, Figure
from isthmus.task import Participant, Task
from isthmus.task.definition import defines
from isthmus.task.loading import user_code
from isthmus.task.scoring import batches
from isthmus.task.scoring.order import EpochOrder
from isthmus_server.plan.cost import UNIT_OF_PRICE

_MILLION = 1_000_000
_MOST_ROWS = 64
"""Examples of a participant whose tokens are counted, spread over its data."""
_MOST_DEVICES = 4
"""Devices whose data are looked at."""


@dataclasses.dataclass(frozen=True)
class TokenQuestion:
    """A job, and which sides of it train."""

    job: Job
    task: Task
    examples_of_step: int
    """Examples of a step of the whole datacenter; 0 for none."""
    on_devices: bool

    def prices(self) -> list[Figure]:
        """The price of a million tokens that are trained on, by side.

        Empty for a job whose examples are none of tokens, and for a side whose data are not on this
        machine.
        """
        found = []
        if self.examples_of_step:
            found += self._of_datacenter()
        if self.on_devices:
            found += self._of_devices()
        return found

    def _of_datacenter(self) -> list[Figure]:
        place = Participant(name="datacenter-0", regime="datacenter")
        rows = _rows(self.task, place, self.examples_of_step)
        if rows is None or not rows.tokens:
            return []
        tokens = self.examples_of_step * rows.tokens
        price = self.job.prices.datacenter_step / tokens
        how = (
            f"{EXACT} price of a step of {tokens:,.0f} tokens, the mean of {rows.counted} examples"
        )
        return [Figure("a million tokens, datacenter", _MILLION * price, UNIT_OF_PRICE, how)]

    def _of_devices(self) -> list[Figure]:
        """By the data that simulated devices of the job have on this machine."""
        section = self.job.federated
        count = section.clients or section.cohort
        each = []
        for index in range(min(count, _MOST_DEVICES)):
            name = f"client-{index}"
            shard = (index, count)
            device = Participant(name=name, regime="federated", shard=shard)
            rows = _rows(self.task, device, section.batch_size)
            if rows is None:
                return []
            each.append(_examples_of_update(section, rows.count) * rows.tokens)
        tokens = sum(each) / max(1, len(each))
        if not tokens:
            return []
        price = self.job.prices.client_update / tokens
        how = f"{EXACT} price of an update of {tokens:,.0f} tokens, the mean of {len(each)} devices"
        return [Figure("a million tokens, devices", _MILLION * price, UNIT_OF_PRICE, how)]


@dataclasses.dataclass(frozen=True)
class _CountedRows:
    """The examples of a participant."""

    count: int
    """How many an epoch has."""
    counted: int
    """How many of them were looked at."""
    tokens: float
    """Tokens of one, on average."""


def _examples_of_update(section: FederatedSection, count: int) -> int:
    """Examples that an update of a device is trained on, which has so many in an epoch."""
    if section.local_steps is None:
        return (section.local_epochs or 1) * count
    # Epochs as many as it takes, of which the last batch may be smaller.
    epochs, rest = divmod(section.local_steps, -(-count // section.batch_size))
    return epochs * count + min(rest * section.batch_size, count)


def _rows(task: Task, participant: Participant, batch_size: int) -> _CountedRows | None:
    """The examples of a participant; None if they are not here, or none of tokens."""
    try:
        with user_code("local_data()"):
            dataset: Dataset[Any] = task.local_data(participant)
            count = len(dataset)  # type: ignore[arg-type]  # one without a length fails
        if not count:
            return None
        indices: Sequence[int] = range(count)
        if defines(task, "order"):  # which may leave examples out, or repeat some
            order = EpochOrder(task, dataset, count, batch_size)
            indices = order.epoch(torch.Generator().manual_seed(0)).tolist()
        chosen = _spread(indices)
        total = 0
        # One at a time, as padding of a batch is no token.
        for inputs, target in itertools.chain.from_iterable(
            batches(task, dataset, [row], 1, torch.device("cpu")) for row in chosen
        ):
            tokens = _tokens(inputs, target)
            if tokens is None:
                return None
            total += tokens
    except UserError:
        return None  # what is wrong with them is said where they are trained on
    return _CountedRows(len(indices), len(chosen), total / len(chosen))


def _spread(indices: Sequence[int]) -> Sequence[int]:
    """Some of so many, at equal distances."""
    most = min(len(indices), _MOST_ROWS)
    return [indices[number * len(indices) // most] for number in range(most)]


def _tokens(inputs: Any, target: Any) -> int | None:
    """The tokens of a batch; None if it has none: whole numbers, and a target for each of them."""
    found = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(found, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if found.dim() != 2 or found.is_floating_point() or found.shape != target.shape:
        return None
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else found.numel()
