"""What Python objects hold, found from some of them: so that it can be copied, and put back.

A *holder* is an object whose content changes in place: a dict, list, set or deque, an array, the
attributes or slots of an object, variables of a file or a class, or one that a function closes
over.

>>> losses = [0.5]
>>> (holder,) = Search().of_values([(losses.append,)])
>>> before = copied(holder)
>>> losses.append(0.25)
>>> is_same(copied(holder), before)
False
>>> fill(holder, before, {})
>>> losses
[0.5]
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import gc
import io
import itertools
import operator
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from isthmus.task.definition import Task

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module, where PyTorch keeps parameters, buffers, other modules and hooks."""
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
"""Types of values that never change."""
_PLAIN_IDS = frozenset(map(id, PLAIN))
"""Identities of these types: other classes may have no hash, as a look into `PLAIN` needs."""
_SKIPPED = (Task, type, types.ModuleType, io.IOBase)
_BETWEEN_THREADS = frozenset(
    {"threading", "queue", "_queue", "concurrent", "asyncio", "multiprocessing", "logging"}
)
"""Packages of Python whose objects other threads may change at any time, or wait for."""
_BUILTIN = frozenset({dict, list, set, frozenset, tuple, collections.deque, torch.Tensor})
"""Types whose objects have no attributes of their own."""
_LIBRARY = re.compile(r"(torch|isthmus(_(?!task_)\w+)?)(\.|$)")
"""Names of modules whose functions and slots keep nothing of a model; a task's file is loaded as
`isthmus_task_...`."""
_MOST = 100_000
"""Most values that are looked at besides the attributes of the modules themselves."""
_MOST_NAMED = 20_000
"""Most values that are looked at from what code only names, which may be all data."""
_LARGEST_NAMED = 1 << 26
"""Most bytes of an array that are copied of what code only names."""
_PARTS_TELL = (zip, map, filter, enumerate, itertools.chain, itertools.islice)
"""Iterators over others, which are at another place whenever these are."""
_HEAP_TYPE = 1 << 9
"""CPython's flag of a class that Python code has made."""

Content = Any
"""A copy of what a holder has, without copies of what is in it."""


class Slots:
    """The values of an object in the slots of its classes."""

    def __init__(self, owner: Any, names: tuple[Any, ...]) -> None:
        """`names` are the descriptors of the slots."""
        self.owner = owner
        self.names = names


class Variables:
    """Variables of a file or a class, by name."""

    def __init__(self, owner: dict[str, Any] | type, names: frozenset[str]) -> None:
        """`owner` has them, among others: the table of a file, or a class."""
        self._owner = owner
        self.names = names

    def now(self) -> dict[str, Any]:
        """The values of those that there are."""
        table = vars(self._owner) if isinstance(self._owner, type) else self._owner
        return {name: table[name] for name in self.names if name in table}

    def put(self, values: dict[str, Any]) -> None:
        """Have these values, and no other variables of these names."""
        now = self.now()
        for name in now.keys() - values.keys():
            if isinstance(self._owner, type):
                delattr(self._owner, name)
            else:
                del self._owner[name]
        for name, value in values.items():
            if name in now and now[name] is value:
                continue
            if isinstance(self._owner, type):
                setattr(self._owner, name, value)
            else:
                self._owner[name] = value


