"""A Slurm job: the service in the batch step, one agent per node in a step of its own."""

from __future__ import annotations

import math
import shlex
import subprocess
from pathlib import Path

from isthmus.errors import UserError
from isthmus_datacenter.launch import Launch

_LEAVING_SECONDS = 30
"""Beyond the grace, for the service to say good-bye and the ranks to end."""


def render(launch: Launch) -> str:
    """The batch script.

    The batch shell gets the signal that announces the end of the allocation and hands it to the
    service; a job that is requeued goes on from the state directory.
    """
    warning = math.ceil(launch.grace_seconds) + _LEAVING_SECONDS
    options = {
        "job-name": f"isthmus-{launch.name}",
        "nodes": str(launch.nodes),
        "ntasks-per-node": "1",
        "signal": f"B:USR1@{warning}",
        "output": str(launch.state / "slurm-%j.log"),
        "requeue": "",
        **dict(launch.options),
    }
    head = [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in options.items()]
    environment = []
    if launch.environment is not None:
        environment = ["set -a", f". {shlex.quote(str(launch.environment))}", "set +a"]
    control = '"$control"'
    srun = f"srun --nodes={launch.nodes} --ntasks={launch.nodes} --ntasks-per-node=1"
    return "\n".join(
        [
            "#!/bin/bash",
            *head,
            "set -eu",
            "umask 077",
            *environment,
            "# One port per job, so that two on one node do not meet.",
            'control="$(hostname):$((20000 + SLURM_JOB_ID % 20000))"',
            f"{srun} {launch.agent(control)} &",
            "agents=$!",
            f"{launch.serve(control)} &",
            "service=$!",
            "trap 'kill -USR1 \"$service\" 2>/dev/null || true' USR1 TERM",
            "status=0",
            'wait "$service" || status=$?',
            "# A signal ends `wait` too, and the service not yet.",
            'while kill -0 "$service" 2>/dev/null; do status=0; wait "$service" || status=$?; done',
            'kill "$agents" 2>/dev/null || true',
            'wait "$agents" || true',
            'exit "$status"',
            "",
        ]
    )


def submit(launch: Launch) -> str:
    """Hand the job to Slurm; returns its number.

    Raises:
        UserError: Slurm is not here, or says no.
    """
    launch.state.mkdir(parents=True, exist_ok=True)
    script = launch.state / "launch.sbatch"
    script.write_text(render(launch))
    return _sbatch(script)


def _sbatch(script: Path) -> str:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            "there is no sbatch on this machine; run this on a login node, or use --dry-run and "
            "submit the script there"
        ) from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"Slurm did not take the job {script}: {reason}")
    return done.stdout.strip().partition(";")[0]
