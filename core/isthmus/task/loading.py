"""Load the code that a job names, and turn exceptions of that code into sentences."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from isthmus.errors import TaskError
from isthmus.task import packages
from isthmus.task.definition import Task


def load_task(
    source: str, settings: Mapping[str, Any], *, base: Path, data: Path | None = None
) -> Task:
    """Load `path/to/file.py:Name` (relative to `base`) or `package.module:Name` and construct it.

    Raises:
        TaskError: no such file, module or class, not a `Task`, abstract methods are missing, or
            its own code raised an exception.
    """
    cls = load_named(source, "task.source", base=base)
    name = source.rpartition(":")[2]
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise TaskError(f"task.source={source!r}: {name} is not a subclass of isthmus.Task")
    missing = [f"{each}()" for each in sorted(cls.__abstractmethods__)]
    if cls.loss is Task.loss and cls.training_step is Task.training_step:
        missing.append("loss() or training_step()")
    if missing:
        raise TaskError(f"task.source={source!r}: {name} must define {', '.join(missing)}")
    with user_code(f"{name}()"):
        return cls.at(base, settings, data)


def load_named(source: str, key: str, *, base: Path, root: Path | None = None) -> Any:
    """Load the object that a key of the job names (`path/to/file.py:Name`, `package.module:Name`).

    Args:
        source: what the key says.
        key: the key, for messages.
        base: directory that a path in `source` is relative to.
        root: directory of a project that its modules may be imported from.

    A file in a package of the project is imported as the module of that package which it is.

    Raises:
        TaskError: no such file, module or name, or the module raised an exception.
    """
    check_named(source, key, base=base)
    where, _, name = source.rpartition(":")
    setting = f"{key}={source!r}"
    if where.endswith(".py"):
        path = (base / where).resolve()
        top = base if root is None else root.resolve()
        in_package = (path.parent / "__init__.py").is_file() and top in path.parents[1:]
        if root is not None and in_package:
            where = ".".join(path.relative_to(top).with_suffix("").parts)
    if where.endswith(".py"):
        module = _load_file(path, [] if root is None else [root])
    else:
        if root is not None:
            _make_importable([root.resolve()])
        module = _load_module(where, setting)
    value = getattr(module, name, None)
    if value is None:
        close = difflib.get_close_matches(name, vars(module), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise TaskError(f"{setting}: {where} has no {name!r}{meant}")
    return value


def check_named(source: str, key: str, *, base: Path) -> None:
    """Check what `load_named` can check without loading any code.

    Raises:
        TaskError: it is not of the form `path/to/file.py:Name` or `package.module:Name`, or there
            is no such file.
    """
    where, separator, name = source.rpartition(":")
    setting = f"{key}={source!r}"
    if not separator or not where or not name.isidentifier():
        raise TaskError(f"{setting} is not of the form path/to/file.py:Name or package.module:Name")
    path = (base / where).resolve()
    if where.endswith(".py") and not path.is_file():
        raise TaskError(f"{setting}: there is no file {path}")


def check_installed(
    source: str, tasks: Path, key: str = "task.source", *, movable: bool = True
) -> None:
    """Refuse code named by a job that the owner of this machine has not put into `tasks`.

    `movable`: whether another directory can be given with --tasks, for the error message.

    Raises:
        TaskError: it is not `path/to/file.py:Name` with a file in that directory, or the path is
            spelled in another way than the file is named there.
        AdmissionRefused: its folder was installed from a package and contains other files.
    """
    where = source.rpartition(":")[0]
    path = (tasks / where).resolve()
    if not where.endswith(".py") or not path.is_relative_to(tasks.resolve()) or not path.is_file():
        raise TaskError(
            f"{key}={source!r} is not a file in the directory of tasks, where this machine keeps "
            "those that its owner allows; put it there"
            + (", or name another directory with --tasks" if movable else "")
        )
    _check_spelling(where, tasks, f"{key}={source!r}")
    packages.check_loadable(tasks, where.partition("/")[0])


def _check_spelling(where: str, base: Path, setting: str) -> None:
    """Refuse a path that names a file in another way than its directories do.

    The digest of a task's code contains the names of its files, and a device remembers statistics
    by that digest: `a/../a/task.py`, or `a/TASK.py` where names have no case, would be another one.

    Raises:
        TaskError: so it is.
    """
    folder = base
    for part in where.split("/"):
        try:
            names = {each.name for each in folder.iterdir()}
        except OSError as error:
            raise TaskError(f"{setting}: a folder cannot be read: {error.strerror}") from None
        if part in ("", ".", "..") or part not in names:
            raise TaskError(
                f"{setting}: write the path as its files are named in their folders, without '.', "
                "'..' and repeated slashes"
            )
        folder /= part


def _load_file(path: Path, folders: Sequence[Path] = ()) -> Any:
    path = path.resolve()
    name = f"isthmus_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py path always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data loaders and compiled code look a function's module up by name. Files in the task's folder
    # are importable, as they are from a script.
    sys.modules[name] = module
    _make_importable([path.parent, *(folder.resolve() for folder in folders)])
    with user_code(f"import of {path.name}"):
        spec.loader.exec_module(module)
    return module


_task_folders: list[str] = []
"""The folders of the last task that were added to Python's path; a process has one at a time."""