class Search:
    """Looks for holders in modules and other values; each is found once."""

    def __init__(
        self, note: Callable[[Any], None] = lambda each: None, known: Iterable[nn.Module] = ()
    ) -> None:
        """Prepare.

        Args:
            note: is called for each tensor and each generator of random numbers.
            known: modules that are not looked into where values have them.
        """
        self.note = note
        self._seen = set(map(id, known))
        self.most = _MOST
        """How many values are looked at."""
        self.largest = sys.maxsize
        """Most bytes of an array that is looked at."""
        self.iterators: list[Any] = []
        """Iterators, whose place can be read and not set."""
        self.unknown = ""
        """What was found that cannot be put back, or was not looked at; empty for nothing."""

    def of_modules(self, modules: Iterable[nn.Module]) -> Iterator[Any]:
        """Holders in modules, whose parameters, buffers and children callers know by name."""
        modules = list(modules)
        self._seen.update(map(id, modules))
        yield from modules
        yield from self.of_values(value for module in modules for value in _looked_into(module))

    def of_named(self, values: Iterable[Any]) -> Iterator[Any]:
        """Holders in what code names, of which there may be any amount: less is looked at."""
        self.most = len(self._seen) + _MOST_NAMED
        self.largest = _LARGEST_NAMED
        yield from self.of_values(values)

    def of_values(self, values: Iterable[Any]) -> Iterator[Any]:
        """Holders in values. Of modules that are among them all but the parameters."""
        waiting = collections.deque(values)
        while waiting:
            value = waiting.popleft()
            kind = type(value)
            if id(kind) in _PLAIN_IDS or id(value) in self._seen or _is_left_alone(kind):
                continue
            if is_of_library(value):
                continue
            if len(self._seen) >= self.most:
                self.unknown = self.unknown or f"more than {_MOST} values, too many to put back"
                return
            self._seen.add(id(value))
            if issubclass(kind, torch.Tensor) or is_generator(value):
                self.note(value)
                if kind is torch.Tensor:  # others may have attributes of their frameworks
                    yield value.__dict__
            elif issubclass(kind, nn.Module):
                yield from (value, value._buffers, value._parameters, value._modules)
                waiting.extend(_looked_into(value))
                waiting.extend(value._buffers.values())
                waiting.extend(value._modules.values())
            else:
                yield from self._of_value(value, waiting)

    def _of_value(self, value: Any, waiting: collections.deque[Any]) -> Iterator[Any]:
        kind = type(value)
        if issubclass(kind, (dict, list, set, collections.deque)):
            yield value
            content = copied(value)
            waiting.extend(_changeable(items_of(content)))
            waiting.extend(_changeable(content) if isinstance(content, dict) else ())
        elif issubclass(kind, (tuple, frozenset)):
            waiting.extend(_changeable(value))
        elif is_array(value):
            size = getattr(value, "nbytes", 0)
            if size <= self.largest and (not hasattr(value, "flags") or value.flags.writeable):
                yield value
                waiting.extend(value.flat if _has_objects(value) else ())
        elif kind is types.CellType:
            yield value
            waiting.extend(copied(value))
        elif kind is Variables:
            yield value
            waiting.extend(copied(value).values())
            return
        elif kind is contextvars.ContextVar:
            with contextlib.suppress(LookupError):  # it has no value here
                waiting.append(value.get())
            return
        elif (inner := _inner(value)) is not None:
            waiting.extend(inner)
        elif not str(kind.__module__).startswith("torch."):
            self._check(value, waiting)
        if kind not in _BUILTIN:
            yield from _of_object(value, waiting)

    def _check(self, value: Any, waiting: collections.deque[Any]) -> None:
        """Note an iterator of Python's own, or a generator: nothing can put it back."""
        if not hasattr(type(value), "__next__") or type(value) in weakref.ProxyTypes:
            return
        if own_attributes(value) is not None or _slots(value):  # of a class made by Python code
            return
        if issubclass(type(value), _PARTS_TELL):
            waiting.extend(gc.get_referents(value))
        elif place_of(value) is None:
            self.unknown = self.unknown or f"an iterator ({type(value).__name__})"
        else:
            self.iterators.append(value)


