"""A task defines what is learned, in plain PyTorch, for both regimes.

A complete task, for tables of eight numbers in three classes::

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import isthmus

    class Table(isthmus.Task):
        def model(self):
            return nn.Linear(8, 3)

        def loss(self, output, target):
            return nn.functional.cross_entropy(output, target, reduction="none")

        def metrics(self, output, target):
            return {"accuracy": (output.argmax(-1) == target).float()}

        def local_data(self, participant):
            return self.rows("train.pt")

        def eval_data(self):
            return self.rows("held_out.pt")

        def optimizer(self, parameters, participant):
            return torch.optim.SGD(parameters, lr=0.1)

        def rows(self, name):
            return TensorDataset(*torch.load(self.data / name))

A job names it as ``path/to/file.py:Table`` or ``package.module:Table``.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from isthmus.errors import TaskError
from isthmus.task import packages

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.utils.data import Dataset

Regime = Literal["datacenter", "federated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participant:
    """The participant that trains, for a task to find that participant's data."""

    name: str
    """The enrolled name, unique on the server."""
    regime: Regime
    """`federated` on a device, `datacenter` on a rank."""
    shard: tuple[int, int] | None = None
    """`(index, count)` if one data set is split among simulated devices; else None."""


class Task(abc.ABC):
    """Base class of tasks. Subclasses define the five abstract methods.

    Guarantees:
      * one instance per process and run, constructed with the job's ``[task.settings]``;
      * `model` is called with PyTorch seeded from the job, so all participants start equal;
      * `local_data` is called on the participant and its result never leaves that process.
    """

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """`settings` is the job's table; `data` is the path of *this* machine's data, if given."""
        self.settings = settings
        self.__data = data  # two underscores: a task may have its own `_data`

    @property
    def data(self) -> Path:
        """This machine's data path: ``task.data`` of the job, or ``--data`` of the client.

        Raises:
            TaskError: no path was given.
        """
        if self.__data is None:
            raise TaskError(
                "this task reads data from a path and none was given; set task.data in the job "
                "or start the client with --data PATH"
            )
        return self.__data

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The module to train, freshly initialised. Its trainable parameters are exchanged."""

    @abc.abstractmethod
    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """One loss per scored unit (example, token, pixel): any shape but 0-d, not yet averaged.

        Not averaged, so that partial batches, ranks and clients are weighted exactly.
        """

    def metrics(self, output: Any, target: Any) -> dict[str, torch.Tensor]:
        """Further metrics, one value per scored unit each; averaged by Isthmus. Default: none."""
        return {}

    def score(self, output: Any, target: Any) -> torch.Tensor | None:
        """A bounded error from 0 (best) to 1 for each scored unit, used to compare models.

        Bounded, so that no single overconfident prediction dominates. Values outside of 0 to 1 are
        clamped, and NaN counts as 1. Default: None, for x / (x + m) of a loss x, where m is the
        mean loss of the first of the compared models on the same device.
        """
        return None

    @abc.abstractmethod
    def local_data(self, participant: Participant) -> Dataset[Any]:
        """The training data of one participant: a map-style dataset of `(input, target)` pairs."""

    @abc.abstractmethod
    def eval_data(self) -> Dataset[Any]:
        """Central held-out data, as `(input, target)` pairs; called once per process.

        May resemble the devices' data, e.g. rows of volunteers.
        """

    def public_eval(self) -> Dataset[Any] | None:
        """Central held-out rows of the datacenter's public data; called once per process.

        The model is evaluated on them when it is evaluated on `eval_data()`, and the metrics have
        the prefix ``public_``. A policy can compare both. Default: None, for no such rows.
        """
        return None

    @abc.abstractmethod
    def optimizer(
        self, parameters: Iterable[torch.nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """The inner optimizer: new in each round on a device, kept in the datacenter."""

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        """The model's output for a batch of inputs. Default: ``model(inputs)``."""
        return model(inputs)

    # -- overrides of how a datacenter partitions the model --------------------------------------

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Styles of `torch.distributed.tensor.parallel` by module name; `*` matches one component.

        For `tensor_parallel` above 1, e.g. ``{"blocks.*.up": ColwiseParallel()}``. Between the
        named modules, activations are replicated on every rank unless the styles change that.
        Default: None, for a generic plan that fits every module but gathers often.
        """
        return None

    def pipeline_stages(self, model: nn.Module, n: int) -> Sequence[nn.Module] | None:
        """The model as `n` modules that compute the same when called in sequence.

        For `pipeline_parallel` above 1. The stages must consist of the model's own modules and pass
        on a tensor or a tuple of tensors. Default: None, for contiguous parts of the longest list
        of blocks.
        """
        return None

    def shard_units(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """The blocks whose parameters are gathered, recomputed and compiled together.

        Default: None, for the large children of the model's containers.
        """
        return None


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
    if missing:
        raise TaskError(f"task.source={source!r}: {name} must define {', '.join(missing)}")
    with user_code(f"{name}()"):
        return cls(settings, data)


def load_named(source: str, key: str, *, base: Path) -> Any:
    """Load the object that a key of the job names (`path/to/file.py:Name`, `package.module:Name`).

    Raises:
        TaskError: no such file, module or name, or the module raised an exception.
    """
    check_named(source, key, base=base)
    where, _, name = source.rpartition(":")
    setting = f"{key}={source!r}"
    module = _load_file(base / where) if where.endswith(".py") else _load_module(where, setting)
    value = getattr(module, name, None)
    if value is None:
        raise TaskError(f"{setting}: {where} has no {name!r}")
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
        TaskError: it is not `path/to/file.py:Name` with a file in that directory.
        AdmissionRefused: its folder was installed from a package and contains other files.
    """
    where = source.rpartition(":")[0]
    path = (tasks / where).resolve()
    if not where.endswith(".py") or not path.is_relative_to(tasks.resolve()) or not path.is_file():
        raise TaskError(
            f"{key}={source!r} is not a file in {tasks}, where this machine keeps the tasks "
            "its owner allows; put it there"
            + (", or name another directory with --tasks" if movable else "")
        )
    packages.check_loadable(tasks, where.partition("/")[0])


