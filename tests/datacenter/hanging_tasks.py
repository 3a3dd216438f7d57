"""A task that hangs on some rank in one of its losses."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.datacenter.tasks import Table


class Hanging(Table):
    """Its fourth loss on a rank does what the setting `how` says.

    Settings:
      * how: `spin`, `sleep`, `lock`, `native` (keeps Python's lock) and `slow` are about rank 1,
        `alone` (sleeps) about rank 0, `skip` (a barrier that rank 1 leaves out), `swap` (barriers
        of two groups, in another order) and `sizes` (an all-reduce of more elements on rank 1)
        about both;
      * once: a file that the first time makes, so that it is not repeated.
    """

    losses = 0

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        Hanging.losses += 1
        if Hanging.losses == 4 and dist.is_initialized():
            self._hang(self.settings["how"], dist.get_rank())
        return super().loss(output, target)

    def _hang(self, how: str, rank: int) -> None:
        own = Path(f"{self.settings['once']}-{rank}") if "once" in self.settings else None
        if own is not None and own.exists():
            return
        if own is not None:
            own.touch()
        if how == "skip" and rank == 0:
            dist.barrier()
        if how == "swap":
            groups = [dist.new_group(group_desc=f"mesh_{name}") for name in ("left", "right")]
            for group in groups if rank == 0 else reversed(groups):
                dist.barrier(group)
        if how == "sizes":
            dist.all_reduce(torch.zeros(10_000 * (1 + rank)))
        if rank == 1 or how == "alone":
            self._stop(how)

    def _stop(self, how: str) -> None:
        if how == "spin":
            while True:
                pass
        if how in ("sleep", "alone"):
            time.sleep(10**6)
        if how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if how == "native":
            ctypes.PyDLL(None).sleep(10**6)
        if how == "slow":
            time.sleep(8)
