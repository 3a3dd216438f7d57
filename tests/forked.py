"""Processes forked from one that has imported PyTorch and this project, and done nothing else.

Importing takes 5 s of CPU time in each process that is started anew. What a command does when a
shell starts it is told by the tests of the docs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from isthmus.lifetime import die_with_parent
from isthmus_datacenter.template import IMPORTED

_LOADED = [
    "isthmus.cli",
    "isthmus.scoring",
    "isthmus_clients.commands",
    "isthmus_server.session",
    IMPORTED,
    # What each rank would import for itself when its first block is compiled.
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
]


def context() -> ForkServerContext:
    """Where such processes are started; one server for all tests of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def start(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> tuple[ForkServerProcess, Connection]:
    """Start `isthmus ARGUMENTS`; its output, both streams, is on the pipe."""
    ours, theirs = context().Pipe(duplex=False)
    process = context().Process(target=_become, args=(arguments, cwd, dict(environment), theirs))
    process.start()
    theirs.close()
    return process, ours


def _become(
    arguments: Sequence[str], cwd: Path, environment: dict[str, str], output: Connection
) -> None:
    die_with_parent()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["isthmus", *arguments]
    from isthmus import cli

    cli.main()
