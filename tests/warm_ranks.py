"""Groups of gloo ranks without an agent, which start in a fraction of a second.

They call functions of a file, which is given by its path: test modules cannot be imported by name.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from isthmus.system.process import die_with_parent
from isthmus_datacenter.rank_messages import KEY_BYTES, set_key
from tests import forked

_SECONDS = 500.0
"""For all ranks to finish: a guard against hangs, below that of a test."""


class Ranks:
    """A group of ranks that starts with the first call of `run`, and then stays warm."""

    def __init__(self, count: int, seconds: float = _SECONDS) -> None:
        """Prepare `count` ranks; `run` starts them, and fails after so many `seconds`."""
        self.count = count
        self._seconds = seconds
        self._members: list[tuple[ForkServerProcess, Connection]] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, source: Path, function: str, *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` of the file `source` on each rank.

        Returns the results by rank.

        Raises:
            RuntimeError: some rank raised, died or timed out; with its traceback. Other ranks may
                be waiting for it: the next call starts new ranks.
        """
        if not self._members:
            self._start()
        try:
            for _, parent_end in self._members:
                parent_end.send((source, function, arguments))
            return [
                _result(rank, parent_end, self._seconds)
                for rank, (_, parent_end) in enumerate(self._members)
            ]
        except BaseException:
            self.close()
            raise

    def run_until(self, rank: int, source: Path, function: str, *arguments: Any) -> Any:
        """As `run`, and return the result of one rank as soon as it has one; all ranks then end."""
        if not self._members:
            self._start()
        try:
            for _, parent_end in self._members:
                parent_end.send((source, function, arguments))
            return _result(rank, self._members[rank][1], self._seconds)
        finally:
            self.close()

    def close(self) -> None:
        """End all ranks."""
        for process, parent_end in self._members:
            parent_end.close()
            process.kill()
            process.join()
            process.close()
        self._members, self._store = [], None

    def _start(self) -> None:
        context = forked.context()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.count):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, rank, self.count, self._store.port)
            process = context.Process(target=_member, args=arguments)
            process.start()
            child_end.close()
            self._members.append((process, parent_end))


def _result(rank: int, parent_end: Connection, seconds: float) -> Any:
    if not parent_end.poll(seconds):
        raise RuntimeError(f"rank {rank} took longer than {seconds:.0f} s")
    try:
        error, result = parent_end.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if error is not None:
        raise RuntimeError(f"rank {rank} raised:\n{error}")
    return result


def _member(child_end: Connection, rank: int, ranks: int, port: int) -> None:
    faulthandler.enable()
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # As in the ranks of the product, processes that read data are forks of the rank.
    multiprocessing.set_start_method("fork", force=True)
    dist.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_SECONDS),
    )
    set_key(bytes(KEY_BYTES))
    modules: dict[Path, ModuleType] = {}
    while True:
        try:
            source, function, arguments = child_end.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if source not in modules:
                modules[source] = _loaded(source)
            child_end.send((None, getattr(modules[source], function)(rank, *arguments)))
        except Exception:  # noqa: BLE001 - the parent raises it again
            child_end.send((traceback.format_exc(), None))


def _loaded(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
