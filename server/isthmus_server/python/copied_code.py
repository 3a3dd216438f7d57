"""The part of a script or a notebook that a task needs, as the source of a file of its own.

Nothing is pickled: devices import source code that their owner can read. What the task refers to
goes along in one of three ways:

  * imports that have succeeded, functions, classes and constants, as they are written;
  * plain data, such as numbers, texts, lists of them and small tensors, with the value of now;
  * other names by the assignment that has made them, which each process executes again.

>>> source = '''
... import torch
... DEVICE = torch.device("cpu")
... steps = 0
... steps += 1
... class T:
...     def rate(self): return steps, DEVICE
... data = [print("not copied")]
... '''
>>> names = {"torch": torch, "DEVICE": torch.device("cpu"), "steps": 1, "T": object, "data": [None]}
>>> print(copied_code([source], names, "T", executed=True))
steps = 1
<BLANKLINE>
import torch
<BLANKLINE>
DEVICE = torch.device('cpu')
<BLANKLINE>
class T:
<BLANKLINE>
    def rate(self):
        return (steps, DEVICE)
<BLANKLINE>
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import math
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isthmus.errors import UserError

_MOST_CHARACTERS = 1 << 18
"""Longest data that are written into the file."""
_MOST_NUMBERS = 1 << 14
"""Elements of the largest tensor that is."""


@dataclasses.dataclass(frozen=True)
class _Statement:
    """A statement at the top of a script or of a cell."""

    node: ast.stmt
    binds: frozenset[str]
    """Names that it makes."""
    executes: frozenset[str]
    """Names that it refers to when it is executed, and not within functions."""
    refers: frozenset[str]
    """All names outside of it that it refers to."""

    @classmethod
    def of(cls, node: ast.stmt) -> _Statement:
        table = symtable.symtable(ast.unparse(node), "task", "exec")
        binds = {symbol.get_name() for symbol in table.get_symbols() if _is_bound(symbol)}
        executes = {each.get_name() for each in table.get_symbols() if each.is_referenced()}
        refers = set(executes)
        pending = [(each, True) for each in table.get_children()]
        while pending:
            block, at_once = pending.pop()
            at_once = at_once and block.get_type() == "class"
            found = {each.get_name() for each in block.get_symbols() if each.is_global()}
            refers |= found
            executes |= found if at_once else set()
            pending += [(each, at_once) for each in block.get_children()]
        return cls(node, frozenset(binds), frozenset(executes), frozenset(refers))

    @property
    def is_definition(self) -> bool:
        """Whether it is copied whether or not anything refers to it: it runs no code of the user.

        Except for decorators and classes' bodies.
        """
        match self.node:
            case ast.Import() | ast.ImportFrom() | ast.ClassDef() | ast.FunctionDef():
                return True
            case ast.AsyncFunctionDef():
                return True
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                return _is_constant(value)
        return False

    @property
    def is_import(self) -> bool:
        """Whether it only imports."""
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def is_assignment(self) -> bool:
        """Whether it gives names their values by itself, without loops and earlier values."""
        match self.node:
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                return not self.binds & self.refers
        return False


def copied_code(
    sources: Iterable[str], names: Mapping[str, Any], wanted: str, *, executed: bool
) -> str:
    """The source of what one name needs.

    Args:
        sources: a script, or the cells of a notebook in the order of their execution.
        names: the names of now, with their values.
        wanted: the name of the task.
        executed: whether the imports of the sources have succeeded, as in a script that runs; cells
            may have failed.

    Raises:
        UserError: something refers to a name that cannot be copied.
    """
    statements = [_Statement.of(node) for node in _nodes(sources)]
    if not executed:
        statements = [each for each in map(_succeeded, statements) if each is not None]
        statements = [each for each in statements if each.is_import or each.binds <= names.keys()]
    needed, data = _needed(statements, names, wanted)
    kept = _usable(statements, needed, data, names)
    parts = [f"{name} = {text}" for name, text in sorted(data.items())]
    return "\n\n".join([*parts, *(ast.unparse(each.node) for each in kept)]) + "\n"


def _nodes(sources: Iterable[str]) -> Iterator[ast.stmt]:
    """The statements; those of a cell that is not Python, and has failed, are left out."""
    for source in sources:
        try:
            yield from ast.parse(source).body
        except SyntaxError:
            continue


def _succeeded(statement: _Statement) -> _Statement | None:
    """An import without the modules that were not imported; None if nothing is left."""
    match statement.node:
        case ast.Import(names=aliases):
            left = [each for each in aliases if each.name in sys.modules]
            return _Statement.of(ast.Import(left)) if left else None
        case ast.ImportFrom(module=str() as module, level=0):
            return statement if module in sys.modules else None
    return statement


def _needed(
    statements: Sequence[_Statement], names: Mapping[str, Any], wanted: str
) -> tuple[set[int], dict[str, str]]:
    """Which statements one name needs, and which names are data, with their text.

    Raises:
        UserError: see `copied_code`.
    """
    binding: dict[str, list[int]] = {}
    for number, statement in enumerate(statements):
        for name in statement.binds:
            binding.setdefault(name, []).append(number)
    needed: set[int] = set()
    data: dict[str, str] = {}
    seen = {wanted}
    pending = [(wanted, wanted)]
    while pending:
        name, user = pending.pop()
        numbers = binding.get(name, [])
        if name not in names and not numbers:
            continue  # a builtin, or a mistake that the user's own code has
        last = statements[numbers[-1]] if numbers else None
        defined = last is not None and isinstance(
            last.node,
            ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom,
        )
        if name in names and not defined and (text := _data(names[name])) is not None:
            if len(text) > _MOST_CHARACTERS:
                raise UserError(
                    f"{user!r} refers to {name!r}, whose {len(text)} characters cannot go along to "
                    "the run's processes; read it from a file in the task's methods, see task.data"
                )
            data[name] = text
            continue
        if last is None and _from_star(statements, name):
            continue
        # Its values may be random, and would then be others in each process.
        value = names.get(name)
        is_tensor = isinstance(value, torch.Tensor) or _is_array(value)
        if last is None or is_tensor or not (last.is_definition or last.is_assignment):
            why = f"it has more than {_MOST_NUMBERS} elements, or needs a gradient"
            if not is_tensor:
                why = "no single import, definition or assignment at the top makes it"
            raise UserError(
                f"{user!r} refers to {name!r}, which cannot go along to the run's processes: it is "
                f"{_kind(value)}, and {why}; make it in the task's methods, or in a file that the "
                "task imports"
            )
        chosen = numbers if last.is_definition else numbers[-1:]
        for number in chosen:
            statement = statements[number]
            if statement is not last and not statement.is_definition:
                continue
            needed.add(number)
            for other in statement.refers - seen:
                if other in names or other in binding:
                    seen.add(other)
                    pending.append((other, name))
    return needed, data


def _usable(
    statements: Sequence[_Statement],
    needed: set[int],
    data: Mapping[str, str],
    names: Mapping[str, Any],
) -> list[_Statement]:
    """What is copied: what is needed, and definitions that can be executed without the rest.

    Those that nothing refers to may be looked up by their names.
    """
    made = {*data, *vars(builtins), "__name__", "__file__"}
    kept = []
    for number, statement in enumerate(statements):
        if statement.binds and statement.binds <= data.keys():
            continue
        star = statement.is_import and "*" in ast.unparse(statement.node)
        executable = statement.is_definition and statement.executes - statement.binds <= made
        if number in needed or executable or (statement.is_import and star):
            kept.append(statement)
            made |= statement.binds
            if star:
                made |= {name for name in names if _from_star([statement], name)}
    return kept


def _from_star(statements: Sequence[_Statement], name: str) -> bool:
    """Whether a name comes from `from module import *`."""
    for statement in statements:
        match statement.node:
            case ast.ImportFrom(module=str() as module, names=[ast.alias(name="*")]):
                if hasattr(sys.modules.get(module), name):
                    return True
    return False


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _is_constant(value: ast.expr) -> bool:
    """Whether evaluating it runs none of the user's code: literals, and paths of them."""
    called = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "Path" and all(map(_is_constant, value.args))
    return not any(isinstance(node, called) for node in ast.walk(value))


