"""Start a simulation on the nodes of a cluster: on each torchrun, with some of the ranks."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import ClassVar

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_datacenter.launch import Launch, NodeShell, waiting
from isthmus_simulation.rank_place import KEY_VARIABLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationLaunch(Launch):
    """The ranks of a simulation to start; `state` is the run directory."""

    arguments: tuple[str, ...]
    """Arguments of `isthmus simulate`: the job, and options besides --run-dir."""
    grace_seconds: float = 30.0
    """What torchrun gives its ranks."""
    title: ClassVar[str] = "isthmus-simulate-"
    named_by: ClassVar[str] = "the last part of --run-dir,"
    kept_by: ClassVar[str] = "--run-dir"
    secrets: ClassVar[tuple[str, ...]] = (KEY_VARIABLE,)

    @property
    def claimed(self) -> Path:
        """See `Launch`: what the run directory is in; a pod cannot be without a mounted one."""
        return self.state.parent

    def each(self, shell: NodeShell) -> str:
        """See `Launch`: torchrun, from a shell that tells it signals which it does not know."""
        torchrun = [
            *shell.torchrun,
            *("--nnodes", str(self.nodes), "--nproc-per-node", str(self.ranks)),
        ]
        simulate = [
            *(*shell.isthmus, "simulate", *self.arguments),
            *("--run-dir", str(self.state), "--or-resume"),
        ]
        script = [
            "# Slurm may send USR1 to all processes of a node, and torchrun would end by it.",
            f'(trap "" USR1; exec {shlex.join(torchrun)} --node-rank "${shell.number}"'
            ' --master-addr "${1%:*}" --master-port "${1##*:}"'
            f" --no-python {shlex.join(simulate)}) &",
            "group=$!",
            *waiting("group", "USR1 TERM", "TERM"),
            'exit "$status"',
        ]
        quoted = shlex.quote("\n".join(script))
        return f"bash -c {quoted} isthmus {shell.control}"


def check_here(job: Job) -> None:
    """Refuse a job before it waits for nodes that cannot simulate it.

    Raises:
        JobError: it cannot be simulated by ranks.
    """
    from isthmus_simulation.rank_crew import check_for_ranks
    from isthmus_simulation.run import check

    check(job)
    check_for_ranks(job)


def path_of_pods(option: str, path: Path) -> Path:
    """A path in the pods, which need not exist on this machine.

    Raises:
        UserError: it is relative, or `..` is a part of it.
    """
    if not path.is_absolute():
        raise UserError(f"{option} {path} is a path in the pods of Kubernetes; make it absolute")
    if ".." in path.parts:
        raise UserError(f"{option} {path} has a part `..`; write the directory that it leads to")
    return path
