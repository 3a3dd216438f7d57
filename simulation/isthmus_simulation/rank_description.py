"""What the ranks of a simulation must have in common."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from pathlib import Path
from typing import Any

import torch

from isthmus import __version__
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.task.code_digest import code_digest


@dataclasses.dataclass(frozen=True)
class RankDescription:
    """One rank: what it has loaded, and where it is."""

    version: str
    torch: str
    job: str
    """A digest of the job."""
    task: str
    """A digest of the code of the task."""
    host: str
    device: str = "cpu"
    """What it trains on, `cpu` or `cuda`."""

    @classmethod
    def of(cls, job: Job, base: Path) -> RankDescription:
        """Describe this process, without its device; the job's relative paths start at `base`.

        Raises:
            TaskError: the code of the task cannot be read.
        """
        return cls(
            __version__,
            torch.__version__,
            hashlib.sha256(job.model_dump_json().encode()).hexdigest(),
            code_digest(job.task.source, base).hex(),
            socket.gethostname(),
        )

    @classmethod
    def read(cls, table: dict[str, Any]) -> RankDescription:
        """From JSON.

        Raises:
            UserError: it is of another version, with other fields.
        """
        try:
            return cls(**{name: str(value) for name, value in table.items()})
        except TypeError:
            raise UserError("a rank runs another version of Isthmus than rank 0") from None

    def check(self, rank: int, first: RankDescription) -> None:
        """Refuse a rank that differs from rank 0.

        Raises:
            UserError: it does; the first difference.
        """
        where = f"rank {rank} on {self.host}"
        others = f"rank 0 on {first.host}"
        for name, own, other in (
            ("Isthmus", self.version, first.version),
            ("PyTorch", self.torch, first.torch),
        ):
            if own != other:
                raise UserError(
                    f"{where} has {name} {own} and {others} has {other}; install the same version "
                    "on all machines"
                )
        if self.job != first.job:
            raise UserError(
                f"{where} has loaded another job than {others}; start all ranks with the same job "
                "file and options"
            )
        if self.task != first.task:
            raise UserError(
                f"{where} has other code of the task than {others}; copy the same files to all "
                "machines"
            )
        if self.device != first.device:
            raise UserError(
                f"{where} trains on {self.device} and {others} on {first.device}; start as many "
                "ranks on each machine as it has GPUs, or hide all GPUs with CUDA_VISIBLE_DEVICES="
            )
