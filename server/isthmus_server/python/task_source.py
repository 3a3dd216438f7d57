"""The file of a task class that a script or a notebook has defined.

The processes of a run import the task from a file. The file of a script would start the run again,
and a notebook has none; their imports, functions, classes and constants are copied to a new file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from isthmus.errors import UserError
from isthmus.task import Task

FILE = "task.py"
"""Name of the new file."""


def source_of(task: type[Task], folder: Path) -> str:
    """Return `path/to/file.py:Name` or `package.module:Name` for a task class.

    Args:
        task: the class.
        folder: where the new file is written, if there has to be one.

    Raises:
        UserError: the class is within a function, or its source is not known.
    """
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise UserError(f"the task is a subclass of isthmus.Task, and not {task!r}")
    name = task.__qualname__
    module = sys.modules.get(task.__module__)
    if "." in name:
        raise UserError(f"the task {name} is defined within another block; define it at the top")
    file = getattr(module, "__file__", None)
    if module is None or (file is None and task.__module__ != "__main__"):
        raise UserError(f"the source of the task {name} is not known; save it in a file")
    if task.__module__ != "__main__":
        return f"{task.__module__}:{name}" if "." in task.__module__ else f"{file}:{name}"
    source = _cells(module) if file is None else [Path(file).read_text(encoding="utf-8")]
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(map(ast.unparse, _definitions(source)))
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")
    return f"{(folder / FILE).absolute()}:{name}"


def _cells(module: ModuleType) -> list[str]:
    """The cells of a notebook that were executed, as Python.

    Raises:
        UserError: there are none, as in Python's own prompt.
    """
    shell = getattr(module, "get_ipython", None)
    if shell is None:
        raise UserError(
            "a task that was typed into Python's prompt has no source; save it in a file, or use "
            "a notebook or IPython"
        )
    return [shell().transform_cell(cell) for cell in module.In if cell]


def _definitions(sources: Iterable[str]) -> Iterator[ast.stmt]:
    """What the sources define, in order: imports, functions, classes and constants.

    A cell that was executed with an error may not be Python; it is left out.
    """
    for source in sources:
        try:
            statements = ast.parse(source).body
        except SyntaxError:
            continue
        yield from filter(_defines, statements)


def _defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.ClassDef() | ast.FunctionDef():
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return _is_constant(value)
    return False


def _is_constant(value: ast.expr) -> bool:
    """Whether evaluating it runs none of the user's code: literals, and paths of them."""
    called = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "Path" and all(map(_is_constant, value.args))
    return not any(isinstance(node, called) for node in ast.walk(value))
