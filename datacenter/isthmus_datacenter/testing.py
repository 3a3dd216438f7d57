"""Groups of gloo ranks in tests, without an agent: 4 ranks meet in a fraction of a second.

Processes are forked from a server that imported torch once. What they run is a function of a
file, named by its path, because test modules cannot be imported by name.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.lifetime import die_with_parent

_SECONDS = 100.0
"""For all ranks to finish."""


def on_ranks(ranks: int, source: Path, function: str, *arguments: Any) -> list[Any]:
    """Call `function(rank, *arguments)` of the file `source` on each rank of a new group.

    Returns what each returned, by rank.

    Raises:
        RuntimeError: some rank raised, died or took too long; with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["isthmus_datacenter.worker"])
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        members = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_member, args=(theirs, rank, ranks, store, source, function, arguments)
            )
            process.start()
            theirs.close()
            members.append((process, ours))
        try:
            return [_result(rank, ours) for rank, (_, ours) in enumerate(members)]
        finally:
            for process, ours in members:
                ours.close()
                process.kill()
                process.join()
                process.close()


def _result(rank: int, ours: Connection) -> Any:
    if not ours.poll(_SECONDS):
        raise RuntimeError(f"rank {rank} took longer than {_SECONDS:.0f} s")
    try:
        error, result = ours.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if error is not None:
        raise RuntimeError(f"rank {rank} raised:\n{error}")
    return result


def _member(
    theirs: Connection,
    rank: int,
    ranks: int,
    store: str,
    source: Path,
    function: str,
    arguments: tuple[Any, ...],
) -> None:
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_SECONDS),
        )
        spec = importlib.util.spec_from_file_location(source.stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        theirs.send((None, getattr(module, function)(rank, *arguments)))
    except Exception:  # noqa: BLE001 - it is raised again on the other side of the pipe
        theirs.send((traceback.format_exc(), None))
    finally:
        theirs.close()
    os._exit(0)
