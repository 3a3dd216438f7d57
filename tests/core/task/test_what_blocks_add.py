"""What recomputed blocks add to their arguments, and keep where it is hard to find."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.scoring.recomputation import recompute


@dataclasses.dataclass(slots=True)
class _Slotted:
    items: list[Any] = dataclasses.field(default_factory=list)
    total: Any = 0.0

    def add(self, value: Any) -> None:
        self.items.append(value)
        self.total = self.total + value


class _List(list[Any]):
    total = 0.0

    def add(self, value: Any) -> None:
        self.append(value)
        self.total = self.total + value


class _Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []
        self.register_buffer("total", torch.zeros(()))

    def add(self, value: Any) -> None:
        self.items.append(value)
        self.total = self.total + value


def _closing() -> Callable[[Any], Any]:
    total = 0.0

    def add(value: Any = 0.0) -> Any:
        nonlocal total
        total = total + value
        return total

    return add


def _add(kept: Any, loss: Any) -> None:
    kept.add(loss)


def _one_more(kept: Any, loss: Any) -> None:
    kept[0] += 1


def _of_both(kept: Any) -> Any:
    return sum(getattr(kept, "items", kept)) * kept.total


Kind = tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]
KINDS: dict[str, Kind] = {
    "list": (list, list.append, sum),
    "emptied list": (lambda: [1.0] * 20, lambda kept, loss: kept.pop(), sum),
    "long list": (lambda: [0.0] * 5000, list.append, sum),
    "list in a long list": (
        lambda: [[0.0] for _ in range(5000)],
        lambda kept, loss: kept[-1].append(loss),
        lambda kept: sum(kept[-1]),
    ),
    "list in a dict": (
        lambda: collections.defaultdict(list),
        lambda kept, loss: kept["losses"].append(loss),
        lambda kept: sum(kept["losses"]),
    ),
    "order of a dict": (
        lambda: collections.OrderedDict(zip("abc", (1.0, 2.0, 3.0), strict=True)),
        lambda kept, loss: kept.move_to_end(next(iter(kept))),
        lambda kept: next(iter(kept.values())),
    ),
    "slots": (_Slotted, _add, _of_both),
    "attribute of a list": (_List, _add, _of_both),
    "module": (_Losses, _add, _of_both),
    "module in a list": (
        lambda: [_Losses()],
        lambda kept, loss: kept[0].add(loss),
        lambda kept: _of_both(kept[0]),
    ),
    "method": (lambda: [].append, lambda kept, loss: kept(loss), lambda kept: sum(kept.__self__)),
    "partial": (
        lambda: functools.partial(list.append, []),
        lambda kept, loss: kept(loss),
        lambda kept: sum(kept.args[0]),
    ),
    "function": (_closing, lambda kept, loss: kept(loss), lambda kept: kept()),
    "key": (
        lambda: {_Losses(): 0},
        lambda kept, loss: next(iter(kept)).add(loss),
        lambda kept: _of_both(next(iter(kept))),
    ),
    "read-only table": (
        lambda: types.MappingProxyType({"losses": []}),
        lambda kept, loss: kept["losses"].append(loss),
        lambda kept: sum(kept["losses"]),
    ),
    "array of NumPy": (lambda: numpy.zeros(1), _one_more, lambda kept: float(kept[0])),
    "array": (lambda: array.array("d", [0.0]), _one_more, lambda kept: kept[0]),
    "bytes": (lambda: bytearray(1), _one_more, lambda kept: float(kept[0])),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda kept, loss: torch.rand(1, generator=kept),
        lambda kept: kept.initial_seed() + int(kept.get_state().sum()),
    ),
    "generator of Python": (
        lambda: random.Random(1),
        lambda kept, loss: kept.random(),
        lambda kept: copy.copy(kept).random(),
    ),
}


class _Adding(nn.Module):
    """Adds a loss to what it is given, or to what it keeps, in its middle."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        build, self.__dict__["_change"], _ = kind
        self.layer = nn.Linear(4, 4)
        self.__dict__["kept"] = build()

    def forward(self, inputs: torch.Tensor, given: Any = None) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs)
        loss = hidden.square().mean()
        if given is None:
            self._change(self.kept, loss.detach())
        else:
            self._change(given, loss)
        return hidden.tanh()


def _trained(kind: Kind, place: str, keep_products: bool | None) -> list[Any]:
    """Losses and parameters of some steps; plain ones without `keep_products`."""
    build, _, read = kind
    torch.manual_seed(0)
    blocks = nn.ModuleList([_Adding(kind), _Adding(kind)])
    if keep_products is not None:
        for block in blocks:
            recompute(block, keep_products=keep_products, compares=True)
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)
    lasting = build()
    found: list[Any] = []
    for _ in range(3):
        given = {"attribute": None, "argument": lasting, "new argument": build()}[place]
        hidden = torch.randn(8, 4)
        for block in blocks:
            hidden = block(hidden, given)
        kept = [block.kept for block in blocks] if given is None else [given]
        loss = hidden.square().mean() * (1 + sum(map(read, kept)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return [found, *(each.tolist() for each in blocks.parameters())]


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("place", ["attribute", "new argument"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_add_is_there_once_and_all_bytes_are_those_of_plain_training(
    kind: str, place: str, keep_products: bool
) -> None:
    expected = _trained(KINDS[kind], place, None)
    assert _trained(KINDS[kind], place, keep_products) == expected


NUMBERS = {
    kind: (build, lambda kept, loss, change=change: change(kept, loss.detach()), read)
    for kind, (build, change, read) in KINDS.items()
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_what_is_given_to_all_calls_has_what_each_adds_once_after_backward_passes(
    kind: str,
) -> None:
    expected = _trained(NUMBERS[kind], "argument", None)
    assert _trained(NUMBERS[kind], "argument", False) == expected


def _numbered() -> Any:
    number = 0
    while True:
        number += 1
        yield number


ITERATORS = {
    "count": itertools.count,
    "iterator": lambda: iter([1.0] * 50),
    "pairs": lambda: zip(itertools.count(), itertools.count(), strict=False),
    "generator function": _numbered,
    "cycle": lambda: itertools.cycle([1.0, 2.0]),
}


@pytest.mark.parametrize("place", ["attribute", "argument"])
@pytest.mark.parametrize("build", ITERATORS.values(), ids=ITERATORS)
def test_an_iterator_that_blocks_advance_is_refused(build: Any, place: str) -> None:
    kind = (build, lambda kept, loss: next(kept), lambda kept: 0.0)
    with pytest.raises(TaskError, match=r"a _Adding (computes something else|has an iterator) "):
        _trained(kind, place, False)


def test_an_iterator_that_blocks_leave_alone_is_not_refused() -> None:
    for build in (
        itertools.count,
        _numbered,
        lambda: iter([1.0]),
        lambda: zip([1], [2], strict=True),
    ):
        kind = (build, lambda kept, loss: None, lambda kept: 0.0)
        assert _trained(kind, "attribute", True) == _trained(kind, "attribute", None)


def test_more_values_than_can_be_looked_at_are_refused() -> None:
    kind = (
        lambda: [[[0.0] for _ in range(400)] for _ in range(300)],
        lambda kept, loss: kept[-1][-1].append(1.0),
        lambda kept: sum(kept[-1][-1]),
    )
    with pytest.raises(TaskError, match="a _Adding has more than 100000 values, too many to "):
        _trained(kind, "attribute", False)
