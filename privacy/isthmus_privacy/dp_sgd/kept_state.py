"""What a task's code keeps from one call to the next, so that a change of it is noticed.

A forward() that keeps a statistic of one example and uses it for another gives an example a share
of gradients that are not its own, which clipping does not bound, however they are computed. What is
kept is found from the task and the model: attributes of their objects, containers in them,
variables of enclosing functions, and global variables that the code names.

Not found is what is outside of Python's objects, and what libraries keep under private names: for
it, `isolation` and `reference` compare results.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import io
import itertools
import operator
import queue
import random
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task import Task

_WHOLE_ELEMENTS = 1 << 16
"""Tensors and arrays of at most so many elements are compared as a whole, others in a sample."""
_KEPT_BYTES = 1 << 16
"""Memory of an array up to which its bytes are kept, and not a checksum of them."""
_SUMMED_BYTES = 1 << 24
"""Memory of larger ones that is read as a whole in a close look, besides four times the model's."""
_COLUMNS = 1 << 12
"""Sums of a large tensor's bits: one for each place modulo this."""
_SAMPLED_ELEMENTS = 1 << 12
_LONGEST = 4096
"""Items up to which a container is compared as a whole; of longer ones, the ends and the length."""
_END_ITEMS = 64
_MOST_OBJECTS = 200_000
"""Objects that are looked at; a task whose data are as many objects of Python keeps its time."""
_FEW_ITEMS = 16
"""Items up to which a container is not taken for data, which are looked at last."""
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
    slice,
    range,
)
"""Types whose values are the same if they are equal."""
_HOLDERS = (
    types.SimpleNamespace,
    threading.local,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    queue.Queue,
)
"""Classes of Python's library whose objects keep what they are given in attributes."""
_REFERRING = (
    types.GeneratorType,
    types.MappingProxyType,
    type(functools.lru_cache(len)),
    queue.SimpleQueue,
    map,
    filter,
    zip,
    enumerate,
)
"""Classes of C whose objects tell the collector alone what they keep."""
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
"""Values in a library's namespace that are no data; some packages import them at first use."""
_MISSING = object()

_Items = list[tuple[object, object]]
"""What an object refers to, with the name of each."""