def _data(value: Any) -> str | None:
    """Plain data as Python; None for anything else."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if _is_array(value):
        small = value.dtype.kind in "biuf" and value.size <= _MOST_NUMBERS
        listed = _data(value.tolist()) if small and type(value).__name__ == "ndarray" else None
        return listed and f'__import__("numpy").array({listed}, dtype="{value.dtype}")'
    if type(value) in (bool, int, str, bytes, type(None)):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) in (list, tuple, set, dict):
        return _collection(value)
    return None


def _tensor(value: torch.Tensor) -> str | None:
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not is_plain or value.requires_grad or value.is_complex() or value.numel() > _MOST_NUMBERS:
        return None
    if value.device.type != "cpu":
        return None
    listed = _data(value.tolist())
    name = str(value.dtype).removeprefix("torch.")
    module = '__import__("torch")'
    return listed and f"{module}.tensor({listed}, dtype={module}.{name}).view({tuple(value.shape)})"


def _is_array(value: Any) -> bool:
    arrays = sys.modules.get("numpy")  # only if it was imported
    return arrays is not None and isinstance(value, arrays.ndarray)


def _collection(value: Any) -> str | None:
    if type(value) is dict:
        pairs = [(_data(key), _data(each)) for key, each in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
    items = [_data(each) for each in value]
    if None in items:
        return None
    listed = ", ".join(map(str, items))
    if type(value) is list:
        return f"[{listed}]"
    if type(value) is set:
        return f"{{{listed}}}" if items else "set()"
    return f"({listed},)" if items else "()"


def _kind(value: Any) -> str:
    """What something is, for a sentence."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return f"an array of shape {tuple(value.shape)}"
    return f"of the type {type(value).__name__}"