def _load_file(path: Path) -> Any:
    path = path.resolve()
    name = f"isthmus_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py path always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data loaders and compiled code look a function's module up by name. Files in the task's folder
    # are importable, as they are from a script.
    sys.modules[name] = module
    _make_importable(str(path.parent))
    with user_code(f"import of {path.name}"):
        spec.loader.exec_module(module)
    return module


_task_folders: list[str] = []
"""The folder of the last task, if it was added to Python's path; a process has one at a time."""


def _make_importable(directory: str) -> None:
    """Make the files in a task's folder importable instead of those of the previous task.

    A device or a server opens many tasks, and two may have a file of the same name.
    """
    if directory in sys.path:
        return
    for earlier in _task_folders:
        if earlier in sys.path:
            sys.path.remove(earlier)
        removed = {name for name, module in sys.modules.items() if _is_in(earlier, name, module)}
        for name in [name for name in sys.modules if name.partition(".")[0] in removed]:
            del sys.modules[name]
    _task_folders[:] = [directory]
    sys.path.append(directory)


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
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(_at_user_line(what, error)) from error


_PRODUCT_MODULE = re.compile(r"isthmus(_(?!task_)\w+)?(\.|$)")
"""Modules of Isthmus; a user's file is loaded as `isthmus_task_...`."""


def _at_user_line(what: str, error: BaseException) -> str:
    """`what failed at file.py:12: Kind: message`, pointing at the last line outside libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{what} failed at {error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line, frame.f_globals) for frame, line in frames]
    user_lines = [
        f"{file}:{line}"
        for file, line, names in places
        if not (file == names.get("__file__") and _PRODUCT_MODULE.match(names["__name__"]))
        and "site-packages" not in file
        and not file.startswith(("<frozen", sysconfig.get_path("stdlib")))
    ]
    message = " ".join(str(error).split()) or "no message"
    kind = type(error).__name__
    if not user_lines:
        return f"{what} failed: {kind}: {message}"
    return f"{what} failed at {user_lines[-1]}: {kind}: {message}"
