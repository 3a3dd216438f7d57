"""What modules keep in attributes from one call to the next, so that a call can be undone.

These are numbers, tensors that are neither parameters nor buffers, lists, tables, generators of
random numbers, and what objects of other classes have of them. Buffers are not among them: callers
find these by name.

>>> module = nn.Identity()
>>> module.calls = 1
>>> before = KeptValues([module])
>>> module.calls += 1
>>> before.undo()
>>> module.calls
1
"""

from __future__ import annotations

import collections
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from isthmus.task.definition import Task

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module, where PyTorch keeps parameters, buffers, other modules and hooks."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_SKIPPED = (
    nn.Module,
    Task,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
_LONGEST = 4096
"""Items of the longest container that is looked into: longer ones are data."""
_MOST = 10_000
"""Most values that are looked at besides the attributes of the modules themselves."""

_Content = Any
"""A copy of a dict, list, set or deque, without copies of what it has."""


class KeptValues:
    """The values that some modules keep, or other things have, as they are now."""

    def __init__(self, modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> None:
        """Note them.

        Args:
            modules: of which attributes are noted.
            values: containers, objects and tensors that are noted, too.
        """
        self._holders: list[tuple[Any, _Content]] = []
        self._tensors: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._generators: list[tuple[Any, Any]] = []
        for holder in _holders(modules, self._note, values):
            self._holders.append((holder, _copy(holder)))

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # One that was made in inference mode cannot change, and has no version.
            if type(value) is torch.Tensor and _has_values(value) and not value.is_inference():
                self._tensors[id(value)] = value, value._version, _values(value)
        else:
            self._generators.append((value, _state(value)))

    def changed(self) -> Changes:
        """What has changed since, with the values of before."""
        others = {
            key: values
            for key, (tensor, version, values) in self._tensors.items()
            if _has_changed(tensor, version, values)
        }
        holders = [
            (holder, before)
            for holder, before in self._holders
            if not _is_same(_copy(holder), before)
            or any(id(each) in others for each in _items(before))
        ]
        generators = [
            (generator, before)
            for generator, before in self._generators
            if not _are_equal(_state(generator), before)
        ]
        return Changes(holders, others, generators)

    def undo(self) -> None:
        """Give what has changed the values of before, also tensors that were changed in place."""
        changes = self.changed()
        with torch.no_grad():
            for key, values in changes.others.items():
                self._tensors[key][0].copy_(values)
        Changes(changes.holders, {}, changes.generators).exchange()

    def undo_containers(self) -> bool:
        """Give what has changed the values of before, but no tensor that was changed in place.

        A backward pass may need such a tensor, and would refuse one that was written to.

        Returns:
            Whether tensors have other values than before.
        """
        changes = self.changed()
        Changes(changes.holders, {}, changes.generators).exchange()
        return not all(
            _are_equal(self._tensors[key][0].detach(), values)
            for key, values in changes.others.items()
        )


class Changes:
    """Earlier values of what has changed."""

    def __init__(
        self,
        holders: list[tuple[Any, _Content]],
        others: dict[int, torch.Tensor],
        generators: list[tuple[Any, Any]],
    ) -> None:
        """Take over what was noted.

        Args:
            holders: dicts, lists, sets and deques, with what they had.
            others: values of tensors that were changed in place, by the identity of the tensor.
            generators: generators of random numbers, with their states.
        """
        self.holders = holders
        self.others = others
        self.generators = generators

    def exchange(self) -> Changes:
        """Give everything its earlier value; returns those of now, to exchange them again.

        A tensor that was changed in place is replaced by another one: who has it keeps its values.
        """
        now = Changes(
            [(holder, _copy(holder)) for holder, _ in self.holders],
            {},
            [(generator, _state(generator)) for generator, _ in self.generators],
        )
        # Copies, as the values are needed again if the backward pass is.
        others = {key: values.clone() for key, values in self.others.items()}
        for holder, before in self.holders:
            _fill(holder, before, others)
        for generator, state in self.generators:
            _set_state(generator, state)
        return now


def numbers_kept(root: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that a module and those in it keep, and lengths, by attribute.

    Of an attribute that has several there is a list.
    """
    found: dict[str, list[Any]] = {}
    for name, module in root.named_modules():
        for attribute, value in _attributes(module).items():
            place = f"{name}.{attribute}" if name else attribute
            numbers = found[place] = []

            def note(each: Any, numbers: list[Any] = numbers) -> None:
                if type(each) is torch.Tensor and _has_values(each):
                    numbers.append(_values(each))

            for holder in _holders((), note, [value]):
                items = list(_items(holder))
                numbers.append(len(items))
                numbers += [each for each in items if type(each) in _PLAIN]
            if type(value) in _PLAIN:
                numbers.append(value)
    return found


def first_difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """The first attribute with other numbers in the second of what `numbers_kept` has found."""
    for name, numbers in second.items():
        before = first.get(name)
        if before is None or len(before) != len(numbers):
            return name
        if not all(map(_are_equal, before, numbers)):
            return name
    return None


# -- what modules have ----------------------------------------------------------------------------


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _holders(
    modules: Iterable[nn.Module], note: Callable[[Any], None], values: Iterable[Any] = ()
) -> Iterator[Any]:
    """Everything that holds values: modules, and containers and objects in their attributes.

    `note` is called for each tensor and each generator; `values` are looked into, too.
    """
    waiting = collections.deque(values)
    for module in modules:
        yield module
        waiting.extend(_attributes(module).values())
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        if type(value) in _PLAIN or isinstance(value, _SKIPPED) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) or _is_generator(value):
            note(value)
        elif isinstance(value, (dict, list, set, collections.deque)):
            if len(value) <= _LONGEST:
                yield value
                waiting.extend(_items(value))
        elif isinstance(value, (tuple, frozenset)):
            waiting.extend(value if len(value) <= _LONGEST else ())
        elif not type(value).__module__.startswith("torch."):
            own = getattr(value, "__dict__", None)
            if type(own) is dict and len(own) <= _LONGEST:
                yield own
                waiting.extend(own.values())


def _copy(holder: Any) -> _Content:
    if isinstance(holder, nn.Module):
        return _attributes(holder)
    if isinstance(holder, dict):
        return dict(holder)
    return set(holder) if isinstance(holder, set) else list(holder)


def _items(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _is_same(first: _Content, second: _Content) -> bool:
    """Whether two copies have the same objects, or equal numbers."""
    if len(first) != len(second):
        return False
    if isinstance(first, dict):
        return all(key in second and _is_one(value, second[key]) for key, value in first.items())
    if isinstance(first, set):
        return {*map(id, first)} == {*map(id, second)}
    return all(map(_is_one, first, second))


def _is_one(first: Any, second: Any) -> bool:
    return first is second or (
        type(first) in _PLAIN and type(first) is type(second) and first == second
    )


def _fill(holder: Any, content: _Content, others: dict[int, torch.Tensor]) -> None:
    """Give a holder what it had, with other tensors in place of some."""
    if isinstance(holder, nn.Module):
        table = vars(holder)
        for name in _attributes(holder).keys() - content.keys():
            del table[name]
        table.update({name: others.get(id(value), value) for name, value in content.items()})
        return
    if isinstance(holder, dict):
        holder.clear()
        holder.update({key: others.get(id(value), value) for key, value in content.items()})
        return
    items = [others.get(id(value), value) for value in content]
    holder.clear()
    if isinstance(holder, set):
        holder.update(items)
    else:
        holder.extend(items)


# -- tensors and generators -----------------------------------------------------------------------


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether values of a tensor can be compared: not of a sparse one."""
    return tensor.device.type != "meta" and tensor.layout is torch.strided


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that no mode sees, such as one that counts the operators of a call."""
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().clone()


def _has_changed(tensor: torch.Tensor, version: int, values: torch.Tensor) -> bool:
    """Whether a tensor has other values.

    Some operators do not declare what they change, such as batch_norm. On other devices than
    processors a comparison would wait for the device.
    """
    if tensor._version != version:
        return True
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False
    with _disable_current_modes(), torch.no_grad():
        return not torch.equal(tensor.detach(), values) and not _are_equal(tensor.detach(), values)


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        if type(first) is not type(second) or first.shape != second.shape:
            return False
        if first.dtype is not second.dtype or first.device != second.device:
            return False
        with _disable_current_modes():
            return bool(((first == second) | ((first != first) & (second != second))).all())
    return type(first) is type(second) and (
        repr(first) == repr(second) if isinstance(first, (float, complex)) else first == second
    )


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)  # which has no state
    arrays = sys.modules.get("numpy")
    return arrays is not None and isinstance(
        value, (arrays.random.Generator, arrays.random.RandomState)
    )


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _plain(_bits(generator).state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    """The source of bits of a generator of NumPy."""
    found = getattr(generator, "bit_generator", None)
    return generator._bit_generator if found is None else found


def _plain(state: Any) -> Any:
    """A state of NumPy, with arrays as tuples, so that it can be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return tuple(state.tolist()) if hasattr(state, "tolist") else state
