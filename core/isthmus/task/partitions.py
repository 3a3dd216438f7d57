"""Divide one data set among simulated devices: the usual partitions of federated experiments.

>>> split = Partitioner("dirichlet:0.3", labels=torch.arange(100) % 10, seed=1)
>>> rows = split.rows_of(Participant(name="client-0", regime="federated", shard=(0, 4)))
>>> rows.dtype, 0 < len(rows) < 98
(torch.int64, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from isthmus.errors import TaskError
from isthmus.task.definition import Participant

Labels = torch.Tensor | Sequence[int] | Sequence[str]


class Partitioner:
    """The rows of each device, by a partition that a name and a number describe.

    * ``iid``: random rows, as many for each device;
    * ``quantity:ALPHA``: random rows, in numbers drawn from a Dirichlet distribution;
    * ``dirichlet:ALPHA``: of each label, shares drawn from a Dirichlet distribution (Hsu et al.
      2019); a smaller ALPHA is more uneven;
    * ``classes:K``: rows of about K labels for each device (McMahan et al. 2017);
    * ``by-key``: all rows with the same label, such as a speaker or a hospital, on one device.

    Every device has at least one row, and every row belongs to one device. A partition depends on
    the kind, the labels, the seed and the number of devices only.
    """

    def __init__(
        self, kind: str, *, rows: int | None = None, labels: Labels | None = None, seed: int = 0
    ) -> None:
        """Describe a partition; it is computed for the first device.

        Args:
            kind: one of the above.
            rows: number of rows, if there are no labels.
            labels: of the rows (rows); for `dirichlet`, `classes` and `by-key`.
            seed: of the random choices.

        Raises:
            TaskError: the kind is unknown, its number is missing, or labels are.
        """
        name, _, number = kind.partition(":")
        if name not in _KINDS:
            known = ", ".join(each + (":NUMBER" if takes else "") for each, takes in _TAKES.items())
            raise TaskError(f"there is no partition {kind!r}; there are {known}")
        self._number = _number(kind, number, takes=_TAKES[name])
        self._divide = _KINDS[name]
        if labels is None and (rows is None or name not in ("iid", "quantity")):
            needed = "rows or labels" if name in ("iid", "quantity") else "labels"
            raise TaskError(f"the partition {kind!r} needs {needed}")
        self._labels = None if labels is None else _codes(labels)
        self._rows = len(self._labels) if self._labels is not None else int(rows or 0)
        self._seed = seed
        self._divided: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """Number of devices, all rows in the devices' order, and where each device's begin."""

    def rows_of(self, participant: Participant) -> torch.Tensor:
        """The rows of a device, int64 (n), by its shard.

        Raises:
            TaskError: it has no shard, or there are fewer rows than devices.
        """
        if participant.shard is None:
            raise TaskError(
                f"this task splits one data set, and {participant.name} has no shard; start it "
                "with --shard"
            )
        index, count = participant.shard
        if self._divided is None or self._divided[0] != count:
            self._divided = (count, *self._all(count))
        _, order, starts = self._divided
        return order[int(starts[index]) : int(starts[index + 1])]

    def _all(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows < count:
            raise TaskError(f"{self._rows} rows cannot be divided among {count} devices")
        labels = self._labels
        if labels is None:
            labels = torch.zeros(self._rows, dtype=torch.int64)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)
            owner = self._divide(labels, count, self._number)
            starts = torch.zeros(count + 1, dtype=torch.int64)
            torch.cumsum(torch.bincount(owner, minlength=count), 0, out=starts[1:])
            return torch.argsort(owner, stable=True), starts


def _iid(labels: torch.Tensor, count: int, number: float) -> torch.Tensor:
    return torch.randperm(len(labels)) % count


def _quantity(labels: torch.Tensor, count: int, alpha: float) -> torch.Tensor:
    return _in_shares(torch.zeros_like(labels), count, alpha)


def _in_shares(labels: torch.Tensor, count: int, alpha: float) -> torch.Tensor:
    """Owner of each row: of each label, shares drawn from a Dirichlet distribution."""
    order = torch.randperm(len(labels))
    owner = torch.empty_like(labels)
    owner[order[:count]] = torch.arange(count)  # at least one row each
    order = order[count:]
    draw = torch.distributions.Dirichlet(torch.full((count,), alpha, dtype=torch.float64))
    for label in torch.unique(labels):
        rows = order[labels[order] == label]
        ends = (draw.sample().cumsum(0) * len(rows)).round().long().clamp(max=len(rows))
        ends[-1] = len(rows)
        owner[rows] = torch.repeat_interleave(torch.arange(count), torch.diff(ends, prepend=_ZERO))
    return owner


def _some_classes(labels: torch.Tensor, count: int, each: float) -> torch.Tensor:
    """Owner of each row: rows in the order of labels are cut into pieces, which are dealt."""
    pieces = count * max(1, round(each))
    if len(labels) < pieces:
        raise TaskError(
            f"{len(labels)} rows cannot be cut into {pieces} pieces, {round(each)} for each of "
            f"{count} devices"
        )
    shuffled = torch.randperm(len(labels))
    by_label = shuffled[torch.argsort(labels[shuffled], stable=True)]
    owner = torch.empty_like(labels)
    owner[by_label] = torch.randperm(pieces)[torch.arange(len(labels)) * pieces // len(labels)]
    return owner % count


def _by_key(labels: torch.Tensor, count: int, number: float) -> torch.Tensor:
    keys, codes = torch.unique(labels, return_inverse=True)
    if len(keys) < count:
        raise TaskError(f"{len(keys)} keys cannot be divided among {count} devices")
    return (torch.randperm(len(keys)) % count)[codes]


_ZERO = torch.zeros(1, dtype=torch.int64)
_TAKES = {"iid": False, "quantity": True, "dirichlet": True, "classes": True, "by-key": False}
"""Whether a kind takes a number."""
_KINDS: dict[str, Callable[[torch.Tensor, int, float], torch.Tensor]] = {
    "iid": _iid,
    "quantity": _quantity,
    "dirichlet": _in_shares,
    "classes": _some_classes,
    "by-key": _by_key,
}


def _number(kind: str, text: str, *, takes: bool) -> float:
    if not takes:
        if text:
            raise TaskError(f"the partition {kind!r} takes no number")
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise TaskError(f"the partition {kind!r} needs a positive number, as in dirichlet:0.3")
    return number


def _codes(labels: Labels) -> torch.Tensor:
    """Labels as int64 (rows)."""
    if isinstance(labels, torch.Tensor):
        return labels.long()
    known = {label: code for code, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([known[label] for label in labels])
