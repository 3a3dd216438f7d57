"""Divide training rows between the datacenter and the devices, as a scenario's `split` defines.

The rows are divided at random into public rows and rows of the devices; see `scenario.Split`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from regime_simulation.readers import Rows

from isthmus.errors import TaskError

MIN_ROWS = 20
"""Fewest rows of a device."""
HELD_OUT = 0.1
"""Share of the public rows that is kept for central evaluation."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The rows of the datacenter and of each device."""

    public: Rows
    held_out: Rows
    """Public rows for central evaluation."""
    devices: Sequence[Rows]


def split_rows(train: Rows, kinds: int, labels: int, split_json: str, seed: int) -> Parts:
    """The split of the training rows for a scenario and a seed.

    Args:
        train: the training rows.
        kinds: number of kinds of rows.
        labels: number of classes; 0 for a regression.
        split_json: the scenario's `split`.
        seed: of the split.
    """
    split: dict[str, Any] = json.loads(split_json)
    draw = torch.Generator().manual_seed(seed)
    rows = train.at(torch.randperm(len(train.target), generator=draw))
    order = torch.randperm(kinds, generator=draw)
    public_kinds = order[: split["public_classes"]]
    of_public = torch.isin(rows.kind, public_kinds)
    candidates = of_public.nonzero().flatten()
    public = candidates[: split["public_rows"]]
    taken = of_public.clone()
    if not split["exclusive"]:
        taken.zero_()
        taken[public] = True
    private = (~taken).nonzero().flatten()
    if len(private) < MIN_ROWS * split["clients"]:
        raise TaskError(
            f"{len(private)} rows are left for split.clients={split['clients']} devices of at "
            f"least {MIN_ROWS} rows; lower it, or split.public_rows"
        )
    altered = _altered(rows.at(public), split, public_kinds, labels, draw)
    held_out = max(1, int(HELD_OUT * len(public)))
    partition = _native if split["native"] else _dirichlet
    indices = partition(rows.kind, private, order, split, draw)
    devices = [rows.at(index) for index in _filled(indices, split["zones"], draw)]
    return Parts(
        public=altered.at(slice(held_out, None)),
        held_out=altered.at(slice(None, held_out)),
        devices=_shuffled(devices, split["zones"]) if split["shuffled"] else devices,
    )


def _shuffled(devices: Sequence[Rows], zones: int) -> Sequence[Rows]:
    """The devices in another order; each stays in its zone."""
    shuffled, draw = list(devices), random.Random("shuffled")
    for zone in range(zones):
        shuffled[zone::zones] = draw.sample(shuffled[zone::zones], len(shuffled[zone::zones]))
    return shuffled


def _altered(
    rows: Rows, split: dict[str, Any], kinds: torch.Tensor, labels: int, draw: torch.Generator
) -> Rows:
    """Apply the scenario's defects to the public rows: shifted features and wrong labels."""
    inputs, target = rows.inputs, rows.target.clone()
    if split["shift"]:
        features = inputs.shape[1]
        mix = torch.randn(features, features, generator=draw) / features**0.5
        offset = torch.randn(features, generator=draw)
        inputs = inputs + split["shift"] * (inputs @ mix + offset)
    if not labels:
        mirrored = round(split["swapped_classes"] * len(target))
        target[:mirrored] *= -1
        others = target[torch.randint(len(target), (len(target),), generator=draw)]
    else:
        # Where kinds are not classes, the labels of any class can be wrong.
        same = torch.equal(rows.target, rows.kind)
        classes = kinds if same else torch.randperm(labels, generator=draw)
        swapped = classes[: round(split["swapped_classes"] * len(classes))]
        if len(swapped) > 1:  # each class gets the label of the next one
            names = torch.arange(labels)
            names[swapped] = swapped.roll(1)
            target = names[target]
    noisy = torch.rand(len(target), generator=draw) < split["label_noise"]
    if labels:
        others = classes[torch.randint(len(classes), (len(target),), generator=draw)]
    return Rows(inputs, torch.where(noisy, others, target), rows.kind)


def _native(
    kind: torch.Tensor,
    private: torch.Tensor,
    order: torch.Tensor,
    split: dict[str, Any],
    draw: torch.Generator,
) -> list[torch.Tensor]:
    """Rows of each device, all of one source; the sources with the most rows have more devices."""
    clients = split["clients"]
    of_kind = {int(k): private[kind[private] == k] for k in order}
    sources = [k for k, rows in of_kind.items() if len(rows)]
    shares = dict.fromkeys(sources[:clients], 1)
    for _ in range(clients - len(shares)):
        shares[max(shares, key=lambda k: len(of_kind[k]) / shares[k])] += 1
    return [piece for k, share in shares.items() for piece in of_kind[k].tensor_split(share)]


def _dirichlet(
    kind: torch.Tensor,
    private: torch.Tensor,
    order: torch.Tensor,
    split: dict[str, Any],
    draw: torch.Generator,
) -> list[torch.Tensor]:
    """Rows of each device, from its zone's kinds, with shares from a Dirichlet distribution."""
    zones, clients = split["zones"], split["clients"]
    pieces_of: list[list[torch.Tensor]] = [[] for _ in range(clients)]
    private_kinds = [int(k) for k in order if bool((kind[private] == k).any())]
    for index, each in enumerate(private_kinds):
        members = [i for i in range(clients) if i % zones == index % zones]
        rows = private[kind[private] == each]
        shares = torch._sample_dirichlet(
            torch.full((len(members),), split["dirichlet"]), generator=draw
        )
        cuts = (shares.cumsum(0) * len(rows)).round().long()[:-1]
        for member, piece in zip(members, rows.tensor_split(cuts), strict=True):
            pieces_of[member].append(piece)
    return [torch.cat(pieces) if pieces else private[:0] for pieces in pieces_of]


def _filled(
    devices: list[torch.Tensor], zones: int, draw: torch.Generator
) -> Sequence[torch.Tensor]:
    """Give each device at least MIN_ROWS, taken from the one with the most rows in its zone."""
    for poor in range(len(devices)):
        while len(devices[poor]) < MIN_ROWS:
            zone = [i for i in range(len(devices)) if i % zones == poor % zones]
            rich = max(zone, key=lambda i: len(devices[i]))
            mixed = devices[rich][torch.randperm(len(devices[rich]), generator=draw)]
            missing = MIN_ROWS - len(devices[poor])
            devices[poor] = torch.cat([devices[poor], mixed[:missing]])
            devices[rich] = mixed[missing:]
    return devices