class _Shallow(list[tuple[object, object]]):
    """Items that are compared, and not looked into."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """An object and what it was at the time."""

    path: str
    read: Callable[[], object]
    before: object


@dataclasses.dataclass(frozen=True)
class _SeenTensor:
    """A tensor and what it was at the time."""

    path: str
    tensor: torch.Tensor
    facts: tuple[object, ...]
    sample: torch.Tensor | None
    """See `_sample`; None if only the facts are compared."""
    whole: bool


class KeptState:
    """What the code of a task can keep, as it was at one time."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        *,
        closely: bool,
        parameters: bool = True,
        operations: bool = True,
    ) -> None:
        """Note the state.

        Args:
            task: whose code is called.
            model: that is trained.
            closely: whether to look at what takes longer: the values of the trained parameters and
                of other large tensors, long containers, and what objects and modules of libraries
                have been given. Otherwise only whether operations have changed parameters.
            parameters: False leaves the trained parameters out, where somebody else replaces them
                between calls.
            operations: whether an operation in place counts that leaves all values as they were.

        Raises:
            TaskError: a tensor of `torch.func.vmap` was left in it.
        """
        self._closely = closely
        self._with_parameters = parameters
        self._operations = operations
        self._parameters = {id(each) for each in model.parameters()}
        memory = sum(each.numel() * each.element_size() for each in model.parameters())
        self._summed_bytes = _SUMMED_BYTES + 4 * memory
        """What may still be read as a whole: a task may hold all of its data."""
        self._seen: list[_Seen] = []
        self._tensors: list[_SeenTensor] = []
        self._namespaces: set[int] = set()
        self._own = _library(type(task))
        self._walk([("model", model), ("task", task)])

    def check(self) -> None:
        """Refuse what has changed since.

        Raises:
            TaskError: with the place.
        """
        place = self.changed()
        if place is not None:
            raise _changed(place)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Where results are refused, name what has changed, if anything has: it is why."""
        try:
            yield
        except TaskError as error:
            if error.__cause__ is None:  # not what the task's own code has raised
                self.check()
            raise

    def changed(self) -> str | None:
        """The place of something that has changed since; None if nothing has."""
        for seen in self._seen:
            place = _difference(seen.before, seen.read())
            if place is not None:
                return seen.path + place
        compared = []
        for each in self._tensors:
            if _facts(each.tensor, self._operations) != each.facts:
                return each.path
            if each.sample is not None:
                now = _sample(each.tensor, whole=each.whole)
                compared.append((each.path, _equal(each.sample, now)))
        # One at the end: a comparison waits for an accelerator.
        for (path, _), same in zip(compared, _gathered(compared), strict=True):
            if not bool(same):
                return path
        return None

    # -- walk -----------------------------------------------------------------------------------

    def _walk(self, roots: list[tuple[str, object]]) -> None:
        visited: set[int] = set()
        for root in roots:
            self._walk_from(root, visited)

    def _walk_from(self, root: tuple[str, object], visited: set[int]) -> None:
        """Note what an object refers to; what may be data comes last, as there may be too much."""
        waiting = collections.deque([root])
        data: collections.deque[tuple[str, object]] = collections.deque()
        while (waiting or data) and len(visited) < _MOST_OBJECTS:
            path, found = waiting.popleft() if waiting else data.popleft()
            if isinstance(found, _PLAIN) or id(found) in visited:
                continue
            visited.add(id(found))
            if isinstance(found, torch.Tensor):
                self._note_tensor(path, found)
            for suffix, read in self._readers(found):
                items = read()
                self._seen.append(_Seen(path + suffix, read, items))
                if isinstance(items, list) and not isinstance(items, _Shallow):
                    holds = isinstance(found, dict | list | tuple | collections.deque)
                    later = data if holds and len(items) > _FEW_ITEMS else waiting
                    later.extend((path + suffix + _step(key), each) for key, each in items)

    def _note_tensor(self, path: str, tensor: torch.Tensor) -> None:
        if is_wrapped(tensor):
            raise _left(path)
        whole = False
        sample = None
        trained = id(tensor) in self._parameters
        if trained and not self._with_parameters:
            return
        if self._closely or not trained:
            whole = self._reads_whole(tensor)
            sample = _sample(tensor, whole=whole).clone()
        facts = _facts(tensor, self._operations)
        self._tensors.append(_SeenTensor(path, tensor, facts, sample, whole))

    def _reads_whole(self, values: Any) -> bool:
        """Whether all elements of a tensor or an array are read, however many it has."""
        size = values.nbytes
        if not self._closely or size > self._summed_bytes:
            return False
        self._summed_bytes -= size
        return True

    def _readers(self, found: object) -> Iterator[tuple[str, Callable[[], object]]]:
        """What an object can keep: names for the path, and how to read it."""
        if isinstance(found, torch.Tensor):
            yield "", lambda: _entries(vars(found))
            yield (
                "",
                lambda: [
                    ("hooks", found._backward_hooks),
                    ("hooks", found._post_accumulate_grad_hooks),
                ],
            )
            if id(found) not in self._parameters and found.is_leaf:
                yield "", lambda: [("grad", found.grad)]
        elif isinstance(found, nn.Module):
            yield "", functools.partial(self._module_entries, found)
        elif isinstance(found, dict | list | tuple | collections.deque | set | frozenset):
            yield from self._of_container(found)
        elif isinstance(found, types.FunctionType):
            if self._is_own(found.__module__):
                yield from _of_function(found)
                if self._closely:
                    yield from self._of_namespaces(found)
        elif isinstance(found, types.MethodType):
            yield "", lambda: [("", found.__self__), ("", found.__func__)]
        elif isinstance(found, types.CellType):
            yield "", lambda: [("", _contents(found))]
        elif isinstance(found, functools.partial):
            yield "", lambda: [("", found.func), ("", found.args), ("", found.keywords)]
        elif isinstance(found, staticmethod | classmethod):
            yield "", lambda: [("", found.__func__)]
        elif isinstance(found, types.BuiltinMethodType | types.MethodWrapperType):
            # Such as the get() of a dictionary.
            if not isinstance(found.__self__, types.ModuleType):
                yield "", lambda: [("", found.__self__)]
        elif isinstance(found, property):
            yield "", lambda: [("", found.fget), ("", found.fset)]
        elif isinstance(found, functools.cached_property):
            yield "", lambda: [("", found.func)]
        elif isinstance(found, type):
            if self._is_own(found.__module__):
                yield (
                    "",
                    lambda: [*_class_entries(found), *(("", each) for each in found.__bases__)],
                )
            elif self._closely:
                yield from self._of_namespace(vars(found))
        elif isinstance(found, types.ModuleType):
            if self._closely:
                yield from self._of_namespace(vars(found))
        elif (read := self._opaque(found)) is not None:
            yield "", read
        elif isinstance(found, _HOLDERS) or self._is_own(type(found).__module__):
            yield from _of_object(found)
        elif self._closely and hasattr(found, "__dict__"):
            yield "", functools.partial(_given, found)

    def _of_container(self, found: Any) -> Iterator[tuple[str, Callable[[], object]]]:
        # All items only where values are compared: it takes time in proportion to their number.
        longest = _MOST_OBJECTS if self._closely else _LONGEST
        if isinstance(found, dict):
            yield "", functools.partial(_entries, found, longest)
            if isinstance(found, collections.defaultdict):
                yield "", lambda: [("", found.default_factory)]
        elif isinstance(found, set | frozenset):
            yield "", lambda: frozenset(map(id, found)) if len(found) <= longest else len(found)
        else:
            yield "", functools.partial(_elements, found, longest)
        if self._is_own(type(found).__module__):  # a class of the task, with attributes besides
            yield from _of_object(found)

    def _of_namespaces(
        self, function: types.FunctionType
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """All global variables where a function is, and of the modules that it imports itself."""
        yield from self._of_namespace(function.__globals__)
        package = function.__globals__.get("__package__") or ""
        for name in _names(function.__code__):
            module = _module(name, function.__globals__, package)
            if isinstance(module, types.ModuleType):
                yield from self._of_namespace(vars(module))

    def _of_namespace(
        self, variables: Mapping[str, Any]
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """The data among some variables; functions of one module have the same."""
        if id(variables) not in self._namespaces:
            self._namespaces.add(id(variables))
            yield "", functools.partial(_data_entries, variables)

    def _opaque(self, found: object) -> Callable[[], object] | None:
        """How to read an object whose state is no object of Python; None for others."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(found, numpy.ndarray) or found.dtype.hasobject:
            return _opaque(found)
        size = found.size
        whole = size <= _WHOLE_ELEMENTS or (found.flags.writeable and self._reads_whole(found))
        return functools.partial(_array, found, whole=whole)

    def _module_entries(self, module: nn.Module) -> _Items:
        hidden = () if self._with_parameters else ("_parameters",)
        elsewhere = ("_state_dict", "_load_state_dict")  # hooks that no call of the model runs
        entries: _Items = []
        hooks = 0
        for name, each in vars(module).items():
            if name.startswith(elsewhere):
                continue
            # Recurrent layers list their parameters anew when `torch.func` replaces these.
            if isinstance(module, nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs"):
                continue
            if name.endswith("_hooks"):
                hooks += len(each)
                if not each:  # most of what a module has
                    continue
            if name not in hidden:
                entries.append((name, each))
        return [*entries, ("hooks", hooks), ("", type(module))]

    def _is_own(self, module: str | None) -> bool:
        """Whether code of a module is the task's and not that of a library."""
        if module is None or not _is_library(module):
            return True
        return module.partition(".")[0] == self._own


class ModelTensors(KeptState):
    """The parameters and buffers of a model, as they were at one time, and nothing else of a task.

    Reading examples must leave them as they are, and may change what the task keeps besides.
    """

    def _walk(self, roots: list[tuple[str, object]]) -> None:
        model = dict(roots)["model"]
        assert isinstance(model, nn.Module)

        def tensors() -> _Items:
            return [*model.named_parameters(), *model.named_buffers()]

        found = tensors()
        self._seen.append(_Seen("model", tensors, found))
        for name, each in found:
            assert isinstance(each, torch.Tensor)
            self._note_tensor(f"model.{name}", each)


def is_wrapped(value: object) -> bool:
    """Whether a value is a tensor that only exists inside of `torch.func`."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    )


# -- what objects keep ----------------------------------------------------------------------------


def _of_object(found: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    if hasattr(found, "__dict__"):
        yield "", lambda: _entries(vars(found))
    kind: Any = type(found)
    if slots := _slots(kind):
        yield "", lambda: [(name, getattr(found, name, _MISSING)) for name in slots]
    yield "", lambda: [("", type(found)), ("", getattr(found, "__wrapped__", None))]


def _given(found: Any) -> _Items:
    """Attributes of a library's object, but for private ones and what it computes only once.

    Those of Python and PyTorch are compared only: what they refer to is often their own.
    """
    kind: Any = type(found)
    once = _computed_once(kind)
    entries = [
        (name, each)
        for name, each in vars(found).items()
        if not str(name).startswith("_") and name not in once
    ]
    return _Shallow(entries) if _is_standard(kind.__module__) else entries


@functools.lru_cache(maxsize=4096)
def _computed_once(kind: type) -> frozenset[str]:
    """Names of properties that objects of a class compute at their first use."""
    return frozenset(
        name
        for base in kind.__mro__
        for name, each in vars(base).items()
        if type(each).__name__ in ("cached_property", "lazy_property")
    )


def _data_entries(variables: Mapping[str, Any]) -> _Items:
    """The variables of a module or class of a library, but for private ones and code."""
    return _Shallow(
        (name, each)
        for name, each in list(variables.items())
        if not name.startswith("_") and not isinstance(each, _CODE)
    )


def _referents(found: object) -> _Items:
    """What an object refers to, in an order that does not depend on how it was used."""
    hidden = (type, types.ModuleType, types.CodeType)
    kept = [each for each in gc.get_referents(found) if not isinstance(each, hidden)]
    return [("", each) for each in sorted(kept, key=id)]


def _entries(found: Mapping[Any, Any], longest: int = _LONGEST) -> _Items:
    if len(found) <= longest:
        return list(found.items())
    keys = list(itertools.islice(found, _END_ITEMS))
    last = list(itertools.islice(reversed(found), _END_ITEMS))
    return [(key, found[key]) for key in [*keys, *last]] + [("length", len(found))]


def _elements(
    found: list[Any] | tuple[Any, ...] | collections.deque[Any], longest: int = _LONGEST
) -> _Items:
    count = len(found)
    if count <= longest:
        return list(enumerate(found))
    places = [*range(_END_ITEMS), *range(count - _END_ITEMS, count)]
    return [(index, found[index]) for index in places] + [("length", count)]


def _class_entries(found: type) -> _Items:
    hidden = ("__dict__", "__weakref__", "__doc__", "__module__")
    return [(name, each) for name, each in vars(found).items() if name not in hidden]


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], object]]]:
    if function.__closure__:
        names = function.__code__.co_freevars
        cells = function.__closure__
        yield "", lambda: list(zip(names, cells, strict=True))
    if function.__defaults__ or function.__kwdefaults__:
        yield "", lambda: [("", function.__defaults__), ("", function.__kwdefaults__)]
    yield "", lambda: _entries(function.__dict__)
    named = _names(function.__code__)
    variables = function.__globals__
    yield (
        "",
        lambda: [
            (name, variables[name]) for name in named if name in variables and not _is_special(name)
        ],
    )
    package = variables.get("__package__") or ""
    modules = [
        each
        for name in named
        if isinstance(each := _module(name, variables, package), types.ModuleType)
        and not _is_library(each.__name__)
    ]
    for module in modules:
        yield "", functools.partial(_named_entries, vars(module), named)


def _module(name: str, variables: Mapping[str, Any], package: str) -> object:
    """The module that a function's code means by a name, also if it imports it itself."""
    if name in variables:
        return variables[name]
    return sys.modules.get(name) or sys.modules.get(f"{package}.{name}")


def _named_entries(variables: Mapping[str, Any], names: tuple[str, ...]) -> _Items:
    return [(name, variables[name]) for name in names if name in variables]


def _is_special(name: str) -> bool:
    """Names that the interpreter itself sets in modules."""
    return name.startswith("__") and name.endswith("__")


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of global variables and attributes that a function's code uses."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *itertools.chain(*inner)]))


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    slots = [each.__dict__.get("__slots__", ()) for each in kind.__mro__]
    names = [(each,) if isinstance(each, str) else tuple(each) for each in slots]
    return tuple(name for each in names for name in each if name not in ("__dict__", "__weakref__"))


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _opaque(found: object) -> Callable[[], object] | None:
    """How to read an object whose state is no object of Python; None for others."""
    if isinstance(found, torch.Generator):
        return lambda: bytes(found.get_state().numpy())
    if isinstance(found, random.Random):
        return found.getstate
    if isinstance(found, bytearray | array.array | ctypes.Array):
        return lambda: zlib.crc32(found)
    if isinstance(found, io.BytesIO):
        return lambda: zlib.crc32(found.getbuffer())
    if isinstance(found, itertools.count):
        return lambda: repr(found)
    if isinstance(found, weakref.ref):
        return lambda: [("", found())]
    if isinstance(found, ContextVar):
        return lambda: [("", found.get(None))]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(found, numpy.ndarray):  # of objects
            return lambda: _elements(found.ravel().tolist())
        if isinstance(found, numpy.random.Generator):
            return lambda: repr(found.bit_generator.state)
        if isinstance(found, numpy.random.RandomState):
            return lambda: repr(found.get_state())
    if isinstance(found, collections.abc.Iterator) and hasattr(found, "__length_hint__"):
        return lambda: operator.length_hint(found)
    kind = type(found)
    inner = (kind.__module__, kind.__name__) == ("functools", "_lru_list_elem")
    if inner or kind.__module__ == "itertools" or isinstance(found, _REFERRING):
        return functools.partial(_referents, found)
    return None


def _array(numbers: Any, *, whole: bool) -> tuple[object, ...]:
    flat = numbers.reshape(-1)
    if not whole:
        flat = flat[:: numbers.size // _SAMPLED_ELEMENTS]
    if flat.nbytes <= _KEPT_BYTES:
        return numbers.shape, numbers.dtype.str, flat.tobytes()
    return numbers.shape, numbers.dtype.str, zlib.crc32(flat.tobytes())


@functools.lru_cache(maxsize=4096)
def _is_library(module: str) -> bool:
    """Whether a module is Python's, PyTorch's, Isthmus' or installed."""
    name = module.partition(".")[0]
    if _is_standard(module):
        return True
    if name == "isthmus" or (name.startswith("isthmus_") and not name.startswith("isthmus_task_")):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_standard(module: str) -> bool:
    """Whether a module is Python's or PyTorch's."""
    name = module.partition(".")[0]
    return name in sys.stdlib_module_names or name == "torch"


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


# -- comparisons ----------------------------------------------------------------------------------


def _facts(tensor: torch.Tensor, operations: bool) -> tuple[object, ...]:
    """What another memory, or with `operations` one in place, changes."""
    if is_wrapped(tensor):
        return ("wrapped",)
    version = tensor._version if operations and not tensor.is_inference() else 0
    # What is not trained any more gets no noise.
    trains = tensor.requires_grad
    return version, trains, _address(tensor), tuple(tensor.shape), tensor.dtype, tensor.device


def _address(tensor: torch.Tensor) -> int:
    # Tensors that are divided among ranks, sparse and fake ones have none of their own.
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return tensor.data_ptr() if plain and tensor.layout == torch.strided else 0


def _sample(tensor: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """The elements of a tensor; of a large one some, or if `whole` sums of all."""
    tensor = tensor.detach()
    local = getattr(tensor, "_local_tensor", tensor)
    if local.layout != torch.strided or local.is_meta:
        return torch.zeros(0)
    if local.numel() <= _WHOLE_ELEMENTS:
        return local
    dense = local.permute(sorted(range(local.ndim), key=local.stride, reverse=True))
    if not dense.is_contiguous():
        return local.select(0, 0).reshape(-1)[:_SAMPLED_ELEMENTS]
    if not whole:
        return dense.view(-1)[:: local.numel() // _SAMPLED_ELEMENTS]
    return _sums(dense.view(-1))


def _sums(numbers: torch.Tensor) -> torch.Tensor:
    """Sums (int64, modulo 2^64) of the bits of all numbers (N), by their place modulo `_COLUMNS`.

    They change with any single number, and if all are moved by less than a row.
    """
    octets = numbers.view(torch.uint8)
    if octets.storage_offset() % 8:  # a part of another tensor, which no larger type can view
        octets = octets.clone()
    rows = octets[: octets.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)]
    rest = octets[rows.numel() :]
    sums = rows.view(torch.int64).view(-1, _COLUMNS).sum(0)
    return torch.cat([sums, rest.to(torch.int64)])


def _equal(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of equal shape have equal bits, with any NaN equal to another."""
    if before.shape != after.shape:
        return torch.zeros((), dtype=torch.bool)
    same = before == after
    if before.is_floating_point() or before.is_complex():
        same |= (before != before) & (after != after)
    return same.all()


def _gathered(compared: list[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The results of comparisons on the processor, with one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, (_, same) in enumerate(compared):
        by_device.setdefault(same.device, []).append(index)
    results: list[torch.Tensor] = [torch.zeros(())] * len(compared)
    for indices in by_device.values():
        moved = torch.stack([compared[index][1] for index in indices]).cpu()
        for index, same in zip(indices, moved, strict=True):
            results[index] = same
    return results


def _difference(before: object, after: object) -> str | None:
    """Where two readings of one object differ: the end of the path; None if they do not."""
    if not isinstance(before, list) or not isinstance(after, list):
        return None if _same(before, after) else ""
    if len(before) != len(after):
        old = {repr(key) for key, _ in before}
        added = [key for key, _ in after if repr(key) not in old]
        return _step(added[0]) if added else ""
    for (key, old_value), (other, value) in zip(before, after, strict=True):
        if key is not other and key != other:
            return _step(other)
        if old_value is not value and not _same(old_value, value):
            return _step(key)
    return None


def _same(before: object, after: object) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and isinstance(after, tuple) and not isinstance(before, _PLAIN):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, types.MethodType) and isinstance(after, types.MethodType):
        return before.__self__ is after.__self__ and before.__func__ is after.__func__
    if isinstance(before, frozenset):
        return before == after
    return isinstance(before, _PLAIN) and (before == after or (before != before and after != after))


def _step(key: object) -> str:
    """One more step of a path, as one reads it in code."""
    if key == "":
        return ""
    if isinstance(key, str):
        return "" if key in ("_parameters", "_buffers", "_modules") else f".{key}"
    return f"[{key}]" if isinstance(key, int) else "[...]"


def _changed(path: str) -> TaskError:
    return TaskError(
        f"forward() or loss() changes {path!r}, so that one example could change the gradients of "
        "others, which differential privacy of examples does not bound; make it in model(), and "
        "compute what depends on an example anew for each"
    )


def _left(path: str) -> TaskError:
    return TaskError(
        f"forward() or loss() keeps a tensor of an example in {path!r}, and differential privacy "
        "of examples does not bound its share in the gradients of others; keep nothing"
    )
