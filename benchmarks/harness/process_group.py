"""Run a function in a group of new processes and collect what it returns on each rank."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing

from isthmus_datacenter.rank_messages import KEY_BYTES, set_key
from isthmus_datacenter.service.fork_server import PRELOADED_MODULE

Device = Literal["cpu", "cuda"]


def on_ranks(
    ranks: int, work: Callable[..., Any], *arguments: Any, device: Device = "cpu"
) -> list[Any]:
    """Run `work(rank, *arguments)` on each rank of a new process group.

    Args:
        ranks: number of processes.
        work: a module-level function whose result can be encoded as JSON.
        arguments: its arguments after the rank.
        device: "cpu" to share this machine's processors, "cuda" for one GPU per rank.

    Returns:
        The results by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        # Forking from a process with preloaded modules is fast; CUDA needs new processes.
        method = "forkserver" if device == "cpu" else "spawn"
        if method == "forkserver":
            multiprocessing.get_context(method).set_forkserver_preload([PRELOADED_MODULE])
        torch.multiprocessing.start_processes(
            _run_rank,
            args=(ranks, device, Path(scratch), secrets.token_bytes(KEY_BYTES), work, arguments),
            nprocs=ranks,
            start_method=method,
        )
        return [json.loads((Path(scratch) / str(rank)).read_text()) for rank in range(ranks)]


def _run_rank(
    rank: int,
    ranks: int,
    device: Device,
    scratch: Path,
    key: bytes,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    torch.set_float32_matmul_precision("high")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=9),
    )
    set_key(key)
    (scratch / str(rank)).write_text(json.dumps(work(rank, *arguments)))
    dist.destroy_process_group()
