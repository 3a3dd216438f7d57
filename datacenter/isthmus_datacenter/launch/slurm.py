"""Render a Slurm job: a step with a command per node; what only the first runs is in the batch."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

from isthmus.errors import UserError
from isthmus.system.private_files import make_state_directory
from isthmus_datacenter.launch import (
    SHUTDOWN_SECONDS,
    Launch,
    NodeShell,
    check_printable,
    single_options,
    waiting,
)

_CONTAINER = "container-"
"""What the names of pyxis's options begin with, which belong to steps."""
_OF_CPUS = ("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus")
"""Options that say how many CPUs a node has for the job."""


class SlurmLauncher:
    """The launcher of Slurm, with `sbatch`."""

    shares_files = True

    def render(self, launch: Launch) -> str:
        """Render the batch script.

        The batch shell receives the signal that announces the end of the allocation and forwards
        it; a requeued job resumes from the state directory.

        Raises:
            UserError: an option is one that the script sets itself, or a value cannot be in it.
        """
        check_printable(launch)
        options = single_options(launch)
        _check_options(launch)
        if "\\" in str(launch.state):
            raise UserError(
                f"{launch.kept_by} {launch.state} has a backslash, with which Slurm does not put "
                "the job's number into the name of its log; choose another directory"
            )
        of_steps = {key: value for key, value in options.items() if key.startswith(_CONTAINER)}
        of_batch = {key: value for key, value in options.items() if key not in of_steps}
        # Slurm reads quotes in these lines as a shell does.
        head = [
            f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")
            for key, value in (_defaults(launch, of_batch) | of_batch).items()
        ]
        shell = NodeShell('"$control"', "SLURM_NODEID")
        container = ""
        if of_steps:
            container = _container(launch, of_steps)
            # The installation of this machine is not in the image, which has its own.
            shell = NodeShell('"$control"', "SLURM_NODEID", ("isthmus",), ("torchrun",))
        srun = (
            f"srun --nodes={launch.nodes} --ntasks={launch.nodes} --ntasks-per-node=1 "
            f'--cpus-per-task="$cpus"{container}'
        )
        first = launch.first(shell)
        main = "nodes"
        start_first = list[str]()
        end_others = list[str]()
        if first is not None:
            main = "first"
            if container:
                # A second step on this node, which shares the node with the step of all nodes.
                first = (
                    'srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"'
                    f"{container} {first}"
                )
            start_first = [f"{first} &", "first=$!"]
            end_others = ['kill "$nodes" 2>/dev/null || true', 'wait "$nodes" || true']
        return "\n".join(
            [
                "#!/bin/bash",
                *head,
                "set -eu",
                "umask 077",
                *_environment(launch),
                *_secrets(launch),
                "# One port per job, so that two jobs on one node do not conflict.",
                'control="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"',
                *_cpus(launch),
                f"{srun} {launch.each(shell)} &",
                "nodes=$!",
                *start_first,
                *waiting(main, "USR1 TERM", "USR1"),
                *end_others,
                'exit "$status"',
                "",
            ]
        )

    def submit(self, launch: Launch) -> str:
        """Submit the job to Slurm; returns a line with its number.

        Raises:
            UserError: the request is not valid, Slurm is not installed, or it refused the job.
        """
        text = self.render(launch)
        make_state_directory(launch.state)
        script = launch.state / "launch.sbatch"
        script.write_text(text)
        return f"slurm: {_sbatch(script)}"


def _defaults(launch: Launch, options: dict[str, str]) -> dict[str, str]:
    """Options that the script has unless the request gives them."""
    warning = math.ceil(launch.grace_seconds) + SHUTDOWN_SECONDS
    defaults = {
        "job-name": f"{launch.title}{launch.name}",
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "signal": f"B:USR1@{warning}",
        # A percent sign begins a part that Slurm replaces, and two are one of the name.
        "output": f"{str(launch.state).replace('%', '%%')}/slurm-%j.log",
        "requeue": "",
    }
    if not options.keys() & set(_OF_CPUS):
        # The ranks of a node are one task, and by default a task has one CPU.
        defaults["cpus-per-task"] = str(launch.ranks)
    return defaults