def place_of(iterator: Any) -> Any:
    """Where an iterator is; None where nothing tells it."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        known = {} if frame is None else {name: id(each) for name, each in frame.f_locals.items()}
        return (0 if frame is None else frame.f_lasti), known
    if isinstance(iterator, (itertools.count, itertools.repeat)):
        return repr(iterator)
    return operator.length_hint(iterator, -1) if hasattr(iterator, "__length_hint__") else None


def _looked_into(module: nn.Module) -> list[Any]:
    """Attributes without a `forward` that took the place of the class's.

    Layouts put functions there that note what they have compared.
    """
    return [value for name, value in attributes_of(module).items() if name != "forward"]


def is_library(name: object) -> bool:
    """Whether a module of this name is one of PyTorch's or Isthmus's.

    >>> is_library("torch.nn"), is_library("isthmus_clients"), is_library("isthmus_task_mine")
    (True, True, False)
    """
    return _LIBRARY.match(str(name)) is not None


@functools.lru_cache(maxsize=1024)
def _is_skipped(kind: type) -> bool:
    """Whether objects of a class are not looked into, as those that threads share."""
    bases = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return issubclass(kind, _SKIPPED) or not _BETWEEN_THREADS.isdisjoint(bases)


def _is_left_alone(kind: type) -> bool:
    if type(kind).__hash__ is None:  # not even a check for an abstract class would work
        return True
    return _is_skipped(kind)


def is_of_library(value: Any) -> bool:
    """Whether a callable is one of PyTorch's or Isthmus's: what these note is no model's."""
    # Not `isinstance`, which asks objects for a `__class__` that they may have to look for.
    kind = type(value)
    if issubclass(kind, functools.partial):
        return is_of_library(value.func)
    if kind is types.MethodType:
        return is_of_library(value.__func__) or is_of_library(type(value.__self__))
    if kind is types.FunctionType:
        # Not its `__module__`, which `functools.wraps` takes from the function that is wrapped.
        return is_library(value.__globals__.get("__name__"))
    return issubclass(kind, type) and is_library(value.__module__)


def _changeable(values: Iterable[Any]) -> Iterator[Any]:
    return (each for each in values if id(type(each)) not in _PLAIN_IDS)


def _inner(value: Any) -> Iterable[Any] | None:
    """What a value has that never changes itself; None for others."""
    kind = type(value)
    if kind in (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType):
        return [value.__self__]
    if issubclass(kind, functools.partial):
        return [value.func, value.args, value.keywords]
    if kind is types.MappingProxyType:
        return list(value.values())
    if kind is types.FunctionType:
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    return None


def _of_object(value: Any, waiting: collections.deque[Any]) -> Iterator[Any]:
    """The attributes and slots of an object."""
    if str(type(value).__module__).startswith("torch."):
        return
    own = own_attributes(value)
    if own is not None and any(map(_is_between_threads, own.values())):
        return
    if own is not None:
        yield own
        waiting.extend(_changeable(own.values()))
    if slots := _slots(value):
        holder = Slots(value, slots)
        yield holder
        waiting.extend(copied(holder).values())


def _is_between_threads(value: Any) -> bool:
    """Whether it is a queue, a thread or the like, for which an object has more than one thread."""
    kind = type(value)
    return id(kind) not in _PLAIN_IDS and any(
        str(base.__module__).partition(".")[0] in _BETWEEN_THREADS - {"logging"}
        for base in kind.__mro__
    )


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The table of an object's attributes; None if it has none, or one that code makes for it."""
    kind = type(value)
    if issubclass(kind, threading.local):
        of_thread: dict[str, Any] = value.__dict__
        return of_thread
    for base in kind.__mro__:
        found = vars(base).get("__dict__")
        if found is not None:
            is_real = type(found) in (types.GetSetDescriptorType, types.MemberDescriptorType)
            own = found.__get__(value) if is_real else None
            return own if type(own) is dict else None
    return None


def _slots(value: Any) -> tuple[Any, ...]:
    return _slots_of(type(value))  # type: ignore[arg-type]  # a class has a hash


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[Any, ...]:
    """The descriptors of the slots that a class and those it is made of have declared."""
    if is_library(kind.__module__):
        return ()
    return tuple(
        each
        for base in kind.__mro__
        if base.__flags__ & _HEAP_TYPE and "__slots__" in vars(base)
        for each in vars(base).values()
        if isinstance(each, types.MemberDescriptorType)
    )