def _make_importable(folders: Iterable[Path]) -> None:
    """Make the files in a task's folders importable instead of those of the previous task.

    A device or a server opens many tasks, and two may have a file of the same name.
    """
    wanted = dict.fromkeys(map(str, folders))
    if all(folder in sys.path for folder in wanted):
        return
    for earlier in _task_folders:
        if earlier in wanted:
            continue
        if earlier in sys.path:
            sys.path.remove(earlier)
        removed = {name for name, module in sys.modules.items() if _is_in(earlier, name, module)}
        for name in [name for name in sys.modules if name.partition(".")[0] in removed]:
            del sys.modules[name]
    added = [folder for folder in wanted if folder not in sys.path]
    _task_folders[:] = [*(folder for folder in _task_folders if folder in wanted), *added]
    sys.path.extend(added)


def _is_in(directory: str, name: str, module: ModuleType) -> bool:
    if "." in name or name.startswith("isthmus_task_"):
        return False
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and str(Path(place).parent) == directory for place in places)


def _load_module(name: str, setting: str) -> Any:
    with user_code(f"import of {name}"):
        try:
            spec = importlib.util.find_spec(name)  # imports the parent packages
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                spec = None
            else:
                raise
        if spec is None:
            raise TaskError(f"{setting}: no module {name!r} can be imported here")
        return importlib.import_module(name)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert exceptions of the user's code to a `TaskError` that names the user's line.

    >>> with user_code("loss()"):
    ...     1 / 0
    Traceback (most recent call last):
        ...
    isthmus.errors.TaskError: loss() failed at <doctest ...>:2: ZeroDivisionError: division by zero
    """
    outside = not getattr(_thread, "runs_user_code", False)
    _thread.runs_user_code = True
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(_at_user_line(what, error)) from error
    finally:
        if outside:
            _thread.runs_user_code = False


_thread = threading.local()
"""Whether this thread runs code of a user."""
_kept: set[int] = set()
"""The ids of this process, and of those it was forked from, that user code may not end."""
_end_process = os._exit


def keep_process() -> None:
    """Have user code that calls `os._exit` in this process fail, in place of ending it.

    For the process of a server, on which other runs and participants depend. Processes that are
    forked from it, and threads of the user, end as they want; what ends a process without Python,
    such as a crash in native code, still does.
    """
    _kept.add(os.getpid())
    vars(os)["_exit"] = _end_unless_kept


def _end_unless_kept(status: int) -> NoReturn:
    if os.getpid() in _kept and getattr(_thread, "runs_user_code", False):
        raise SystemExit(status)
    _end_process(status)


_PRODUCT_MODULE = re.compile(r"isthmus(_(?!task_)\w+)?(\.|$)")
"""Modules of Isthmus; a user's file is loaded as `isthmus_task_...`."""


_ADVICE = {
    "Expected more than 1 value per channel when training": "BatchNorm cannot train on a batch of "
    "one row, such as the rest of the data after whole batches: change batch_size, leave such rows "
    "out in local_data(), or use GroupNorm",
}
"""What to do about errors of PyTorch whose own message does not say it, by its beginning."""


def _at_user_line(what: str, error: BaseException) -> str:
    """`what failed at file.py:12: Kind: message`, pointing at the last line outside libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{what} failed at {error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.walk_tb(error.__traceback__)
    user_lines = [
        f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _is_of_user(frame)
    ]
    message = " ".join(str(error).split()) or "no message"
    advice = [text for begin, text in _ADVICE.items() if message.startswith(begin)]
    message = "; ".join([message, *advice])
    kind = type(error).__name__
    if not user_lines:
        return f"{what} failed: {kind}: {message}"
    return f"{what} failed at {user_lines[-1]}: {kind}: {message}"


def user_traceback(error: BaseException) -> str:
    """The traceback of a `TaskError` of `user_code`, from the user's first line on.

    Empty for other errors, whose sentence says everything, and for a syntax error.
    """
    cause = error.__cause__
    if not isinstance(error, TaskError) or cause is None or isinstance(cause, SyntaxError):
        return ""
    begin = cause.__traceback__
    while begin is not None and not _is_of_user(begin.tb_frame):
        begin = begin.tb_next
    lines = traceback.format_exception(type(cause), cause, begin or cause.__traceback__)
    return "".join(lines)


def _is_of_user(frame: FrameType) -> bool:
    """Whether a frame is outside of Isthmus, of installed packages and of Python's library."""
    file = frame.f_code.co_filename
    names = frame.f_globals
    return (
        not (file == names.get("__file__") and _PRODUCT_MODULE.match(names["__name__"]))
        and "site-packages" not in file
        and not file.startswith(("<frozen", sysconfig.get_path("stdlib")))
    )
