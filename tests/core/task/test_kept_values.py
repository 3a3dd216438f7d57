"""What modules keep in attributes, and how a call is undone."""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from isthmus.task.scoring.kept_values import KeptValues, first_difference, numbers_kept


class _Record:
    def __init__(self) -> None:
        self.calls = 0


def _count(module: Any) -> None:
    module.value += 1


def _replace(module: Any) -> None:
    module.value = 0.5 * module.value + 1


def _in_place(module: Any) -> None:
    module.value.mul_(0.5).add_(1)


def _undeclared(module: Any) -> None:
    nn.functional.batch_norm(torch.randn(4, 3), module.value, torch.ones(3), training=True)


def _append(module: Any) -> None:
    module.value.append(1.0)


def _add(module: Any) -> None:
    module.value.add(len(module.value))


def _table(module: Any) -> None:
    module.value["calls"] = module.value.get("calls", 0) + 1


def _nested(module: Any) -> None:
    module.value[0]["calls"] += 1


def _in_a_tuple(module: Any) -> None:
    module.value[0].add_(1)


def _object(module: Any) -> None:
    module.value.calls += 1


def _draw(module: Any) -> None:
    torch.rand(1, generator=module.value)


def _draw_in_python(module: Any) -> None:
    module.value.random()


def _new(module: Any) -> None:
    module.other = getattr(module, "other", 0) + 1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "number": (lambda: 0, _count),
    "tensor": (lambda: torch.zeros(3), _replace),
    "in place": (lambda: torch.zeros(3), _in_place),
    "undeclared": (lambda: torch.zeros(3), _undeclared),
    "list": (list, _append),
    "deque": (collections.deque, _append),
    "set": (set, _add),
    "dict": (dict, _table),
    "nested": (lambda: [{"calls": 0}], _nested),
    "in a tuple": (lambda: (torch.zeros(3),), _in_a_tuple),
    "object": (_Record, _object),
    "namespace": (lambda: types.SimpleNamespace(calls=0), _object),
    "generator": (torch.Generator, _draw),
    "of Python": (lambda: random.Random(1), _draw_in_python),
    "of NumPy": (lambda: numpy.random.default_rng(1), _draw_in_python),
    "of old NumPy": (lambda: numpy.random.RandomState(1), lambda each: each.value.rand()),
    "a new one": (lambda: 0, _new),
}


def _numbers(module: nn.Module) -> Any:
    """What can be compared of a module, and of generators what they draw next."""
    value: Any = module.value
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return str(value.get_state(legacy=False))
    shown = vars(value) if isinstance(value, (_Record, types.SimpleNamespace)) else value
    return repr(shown), getattr(module, "other", None)


def _module(kind: str) -> tuple[nn.Module, Callable[[Any], None]]:
    build, change = CASES[kind]
    module = nn.Linear(2, 2)
    module.value = build()
    return module, change


@pytest.mark.parametrize("kind", CASES)
def test_a_call_is_undone(kind: str) -> None:
    module, change = _module(kind)
    change(module)
    value = module.value
    expected = _numbers(module)
    before = KeptValues([module])
    change(module)
    assert _numbers(module) != expected
    before.undo()
    assert _numbers(module) == expected
    if kind != "number":
        assert module.value is value


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "in a tuple"])
def test_a_call_is_repeated_from_earlier_values_as_often_as_needed(kind: str) -> None:
    module, change = _module(kind)
    before = KeptValues([module])
    change(module)
    after = _numbers(module)
    changes = before.changed()
    for _ in range(2):
        now = changes.exchange()
        assert _numbers(module) != after
        change(module)
        assert _numbers(module) == after or kind == "undeclared"  # which draws other examples
        now.exchange()
        assert _numbers(module) == after


def test_nothing_has_changed_where_nothing_was_called() -> None:
    for kind in CASES:
        module, _ = _module(kind)
        changes = KeptValues([module]).changed()
        assert [*changes.holders, *changes.others, *changes.generators] == [], kind


COUNTED = sorted(CASES.keys() - {"generator", "of Python", "of NumPy", "of old NumPy"})


@pytest.mark.parametrize("kind", COUNTED)
def test_what_differs_is_named_by_its_attribute(kind: str) -> None:
    module, change = _module(kind)
    model = nn.Sequential(nn.Linear(2, 2), module)
    before = numbers_kept(model)
    assert first_difference(before, numbers_kept(model)) is None
    change(module)
    expected = "1.other" if kind == "a new one" else "1.value"
    assert first_difference(before, numbers_kept(model)) == expected


def test_what_cannot_be_compared_is_left_as_it_is() -> None:
    module: Any = nn.Linear(2, 2)
    module.adjacency = torch.eye(2).to_sparse()
    module.entropy = random.SystemRandom()
    with torch.inference_mode():
        module.table = torch.ones(2)
    before = KeptValues([module])
    numbers = numbers_kept(module)
    module.calls = 1
    before.undo()
    assert not hasattr(module, "calls")
    assert first_difference(numbers, numbers_kept(module)) is None


def test_what_a_wrapper_of_a_library_notes_is_not_undone() -> None:
    """Layouts replace `forward` by functions that count calls, and look like the model's own."""
    noted: list[int] = []
    names = {"__name__": "isthmus_datacenter.wrapper", "functools": functools, "noted": noted}
    source = """
def wrap(forward):
    calls = noted
    @functools.wraps(forward)
    def call(*args):
        calls.append(1)
        return forward(*args)
    return call
"""
    exec(source, names)
    module: Any = nn.Linear(2, 2)
    module.forward = names["wrap"](module.forward)  # type: ignore[operator]  # of the source
    before = KeptValues([module])
    module(torch.ones(2))
    before.undo()
    assert noted == [1]
