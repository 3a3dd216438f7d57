"""The file of a task class that a script or a notebook has defined.

The processes of a run import the task from a file. The file of a script would start the run again,
and a notebook has none; their imports, functions, classes and constants are copied to a new file,
and what else the task refers to: see `copied_code`.
"""

from __future__ import annotations

import sys
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
        UserError: the class is within a function, its source is not known, or it refers to
            something that cannot be copied.
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
    from isthmus_server.python.copied_code import copied_code  # loads PyTorch

    sources = _cells(module) if file is None else [Path(file).read_text(encoding="utf-8")]
    text = copied_code(sources, vars(module), name, executed=file is not None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text, encoding="utf-8")
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
