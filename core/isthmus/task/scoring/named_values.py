"""What the code of a module names besides its attributes and arguments, and may collect values in.

These are containers in variables of its files, in attributes of objects that are such variables,
in context variables, and in what functions close over or have as defaults; of the module's methods,
its hooks, and functions that these name in turn. Code of Python, PyTorch and Isthmus is left out,
and that of installed packages which the module and those in it are not of: what a package that
writes logs keeps is its own.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import functools
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from isthmus.task.scoring.holders import (
    Variables,
    is_library,
    is_of_library,
    own_attributes,
)

_CONTAINERS = (
    list,
    dict,
    set,
    collections.deque,
    collections.defaultdict,
    collections.OrderedDict,
    collections.Counter,
)
"""Types of containers that are looked into."""
_READABLE = (Mapping, list, set, collections.deque)
"""Types of containers of which other classes may load what is read."""
_SPACES = (types.SimpleNamespace, threading.local)
"""Types of Python's own whose objects have attributes of others."""
_CALLED = frozenset({"__call__", "__init__", "__enter__", "__exit__", "forward"})
"""Methods that code calls without their names; the last one by `apply` of a function."""
_SITES = frozenset({"site-packages", "dist-packages"})
"""Folders of installations, of which an environment may use those of others."""


def named_by(root: nn.Module) -> list[Any]:
    """Containers, objects, functions and tensors that a module, those in it and their hooks name.

    What is in them, and what the functions close over, is for `KeptValues` to find.
    """
    code = _Code(list(root.modules()))
    for module in code.modules:
        own = vars(module).get("forward")  # one that took the place of the class's
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for function in (_static(type(module), "forward"), own, *hooks):
            code.add(function, type(module))
    for function in (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values()):
        code.add(function, type(function))
    return list(code.followed())


