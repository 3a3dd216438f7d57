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
import inspect
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

from isthmus.task.scoring.holders import Variables, is_library, is_of_library

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


def named_by(root: nn.Module) -> list[Any]:
    """Containers, objects, functions and tensors that a module, those in it and their hooks name.

    What is in them, and what the functions close over, is for `KeptValues` to find.
    """
    code = _Code(frozenset(_package(type(module).__module__) for module in root.modules()))
    found: list[Any] = []
    for module in root.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for function in (type(module).forward, *hooks):
            found += code.of_function(function, type(module))
    for function in (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values()):
        found += code.of_function(function, type(function))
    return found


class _Code:
    """Follows what code names; each function is looked at once."""

    def __init__(self, packages: frozenset[str]) -> None:
        """`packages` are looked into also if they are installed."""
        self._packages = packages
        self._seen: set[Any] = set()

    def of_function(self, function: Any, owner: type) -> Iterator[Any]:
        """What a callable has and names; `owner` is the class whose methods it may call."""
        if isinstance(function, functools.partial):
            yield function
            yield from self.of_function(function.func, owner)
        elif isinstance(function, types.MethodType):
            yield function
            caller = function.__self__
            kind = caller if isinstance(caller, type) else type(caller)
            yield from self.of_function(function.__func__, kind)
        elif isinstance(function, types.BuiltinMethodType):
            yield function  # such as the `append` of a list
        elif isinstance(function, (staticmethod, classmethod)):
            yield from self.of_function(function.__func__, owner)
        elif isinstance(function, property):
            yield from self.of_function(function.fget, owner)
        elif isinstance(function, types.FunctionType) and not self._is_left_out(function):
            yield from self._of_own_function(function, owner)
        elif (inner := getattr(function, "__wrapped__", None)) is not None:
            # As of `torch.no_grad` and `functools.cache`.
            yield from self.of_function(inner, owner)

    def _of_own_function(self, function: types.FunctionType, owner: type) -> Iterator[Any]:
        if (function, owner) in self._seen:
            return
        self._seen.add((function, owner))
        yield function
        for inner in (*_variables_around(function), getattr(function, "__wrapped__", None)):
            yield from self.of_function(inner, owner)
        table = function.__globals__
        names = frozenset(_names(function.__code__))
        yield Variables(table, names & frozenset(_assigned(function.__code__)))
        for name in names:
            variable = table.get(name, sys.modules.get(name))
            yield from self._of_variable(variable, names, owner)
        yield from self._of_table(owner, owner.__module__, names)

    def _of_variable(self, value: Any, names: frozenset[str], owner: type) -> Iterator[Any]:
        """What a variable of a file or a class has in it for code with these names."""
        kind = type(value)
        if kind in _CONTAINERS or isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.buffers()
        elif isinstance(value, contextvars.ContextVar):
            yield value.get(None)
        elif isinstance(value, types.ModuleType):
            yield from self._of_table(value, value.__name__, names)
        elif isinstance(value, type):
            yield from self._of_table(value, value.__module__, names)
        elif not isinstance(value, _SPACES) and self._is_foreign(kind.__module__):
            yield from self.of_function(value, owner)
        elif not isinstance(value, _READABLE):
            yield value
            yield from self._of_table(kind, kind.__module__, names)
            for each in getattr(value, "__dict__", {}).values():
                if isinstance(each, contextvars.ContextVar):
                    yield each.get(None)

    def _of_table(
        self, value: types.ModuleType | type, file: str, names: frozenset[str]
    ) -> Iterator[Any]:
        """What a file or a class has of these names."""
        if self._is_foreign(file) or (value, names) in self._seen:
            return
        self._seen.add((value, names))
        owner = value if isinstance(value, type) else type(value)
        if isinstance(value, type):
            methods = {name for name in names & vars(value).keys() if _is_method(vars(value)[name])}
            yield Variables(value, names - methods)
        for name in names:
            found = inspect.getattr_static(value, name, None)
            yield from self._of_variable(found, names, owner)
            yield from self.of_function(found, owner)

    def _is_left_out(self, function: types.FunctionType) -> bool:
        name = function.__globals__.get("__name__")
        return is_of_library(function) or self._is_foreign(str(name))

    def _is_foreign(self, name: str) -> bool:
        """Whether a file is none of the task's, nor of a package of the module's classes."""
        package = _package(name)
        if package in sys.stdlib_module_names or is_library(name):
            return True
        return package not in self._packages and _is_installed(package)


def _package(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether it is of an installation, and not a file of a user."""
    paths = [*getattr(sys.modules.get(package), "__path__", ())]
    paths.append(getattr(sys.modules.get(package), "__file__", None) or "")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return any(Path(each).is_relative_to(folder) for each in paths for folder in installed)


def _is_method(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


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
