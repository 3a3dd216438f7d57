"""Render a Slurm job: a step with a command per node; what only the first runs is in the batch."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

from isthmus.errors import UserError
from isthmus_datacenter.launch import Launch, NodeShell, check_printable, waiting

_SHUTDOWN_SECONDS = 30
"""Time after the grace period for links to be closed and the ranks to end."""


def render(launch: Launch) -> str:
    """Render the batch script.

    The batch shell receives the signal that announces the end of the allocation and forwards it; a
    requeued job resumes from the state directory.

    Raises:
        UserError: an option is one that the script sets itself, or a value cannot be in it.
    """
    check_printable(launch)
    _check_options(launch)
    if "\\" in str(launch.state):
        raise UserError(
            f"{launch.kept_by} {launch.state} has a backslash, with which Slurm does not put the "
            "job's number into the name of its log; choose another directory"
        )
    warning = math.ceil(launch.grace_seconds) + _SHUTDOWN_SECONDS
    options = {
        "job-name": f"{launch.title}{launch.name}",
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "signal": f"B:USR1@{warning}",
        # A percent sign begins a part that Slurm replaces, and two are one of the name.
        "output": f"{str(launch.state).replace('%', '%%')}/slurm-%j.log",
        "requeue": "",
        **dict(launch.options),
    }
    # Slurm reads quotes in these lines as a shell does.
    head = [
        f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")
        for key, value in options.items()
    ]
    environment = []
    if launch.environment is not None:
        environment = ["set -a", f". {shlex.quote(str(launch.environment))}", "set +a"]
    shell = NodeShell('"$control"', "SLURM_NODEID")
    first = launch.first(shell)
    srun = f"srun --nodes={launch.nodes} --ntasks={launch.nodes} --ntasks-per-node=1"
    main = "nodes"
    start_first = list[str]()
    end_others = list[str]()
    if first is not None:
        main = "first"
        start_first = [f"{first} &", "first=$!"]
        end_others = ['kill "$nodes" 2>/dev/null || true', 'wait "$nodes" || true']
    return "\n".join(
        [
            "#!/bin/bash",
            *head,
            "set -eu",
            "umask 077",
            *environment,
            "# One port per job, so that two jobs on one node do not conflict.",
            'control="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"',
            f"{srun} {launch.each(shell)} &",
            "nodes=$!",
            *start_first,
            *waiting(main, "USR1 TERM", "USR1"),
            *end_others,
            'exit "$status"',
            "",
        ]
    )


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


def submit(launch: Launch) -> str:
    """Submit the job to Slurm; returns its number.

    Raises:
        UserError: the request is not valid, Slurm is not installed, or it refused the job.
    """
    text = render(launch)
    launch.state.mkdir(parents=True, exist_ok=True)
    script = launch.state / "launch.sbatch"
    script.write_text(text)
    return _sbatch(script)


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