class _Code:
    """Follows what code names; each function is looked at once.

    Nothing is asked of objects but what they are: attributes are looked up where they are kept, as
    an object may load or make what it is asked for.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        """Packages of the `modules` are looked into also if they are installed."""
        self.modules = modules
        self._own = frozenset(map(id, modules))
        self._packages = frozenset(_package(type(module)) for module in modules)
        # With what they are of: else another thing may get the same identity.
        self._seen: dict[Any, Any] = {}
        self._names: set[str] = set()
        self._waiting: collections.deque[tuple[Any, type]] = collections.deque()

    def add(self, function: Any, owner: type) -> None:
        """Have a callable be followed; `owner` is the class whose methods it may call."""
        self._waiting.append((function, owner))

    def followed(self) -> Iterator[Any]:
        """What the code has and names that was added, and that which it calls."""
        looked_for: set[str] = set()
        while self._waiting:
            while self._waiting:
                yield from self._of_function(*self._waiting.popleft())
            names = frozenset(self._names - looked_for)
            looked_for |= names
            for module in self.modules if names else ():
                yield from self._of_module(module, names)

    def _is_new(self, *things: Any) -> bool:
        key = tuple(each if type(each) is frozenset else id(each) for each in things)
        if key in self._seen:
            return False
        self._seen[key] = things
        return True

    def _of_function(self, function: Any, owner: type) -> Iterator[Any]:
        kind = type(function)
        if id(function) in self._own or not self._is_new(function, owner):
            return
        if issubclass(kind, functools.partial):
            yield function
            self.add(function.func, owner)
        elif kind is types.MethodType:
            caller = function.__self__
            if id(caller) not in self._own:  # else its attributes are known
                yield function
            self.add(function.__func__, caller if issubclass(type(caller), type) else type(caller))
        elif kind is types.BuiltinMethodType:
            yield function  # such as the `append` of a list
        elif issubclass(kind, (staticmethod, classmethod)):
            self.add(function.__func__, owner)
        elif issubclass(kind, property):
            self.add(function.fget, owner)
        elif issubclass(kind, (functools.cached_property, functools.partialmethod)):
            self.add(function.func, owner)
        elif kind is types.FunctionType and not self._is_left_out(function):
            yield from self._of_own_function(function, owner)
        elif (inner := _static(function, "__wrapped__")) is not None:
            # As of `torch.no_grad` and `functools.cache`.
            self.add(inner, owner)
        elif not self._is_foreign(kind) and not issubclass(kind, (type, nn.Module)):
            yield from self._of_object(function, frozenset(self._names))

    def _of_own_function(self, function: types.FunctionType, owner: type) -> Iterator[Any]:
        yield function
        for inner in (*_variables_around(function), _static(function, "__wrapped__")):
            self.add(inner, owner)
        table = function.__globals__
        names = frozenset(_names(function.__code__))
        self._names |= names
        containers = {name for name in names if type(table.get(name)) in _CONTAINERS}
        assigned = frozenset(_assigned(function.__code__))
        yield Variables(table, names & (assigned | containers))
        for name in names - containers:
            variable = table.get(name, sys.modules.get(name))
            yield from self._of_variable(variable, names, owner)
        yield from self._of_table(owner, names)

    def _of_module(self, module: nn.Module, names: frozenset[str]) -> Iterator[Any]:
        """Methods that others call, and functions and objects in attributes, which are known."""
        kind = type(module)
        for base in kind.__mro__:
            yield from self._of_table(base, names, kind)
        own = vars(module)
        for name in names & own.keys():
            value = own[name]
            if type(value) in (types.FunctionType, types.MethodType, functools.partial):
                self.add(value, kind)
            elif not self._is_foreign(type(value)) and not issubclass(type(value), nn.Module):
                for base in type(value).__mro__:
                    yield from self._of_table(base, names | _CALLED, type(value))

    def _of_variable(self, value: Any, names: frozenset[str], owner: type) -> Iterator[Any]:
        """What a variable of a file or a class has in it for code with these names."""
        kind = type(value)
        if any(kind is each for each in _CONTAINERS) or issubclass(kind, torch.Tensor):
            yield value
        elif issubclass(kind, nn.Module):
            yield from value.buffers()
        elif kind is contextvars.ContextVar:
            yield value
        elif issubclass(kind, (types.ModuleType, type)):
            yield from self._of_table(value, names | _CALLED)
        elif kind not in _SPACES and self._is_foreign(kind):
            self.add(value, owner)
        elif not _is_readable(kind):
            yield from self._of_object(value, names)

    def _of_object(self, value: Any, names: frozenset[str]) -> Iterator[Any]:
        yield value
        kind = type(value)
        for base in kind.__mro__:
            yield from self._of_table(base, names | _CALLED, kind)

    def _of_table(
        self, value: Any, names: frozenset[str], owner: type | None = None
    ) -> Iterator[Any]:
        """What a file or a class has of these names."""
        is_class = issubclass(type(value), type)
        owner = owner or (value if is_class else type(value))
        if self._is_foreign(value) or not self._is_new(value, names, owner):
            return
        table = type.__dict__["__dict__"].__get__(value) if is_class else own_attributes(value)
        if table is None:
            return
        if is_class:
            methods = {name for name in names & table.keys() if _is_method(table[name])}
            yield Variables(value, names - methods)
        for name in names & table.keys():
            found = table[name]
            yield from self._of_variable(found, names, owner)
            self.add(found, owner)

    def _is_left_out(self, function: types.FunctionType) -> bool:
        return is_of_library(function) or self._is_foreign(function)

    def _is_foreign(self, value: Any) -> bool:
        """Whether a file, class or function is none of the task's, nor of a module's package."""
        package = _package(value)
        if package in sys.stdlib_module_names or is_library(package):
            return True
        return package not in self._packages and _is_installed(package)


def _static(value: Any, name: str) -> Any:
    """An attribute, of an object that is not asked for it."""
    if issubclass(type(value), type):
        tables = [type.__dict__["__dict__"].__get__(base) for base in value.__mro__]
    else:
        tables = [own_attributes(value) or {}, *map(vars, type(value).__mro__)]
    found = next((table[name] for table in tables if name in table), None)
    if type(found) is types.MemberDescriptorType:  # a slot
        with contextlib.suppress(AttributeError):
            return found.__get__(value)
        return None
    return found


def _is_readable(kind: type) -> bool:
    try:
        return issubclass(kind, _READABLE)
    except TypeError:  # a class without a hash
        return False


def _package(value: Any) -> str:
    """The package of a file, class or function."""
    kind = type(value)
    if kind is types.FunctionType:
        name = value.__globals__.get("__name__")
    elif issubclass(kind, type):
        name = type.__dict__["__module__"].__get__(value)
    else:
        name = (own_attributes(value) or {}).get("__name__")
    return str(name).partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether it is of an installation, and not a file of a user."""
    table = own_attributes(sys.modules.get(package)) or {}
    paths = [*(table.get("__path__") or ()), table.get("__file__") or ""]
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return any(
        not _SITES.isdisjoint(Path(str(each)).parts) or Path(str(each)).is_relative_to(folder)
        for each in paths
        for folder in folders
    )


def _is_method(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _variables_around(function: types.FunctionType) -> Iterator[Any]:
    """The values of the variables that a function closes over."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has none yet
            yield cell.cell_contents


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of variables and attributes in some code and in functions within it, also as text."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)
        elif isinstance(each, str):
            yield each


def _assigned(code: types.CodeType) -> Iterator[str]:
    """Names of the variables of its file that some code assigns to."""
    for each in dis.get_instructions(code):
        if each.opname == "STORE_GLOBAL":
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _assigned(inner)