def _container(launch: Launch, options: dict[str, str]) -> str:
    """Words of srun that start the step in a container, by the plugin pyxis.

    Raises:
        UserError: there is no image, or the state directory has a character that would end it.
    """
    if "container-image" not in options and "container-name" not in options:
        raise UserError(
            f"--option {next(iter(options))} needs --option container-image=IMAGE, in which the "
            "nodes run"
        )
    if any(character in str(launch.state) for character in ",:"):
        raise UserError(
            f"{launch.kept_by} {launch.state} has a comma or a colon, with which it cannot be "
            "mounted into a container; choose another directory"
        )
    mounts = f"{launch.state}:{launch.state}"
    given = options.get("container-mounts")
    options = {**options, "container-mounts": f"{given},{mounts}" if given else mounts}
    words = [f"--{key}" + (f"={value}" if value else "") for key, value in options.items()]
    return f" {shlex.join(words)}"


def _environment(launch: Launch) -> list[str]:
    """Lines that prepare the batch shell, whose environment srun gives to all nodes."""
    lines = list[str]()
    if launch.environment is not None:
        lines += ["set -a", f". {shlex.quote(str(launch.environment))}", "set +a"]
    if launch.prologue is not None:
        # Functions such as `module` are not written for `set -u`.
        lines += ["set +u", f". {shlex.quote(str(launch.prologue))}", "set -u"]
    return lines


def _secrets(launch: Launch) -> list[str]:
    """Lines that draw what only the nodes know; it is in no argument and in no file."""
    draw = "od -A n -v -t x1 -N 32 /dev/urandom | tr -d ' \\n'"
    return [
        line
        for name in launch.secrets
        for line in (f'{name}="${{{name}:-$({draw})}}"', f"export {name}")
    ]


def _cpus(launch: Launch) -> list[str]:
    """Lines that set `$cpus`, those of the node with the fewest.

    Since Slurm 22.05 srun does not inherit `--cpus-per-task`: a step that does not name its CPUs
    has one for each task, and all ranks of the node would share it.
    """
    return [
        "# What the job has of each node, such as 72(x2),36: the step asks for all of it.",
        "cpus=\"$(echo \"$SLURM_JOB_CPUS_PER_NODE\" | tr ',' '\\n' | cut -d '(' -f 1 |"
        ' sort -n | head -n 1)"',
        f'if [ "$cpus" -lt {launch.ranks} ]; then',
        f'  echo "isthmus: {launch.ranks} ranks share $cpus CPUs of a node;'
        ' raise --option cpus-per-task" >&2',
        "fi",
    ]


def _check_options(launch: Launch) -> None:
    """Refuse options on which the script relies; Slurm also takes the beginning of a name."""
    flags = {
        "nodes": "--nodes",
        "ntasks": "--nodes and --ranks",
        "ntasks-per-core": "--ranks",
        "ntasks-per-gpu": "--ranks",
        "ntasks-per-node": "--ranks",
        "ntasks-per-socket": "--ranks",
        "array": None,
        "signal": launch.grace_by,
        "output": launch.kept_by,
    }
    for key, _ in launch.options:
        for name, flag in flags.items():
            if name.startswith(key):
                advice = "remove it" if flag is None else f"use {flag}"
                raise UserError(
                    f"--option {key} would change what the batch script relies on; {advice}"
                )


def _sbatch(script: Path) -> str:
    try:
        completed = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            "sbatch is not installed on this machine; run this on a login node, or use --dry-run "
            "and submit the script there"
        ) from None
    if completed.returncode:
        reason = " ".join(completed.stderr.split()) or f"exit code {completed.returncode}"
        raise UserError(f"Slurm did not accept the job {script}: {reason}")
    return completed.stdout.strip().partition(";")[0]