# -- contents -------------------------------------------------------------------------------------


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that are not PyTorch's own."""
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def copied(holder: Any) -> Content:
    """A copy of what a holder has now."""
    if isinstance(holder, nn.Module):
        return attributes_of(holder)
    if isinstance(holder, Slots):
        found = {}
        for slot in holder.names:
            try:
                found[slot] = slot.__get__(holder.owner)
            except AttributeError:
                continue  # it has no value
        return found
    if isinstance(holder, Variables):
        return holder.now()
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:
            return []  # the variable has no value
    # Not by methods of a class of its own, which may load what is read.
    if isinstance(holder, collections.OrderedDict):
        return dict(collections.OrderedDict.items(holder))
    if isinstance(holder, dict):
        return dict(holder) if type(holder).__iter__ is dict.__iter__ else dict(dict.items(holder))
    if is_array(holder):
        return holder[:] if isinstance(holder, (bytearray, array.array)) else holder.copy()
    if isinstance(holder, set):
        return set(set.__iter__(holder))
    if isinstance(holder, list):
        return list.__getitem__(holder, slice(None))
    return list(collections.deque.__iter__(holder))


def identity_of(holder: Any) -> int:
    """What two searches have in common of a holder."""
    return id(holder.owner if isinstance(holder, Slots) else holder)


def items_of(content: Content) -> Iterable[Any]:
    """The values in a content; none of an array's, which are not objects."""
    if is_array(content):
        return ()
    return content.values() if isinstance(content, dict) else content


def is_same(first: Content, second: Content) -> bool:
    """Whether two copies have the same objects, or equal numbers."""
    if is_array(first):
        return _bytes(first) == _bytes(second)
    if len(first) != len(second):
        return False
    if isinstance(first, dict):
        # Their order counts, too: that of a cache decides what is removed next.
        return _are_same(first.keys(), second.keys()) and _are_same(first.values(), second.values())
    if isinstance(first, set):
        return {*map(id, first)} == {*map(id, second)}
    return _are_same(first, second)


def fill(holder: Any, content: Content, others: dict[int, torch.Tensor]) -> None:
    """Give a holder what it had, with other tensors in place of some, by their identity."""
    if is_array(holder):
        holder[... if hasattr(holder, "flags") else slice(None)] = content
        return
    if isinstance(content, dict):
        table = {key: others.get(id(value), value) for key, value in content.items()}
        _fill_table(holder, table)
        return
    items = [others.get(id(value), value) for value in content]
    # Not by the methods of its class, which may do something else.
    if isinstance(holder, types.CellType):
        del holder.cell_contents
        for item in items:
            holder.cell_contents = item
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, items)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(None), items)
    else:
        collections.deque.clear(holder)
        collections.deque.extend(holder, items)


def _fill_table(holder: Any, table: dict[Any, Any]) -> None:
    if isinstance(holder, nn.Module):
        own = vars(holder)
        for name in attributes_of(holder).keys() - table.keys():
            del own[name]
        own.update(table)
    elif isinstance(holder, Slots):
        for slot in holder.names:
            if slot in table:
                slot.__set__(holder.owner, table[slot])
            elif slot in copied(holder):
                slot.__delete__(holder.owner)
    elif isinstance(holder, Variables):
        holder.put(table)
    else:
        kind = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
        kind.clear(holder)
        kind.update(holder, table)


def _are_same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    first, second = list(first), list(second)
    return all(map(operator.is_, first, second)) or all(map(_is_one, first, second))


def _is_one(first: Any, second: Any) -> bool:
    return first is second or (
        id(type(first)) in _PLAIN_IDS and type(first) is type(second) and first == second
    )


# -- arrays and generators ------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether a value is numbers in memory that are not a tensor's."""
    kind = type(value)
    if issubclass(kind, (bytearray, array.array)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _has_objects(values: Any) -> bool:
    return hasattr(values, "dtype") and values.dtype.hasobject


def _bytes(values: Any) -> bytes:
    return bytes(values.tobytes()) if hasattr(values, "tobytes") else bytes(values)


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers that has a state."""
    kind = type(value)
    if issubclass(kind, (torch.Generator, random.Random)):
        return not issubclass(kind, random.SystemRandom)  # which has no state
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(
        kind, (numpy.random.Generator, numpy.random.RandomState)
    )
