"""The batch script of Slurm, and what it starts."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import dry_run, wait_until

from isthmus.errors import UserError
from isthmus_datacenter.launch import slurm
from isthmus_datacenter.launch.datacenter import DatacenterLaunch

LAUNCH: dict[str, Any] = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


def test_the_batch_script_has_the_options_and_no_secrets(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o600)
    script = dry_run("--env-file", str(secrets), "--option", "partition=gpu", "--grace", "90")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --requeue"} <= set(lines)
    assert "#SBATCH --signal=B:USR1@120" in lines
    assert f". {secrets}" in lines
    assert "hush" not in script
    assert "--state '/shared/it'\"'\"'s state'" in script


def test_the_batch_script_runs_service_and_agents(tmp_path: Path) -> None:
    """With stand-ins for the commands of Slurm and Isthmus; a signal ends the service."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*" >>"$LOG"; exec sleep 6000\n')
    (tmp_path / "isthmus").write_text(
        '#!/bin/bash\necho "service $*" >>"$LOG"\n'
        "trap 'echo signalled >>\"$LOG\"; exit 0' USR1\nwhile :; do sleep 0.1; done\n"
    )
    for name in ("srun", "isthmus"):
        (tmp_path / name).chmod(0o755)
    launch = DatacenterLaunch(**LAUNCH, state=tmp_path)
    script = slurm.render(launch).replace(f"{sys.executable} -m isthmus.cli", "isthmus")
    log = tmp_path / "log"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "123",
    }
    shell = subprocess.Popen(["bash", "-c", script], env=environment)
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    shell.send_signal(signal.SIGUSR1)
    assert shell.wait() == 0
    text = log.read_text()
    host = f"{socket.gethostname()}:20123"
    assert f"datacenter agent --control {host}" in text
    assert f"--nodes 2 --state {tmp_path} --grace 60 --control {host}" in text
    assert text.endswith("signalled\n")


def test_submit_starts_the_service(tmp_path: Path) -> None:
    """With a real Slurm if there is one; else the error names what is missing."""
    launch = DatacenterLaunch(**{**LAUNCH, "nodes": 1, "ranks": 1}, state=tmp_path / "state")
    has_slurm = (
        shutil.which("sinfo") and not subprocess.run(["sinfo"], capture_output=True).returncode
    )
    if not has_slurm:
        with pytest.raises(
            UserError, match=r"sbatch is not installed|Slurm did not accept the job"
        ):
            slurm.submit(launch)
        return
    number = slurm.submit(launch)
    logs = tmp_path / "state" / "logs"
    wait_until(lambda: len(list(logs.glob("*/attempt_0/*/stderr.log"))) == 1)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    log = tmp_path / "state" / f"slurm-{number}.log"
    wait_until(lambda: "leaving: idle" in log.read_text())
    wait_until(lambda: not squeue(number))


def squeue(number: str) -> str:
    completed = subprocess.run(["squeue", "-h", "-j", number], capture_output=True, text=True)
    return completed.stdout.strip()
