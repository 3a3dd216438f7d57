"""Processes forked from one that has imported PyTorch and this project, and done nothing else.

Importing takes 5 s of CPU time in each process that is started anew. What a command does when a
shell starts it is told by the tests of the docs.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from multiprocessing import popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import MappingProxyType

from isthmus.system.process import die_with_parent
from isthmus.task import loading
from isthmus_datacenter.service.fork_server import PRELOADED_MODULE

_LOADED = [
    "pytest",
    "isthmus.cli",
    "isthmus.task.scoring",
    "isthmus_clients.commands",
    "isthmus_server.runs.local.session",
    PRELOADED_MODULE,
    "isthmus_simulation.run",
    "torch.distributed.run",
    "tests.forked_tasks",
    # Data and models of examples.
    "sklearn.datasets",
    "transformers.models.resnet.modeling_resnet",
    # What each rank would import for itself when its first block is compiled.
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
]

_POLLING = threading.Lock()


class _Popen(popen_forkserver.Popen):
    """A process whose exit status is read by one thread at a time.

    Starting a process polls all others, and where two threads read the status of one, the second
    finds an end of file, which Python takes for the status 255.
    """

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])  # without the lock, as it may take long
        with _POLLING:
            return super().poll()


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: ForkServerProcess) -> _Popen:  # noqa: N802  # called so in the base
        return _Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


def context() -> ForkServerContext:
    """Where such processes are started; one server for all tests of this process."""
    context = _Context()
    context.set_forkserver_preload(_LOADED)
    return context


def start(
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    namespaces: Mapping[str, int] = MappingProxyType({}),
) -> tuple[ForkServerProcess, Connection]:
    """Start `isthmus ARGUMENTS`; its output, both streams, is on the pipe."""
    ours, theirs = context().Pipe(duplex=False)
    process = start_into(theirs.fileno(), arguments, cwd, environment, namespaces)
    theirs.close()
    return process, ours


def start_into(
    output: int,
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    namespaces: Mapping[str, int] = MappingProxyType({}),
) -> ForkServerProcess:
    """Start it with its output in an open file, and in Linux namespaces: paths with their kinds."""
    with Path(os.devnull).open() as nothing:
        streams = (nothing.fileno(), output, output)
        return start_with(streams, ["isthmus", *arguments], cwd, environment, namespaces)


def start_with(
    streams: Sequence[int],
    words: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    namespaces: Mapping[str, int] = MappingProxyType({}),
    umask: int | None = None,
) -> ForkServerProcess:
    """Start a command, by the name of its program, with open files as input, output and error."""
    theirs = [Connection(os.dup(stream)) for stream in streams]
    # Without the folders of tasks that fixtures of this process have loaded.
    path = [folder for folder in sys.path if folder not in loading._task_folders]
    process = context().Process(
        target=_become,
        args=(theirs, words, cwd, dict(environment), path, dict(namespaces), umask),
    )
    process.start()
    for stream in theirs:
        stream.close()
    return process


def _become(
    streams: Sequence[Connection],
    words: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    path: Sequence[str],
    namespaces: dict[str, int],
    umask: int | None,
) -> None:
    gc.freeze()  # of what the modules hold nothing is garbage
    _enter(namespaces)
    if umask is not None:
        os.umask(umask)
    die_with_parent()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = list(words)
    sys.path[:] = path
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path and path not in sys.path]
    # What this process starts by multiprocessing is started as in a process of its own: a child of
    # a fork server would start another such server, which imports everything anew.
    multiprocessing.set_start_method(None, force=True)
    import torch
    from torch.distributed.run import main as torchrun

    from isthmus import cli
    from tests import forked_tasks

    forked_tasks.install()
    if threads := environment.get("OMP_NUM_THREADS"):  # PyTorch was imported without it
        torch.set_num_threads(int(threads))
    match words[0]:
        case "isthmus":
            cli.main()
        case "torchrun":
            torchrun()
        case "python" if words[1:3] == ["-m", "isthmus"]:
            sys.argv = ["isthmus", *words[3:]]
            cli.main()
        case "python" if words[1].endswith(".py"):
            sys.argv = list(words[1:])
            sys.path.insert(0, str(Path(words[1]).resolve().parent))
            runpy.run_path(words[1], run_name="__main__")
        case "python":
            option, code, *arguments = words[1:]
            assert option == "-c"
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})
        case name:  # of a package that is not imported above
            (program,) = entry_points(group="console_scripts", name=name)
            sys.exit(program.load()())


def _enter(namespaces: Mapping[str, int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handles = [(os.open(path, os.O_RDONLY), kind) for path, kind in namespaces.items()]
    for handle, kind in handles:
        if libc.setns(handle, kind):
            raise OSError(ctypes.get_errno(), "a namespace cannot be entered")
        os.close(handle)
