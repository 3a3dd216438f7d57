"""What the code of a module names besides its attributes and arguments, and may collect values in.

These are containers in variables of its files, in attributes of objects that are such variables,
in context variables, and in what functions close over or have as defaults; of the module's methods,
its hooks, and functions that these name in turn. Code of Python, PyTorch and Isthmus is left out.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Iterator, Mapping
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
    found: list[Any] = []
    seen: set[Any] = set()
    for module in root.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for function in (type(module).forward, *hooks):
            found += _of_code(function, type(module), seen)
    for function in (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values()):
        found += _of_code(function, type(function), seen)
    return found


def _of_code(function: Any, owner: type, seen: set[Any]) -> Iterator[Any]:
    """What a callable has and names; `owner` is the class whose methods it may call."""
    if isinstance(function, functools.partial):
        yield function
        yield from _of_code(function.func, owner, seen)
    elif isinstance(function, types.MethodType):
        yield function
        caller = function.__self__
        kind = caller if isinstance(caller, type) else type(caller)
        yield from _of_code(function.__func__, kind, seen)
    elif isinstance(function, types.BuiltinMethodType):
        yield function  # such as the `append` of a list
    elif isinstance(function, (staticmethod, classmethod)):
        yield from _of_code(function.__func__, owner, seen)
    elif isinstance(function, property):
        yield from _of_code(function.fget, owner, seen)
    elif isinstance(function, types.FunctionType) and not _is_left_out(function):
        if (function, owner) in seen:
            return
        seen.add((function, owner))
        yield function
        for inner in (*_variables_around(function), getattr(function, "__wrapped__", None)):
            yield from _of_code(inner, owner, seen)
        table = function.__globals__
        names = frozenset(_names(function.__code__))
        yield Variables(table, names & frozenset(_assigned(function.__code__)))
        for name in names:
            variable = table.get(name, sys.modules.get(name))
            yield from _of_variable(variable, names, owner, seen)
        yield from _of_table(owner, owner.__module__, names, seen)
    elif (inner := getattr(function, "__wrapped__", None)) is not None:
        # As of `torch.no_grad` and `functools.cache`.
        yield from _of_code(inner, owner, seen)


def _of_variable(value: Any, names: frozenset[str], owner: type, seen: set[Any]) -> Iterator[Any]:
    """What a variable of a file has in it for code with these names."""
    kind = type(value)
    if kind in _CONTAINERS or isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.buffers()
    elif isinstance(value, contextvars.ContextVar):
        yield value.get(None)
    elif isinstance(value, types.ModuleType):
        yield from _of_table(value, value.__name__, names, seen)
    elif isinstance(value, type):
        yield from _of_table(value, value.__module__, names, seen)
    elif isinstance(value, _SPACES) or not _is_foreign(kind.__module__):
        if not isinstance(value, _READABLE):
            yield value
            yield from _of_table(kind, kind.__module__, names, seen)
            for each in getattr(value, "__dict__", {}).values():
                if isinstance(each, contextvars.ContextVar):
                    yield each.get(None)
    else:
        yield from _of_code(value, owner, seen)


def _of_table(
    value: types.ModuleType | type, file: str, names: frozenset[str], seen: set[Any]
) -> Iterator[Any]:
    """What a file or a class has of these names, unless it is of a library."""
    if _is_foreign(file) or (value, names) in seen:
        return
    seen.add((value, names))
    owner = value if isinstance(value, type) else type(value)
    if isinstance(value, type):
        methods = {name for name in names & vars(value).keys() if _is_method(vars(value)[name])}
        yield Variables(value, names - methods)
    for name in names:
        found = inspect.getattr_static(value, name, None)
        yield from _of_variable(found, names, owner, seen)
        yield from _of_code(found, owner, seen)


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


def _is_left_out(function: types.FunctionType) -> bool:
    return is_of_library(function) or _is_foreign(function.__globals__.get("__name__"))


def _is_foreign(name: object) -> bool:
    """Whether a file is one of Python's own, of PyTorch or of Isthmus; no file of a task is."""
    return str(name).partition(".")[0] in sys.stdlib_module_names or is_library(name)
