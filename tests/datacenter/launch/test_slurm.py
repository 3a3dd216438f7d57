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
from isthmus_datacenter.launch.datacenter import DatacenterLaunch
from isthmus_datacenter.launch.slurm import SlurmLauncher

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


def test_a_percent_sign_of_a_directory_stays_one() -> None:
    """Slurm replaces %j by the job's number, and %% by a percent sign."""
    launch = DatacenterLaunch(**LAUNCH, state=Path("/shared/50%u"))
    assert (
        "#SBATCH --output=/shared/50%%u/slurm-%j.log" in SlurmLauncher().render(launch).splitlines()
    )
    assert "--state /shared/50%u" in SlurmLauncher().render(launch)
    with pytest.raises(UserError, match=r"^--state /a\\b has a backslash, with which"):
        SlurmLauncher().render(DatacenterLaunch(**LAUNCH, state=Path("/a\\b")))


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1bb", "a\u2028b", "a\udcffb"])
def test_a_value_cannot_begin_a_line_of_the_script(tmp_path: Path, text: str) -> None:
    state = tmp_path / text
    for values in ({"state": state}, {"state": tmp_path, "data": state}):
        with pytest.raises(UserError, match="has a line break or another character that is not"):
            SlurmLauncher().submit(DatacenterLaunch(**LAUNCH, **values))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("nodes", "use --nodes"),
        ("ntasks", "use --nodes and --ranks"),
        ("ntasks-per-node", "use --ranks"),
        ("signal", "use --grace"),
        ("output", "use --state"),
        ("outp", "use --state"),
        ("array", "remove it"),
    ],
)
def test_an_option_that_the_script_sets_itself_is_refused(key: str, advice: str) -> None:
    launch = DatacenterLaunch(**LAUNCH, state=Path("/state"), options=((key, "1"),))
    with pytest.raises(UserError) as refused:
        SlurmLauncher().render(launch)
    assert str(refused.value) == (
        f"--option {key} would change what the batch script relies on; {advice}"
    )


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
    script = SlurmLauncher().render(launch).replace(f"{sys.executable} -m isthmus.cli", "isthmus")
    log = tmp_path / "log"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_CPUS_PER_NODE": "72(x2),36",
    }
    shell = subprocess.Popen(["bash", "-c", script], env=environment)
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    shell.send_signal(signal.SIGUSR1)
    assert shell.wait() == 0
    text = log.read_text()
    host = f"{socket.gethostname()}:20123"
    assert f"datacenter agent --state {tmp_path} --control {host}" in text
    assert "--ntasks-per-node=1 --cpus-per-task=36 " in text  # those of the smallest node
    assert f"--nodes 2 --state {tmp_path} --grace 60 --control {host}" in text
    assert text.endswith("signalled\n")


@pytest.mark.parametrize(
    ("options", "is_there"),
    [
        ((), True),
        ((("cpus-per-task", "32"),), False),
        ((("cpus-per-gpu", "8"),), False),
        ((("exclusive", ""),), False),
    ],
)
def test_a_node_has_a_cpu_for_each_rank_unless_the_request_says_how_many(
    options: tuple[tuple[str, str], ...], is_there: bool
) -> None:
    launch = DatacenterLaunch(**LAUNCH, state=Path("/state"), options=options)
    lines = SlurmLauncher().render(launch).splitlines()
    assert ("#SBATCH --cpus-per-task=4" in lines) == is_there


def test_a_prologue_comes_after_the_secrets_and_before_the_nodes(tmp_path: Path) -> None:
    prologue = tmp_path / "it's.sh"
    prologue.write_text('[ -z "$UNSET" ] && export CUDA=12\n')
    text = dry_run("--prologue", str(prologue))
    environment = {"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "8", "PATH": os.environ["PATH"]}
    prepared = text.partition("srun ")[0] + "echo $CUDA"
    shell = subprocess.run(
        ["bash", "-c", prepared], env=environment, capture_output=True, text=True
    )
    assert (shell.stdout, shell.stderr) == ("12\n", "")


def test_too_few_cpus_are_told_in_the_log() -> None:
    text = SlurmLauncher().render(DatacenterLaunch(**LAUNCH, state=Path("/state")))
    prepared = text.partition("srun ")[0]
    environment = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x3),2",
        "PATH": os.environ["PATH"],
    }
    shell = subprocess.run(
        ["bash", "-c", prepared], env=environment, capture_output=True, text=True
    )
    assert shell.stderr == (
        "isthmus: 4 ranks share 2 CPUs of a node; raise --option cpus-per-task\n"
    )


def test_options_of_containers_belong_to_the_steps_and_not_to_the_batch() -> None:
    """The batch shell is outside: pyxis starts a container for each task of a step."""
    options = (("container-image", "registry#isthmus:1"), ("container-mounts", "/data:/data"))
    launch = DatacenterLaunch(**LAUNCH, state=Path("/shared/run"), options=options)
    lines = SlurmLauncher().render(launch).splitlines()
    assert not any(line.startswith("#SBATCH --container") for line in lines)
    steps = [line for line in lines if line.startswith("srun ")]
    for step, command in zip(steps, ("datacenter agent", "datacenter serve"), strict=True):
        assert "--container-mounts=/data:/data,/shared/run:/shared/run" in step
        assert f"isthmus {command} " in step
        assert sys.executable not in step
    assert steps[1].startswith('srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"')


@pytest.mark.parametrize(
    ("state", "option", "sentence"),
    [
        (
            "/a",
            ("container-mounts", "/data"),
            "--option container-mounts needs --option container-i",
        ),
        ("/a:b", ("container-image", "i"), "--state /a:b has a comma or a colon"),
    ],
)
def test_a_container_that_cannot_be_started_is_refused(
    state: str, option: tuple[str, str], sentence: str
) -> None:
    launch = DatacenterLaunch(**LAUNCH, state=Path(state), options=(option,))
    with pytest.raises(UserError, match=f"^{sentence}"):
        SlurmLauncher().render(launch)


def test_submit_starts_the_service(tmp_path: Path) -> None:
    """With a real Slurm if there is one; else the error names what is missing."""
    here = {**LAUNCH, "server": "127.0.0.1:9402", "nodes": 1, "ranks": 1}
    launch = DatacenterLaunch(**here, state=tmp_path / "state")
    has_slurm = (
        shutil.which("sinfo") and not subprocess.run(["sinfo"], capture_output=True).returncode
    )
    if not has_slurm:
        with pytest.raises(
            UserError, match=r"sbatch is not installed|Slurm did not accept the job"
        ):
            SlurmLauncher().submit(launch)
        return
    number = SlurmLauncher().submit(launch).removeprefix("slurm: ")
    logs = tmp_path / "state" / "logs"
    wait_until(lambda: len(list(logs.glob("*/attempt_0/*/stderr.log"))) == 1)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    log = tmp_path / "state" / f"slurm-{number}.log"
    wait_until(lambda: "leaving: idle" in log.read_text())
    wait_until(lambda: not squeue(number))


def squeue(number: str) -> str:
    completed = subprocess.run(["squeue", "-h", "-j", number], capture_output=True, text=True)
    return completed.stdout.strip()
