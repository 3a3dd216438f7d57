"""What modules keep in attributes from one call to the next, so that a call can be undone.

These are numbers, tensors that are neither parameters nor buffers, lists, tables, arrays,
generators of random numbers, and what objects of other classes have of them (`holders`). Buffers
are not among them: callers find these by name.

>>> module = nn.Identity()
>>> module.calls = 1
>>> before = KeptValues([module])
>>> module.calls += 1
>>> before.undo()
>>> module.calls
1
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from isthmus.task.scoring.holders import (
    PLAIN,
    Content,
    Search,
    attributes_of,
    copied,
    fill,
    identity_of,
    is_array,
    is_same,
    items_of,
    place_of,
)


class KeptValues:
    """The values that some modules keep, or other things have, as they are now."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        values: Iterable[Any] = (),
        given: Iterable[Any] = (),
        named: Iterable[Any] = (),
    ) -> None:
        """Note them.

        Args:
            modules: of which attributes are noted.
            values: containers, objects and tensors that are noted, too.
            given: containers and objects that are, without their tensors, which are large.
            named: as `given`; what code names, see `named_by`.
        """
        self._holders: list[tuple[Any, Content]] = []
        self._tensors: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._generators: list[tuple[Any, Any]] = []
        search = Search(self._note)
        self._add(search.of_modules(modules))
        search.note = self._note_with_parameters
        self._add(search.of_values(values))
        search.note = self._note_generator
        self._add(search.of_values(given))
        self._iterators = [(each, place_of(each)) for each in search.iterators]
        unknown = search.unknown
        self._add(search.of_named(named))
        self.unknown = unknown
        """What was found that cannot be put back, nor seen to change; empty for nothing."""

    def _add(self, holders: Iterable[Any]) -> None:
        for holder in holders:
            self._holders.append((holder, copied(holder)))

    def _note(self, value: Any) -> None:
        if not isinstance(value, nn.Parameter):
            self._note_with_parameters(value)

    def _note_with_parameters(self, value: Any) -> None:
        # One that was made in inference mode cannot change, and has no version.
        if not isinstance(value, torch.Tensor):
            self._note_generator(value)
        elif _is_ordinary(value) and not value.is_meta and not value.is_inference():
            self._tensors[id(value)] = value, value._version, _values(value)

    def _note_generator(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
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
            if not is_same(copied(holder), before)
            or any(id(each) in others for each in items_of(before))
        ]
        generators = [
            (generator, before)
            for generator, before in self._generators
            if not _are_equal(_state(generator), before)
        ]
        return Changes(holders, others, generators)

    def changed_through(self, named: Iterable[Any]) -> list[Any]:
        """Named values by which something is found that has changed."""
        changed = {identity_of(holder) for holder, _ in self.changed().holders}
        return [
            each
            for each in named
            if changed and any(identity_of(found) in changed for found in Search().of_named([each]))
        ]

    def undo(self) -> None:
        """Give what has changed the values of before, also tensors that were changed in place."""
        changes = self.changed()
        with torch.no_grad():
            for key, values in changes.others.items():
                self._tensors[key][0].copy_(values)
        Changes(changes.holders, {}, changes.generators).exchange()

    @property
    def has_moved(self) -> bool:
        """Whether an iterator is at another place, which cannot be undone."""
        return any(place_of(each) != place for each, place in self._iterators)

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
        holders: list[tuple[Any, Content]],
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
            [(holder, copied(holder)) for holder, _ in self.holders],
            {},
            [(generator, _state(generator)) for generator, _ in self.generators],
        )
        # Copies, as the values are needed again if the backward pass is.
        others = {key: values.clone() for key, values in self.others.items()}
        for holder, before in self.holders:
            fill(holder, before, others)
        for generator, state in self.generators:
            _set_state(generator, state)
        return now


def numbers_kept(root: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that a module and those in it keep, and lengths, by attribute.

    Of an attribute that has several there is a list.
    """
    found: dict[str, list[Any]] = {}
    modules = list(root.modules())
    for name, module in root.named_modules():
        for attribute, value in attributes_of(module).items():
            place = f"{name}.{attribute}" if name else attribute
            numbers = found[place] = []

            def note(each: Any, numbers: list[Any] = numbers) -> None:
                if type(each) is torch.Tensor and _has_values(each):
                    numbers.append(_values(each))

            for holder in Search(note, modules).of_values([value]):
                content = copied(holder)
                if is_array(content):
                    numbers.append(memoryview(content).tobytes())
                items = list(items_of(content))
                numbers.append(len(items))
                numbers += [each for each in items if type(each) in PLAIN]
            if type(value) in PLAIN:
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


# -- tensors and generators -----------------------------------------------------------------------


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its own values: not one that is a part of another, or of a trace."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:
        return True
    plain = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain and not kind.__module__.startswith("torch.")


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
    if tensor.device.type != "cpu" or not tensor.is_floating_point() or not _has_values(tensor):
        return False
    with _disable_current_modes(), torch.no_grad():
        return not torch.equal(tensor.detach(), values) and not _are_equal(tensor.detach(), values)


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        if type(first) is not type(second) or first.shape != second.shape:
            return False
        if first.dtype is not second.dtype or first.device != second.device:
            return False
        if not _has_values(first):  # they are asked about as they have changed
            return False
        with _disable_current_modes():
            return bool(((first == second) | ((first != first) & (second != second))).all())
    return type(first) is type(second) and (
        repr(first) == repr(second) if isinstance(first, (float, complex)) else first == second
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
