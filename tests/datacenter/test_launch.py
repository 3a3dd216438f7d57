"""Scripts and manifests, nodes that come by themselves, and leaving when told to."""

# ruff: noqa: N815 - the schema has the names of Kubernetes

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict
from tests import forked

from isthmus.errors import UserError
from isthmus.wire import link_pb2
from isthmus_datacenter.commands import datacenter
from isthmus_datacenter.launch import Launch, kubernetes, slurm
from isthmus_datacenter.service import agents
from isthmus_datacenter.service.rank_group import Nodes

LAUNCH = {"server": "head:9402", "name": "cluster-0", "ranks": 4, "nodes": 2}


def rendered(*more: str, scheduler: str = "slurm", state: Path = Path("/shared/it's state")) -> str:
    words = ["launch", "--server", "head:9402", "--name", "cluster-0", "--ranks", "4"]
    words += ["--nodes", "2", "--state", str(state), "--scheduler", scheduler, "--dry-run", *more]
    result = CliRunner().invoke(datacenter, words)
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


# -- slurm ----------------------------------------------------------------------------------------


def test_a_batch_script(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o600)
    script = rendered("--env-file", str(secrets), "--option", "partition=gpu", "--grace", "90")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --requeue"} <= set(lines)
    assert "#SBATCH --signal=B:USR1@120" in lines
    assert f". {secrets}" in lines
    assert "hush" not in script
    assert "--state '/shared/it'\"'\"'s state'" in script


def test_secrets_that_others_can_read(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o644)
    with pytest.raises(UserError, match=r"mode 644 and may hold secrets; run `chmod 600 "):
        rendered("--env-file", str(secrets))


def test_tasks_that_are_nowhere_are_one_sentence(tmp_path: Path) -> None:
    here = ["launch", "--ranks", "1", "--server", "127.0.0.1:1", "--name", "x"]
    words = [*here, "--state", str(tmp_path), "--tasks", str(tmp_path / "nowhere")]
    found = CliRunner().invoke(datacenter, words).exception
    assert isinstance(found, UserError)
    assert str(found) == f"--tasks {tmp_path}/nowhere is not a directory of this machine"


@pytest.mark.parametrize(
    ("words", "scheduler", "sentence"),
    [
        (["--option", "partition"], "slurm", "'partition' is not of the form KEY=VALUE"),
        (["--option", "a b=c"], "slurm", "'a b=c' is not of the form KEY=VALUE"),
        (["--option", "comment=a\nb"], "slurm", "comment has a line break"),
        ([], "kubernetes", "kubernetes needs --option image=NAME"),
        (["--option", "speed=1"], "kubernetes", "speed is not known here; known are claim, cpus"),
        ([], "local", "--nodes, --option and --env-file need --scheduler"),
    ],
)
def test_what_cannot_be_launched(words: list[str], scheduler: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        rendered(*words, scheduler=scheduler)


def test_the_batch_script_runs_service_and_agents(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands and ours, what it starts and what a signal does."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*" >>"$LOG"; exec sleep 60\n')
    (tmp_path / "isthmus").write_text(
        '#!/bin/bash\necho "service $*" >>"$LOG"\n'
        "trap 'echo told >>\"$LOG\"; exit 0' USR1\nwhile :; do sleep 0.1; done\n"
    )
    for name in ("srun", "isthmus"):
        (tmp_path / name).chmod(0o755)
    launch = Launch(**LAUNCH, state=tmp_path)  # type: ignore[arg-type]
    script = slurm.render(launch).replace(f"{sys.executable} -m isthmus.cli", "isthmus")
    log = tmp_path / "log"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "123",
    }
    shell = subprocess.Popen(["bash", "-c", script], env=environment)
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    shell.send_signal(signal.SIGUSR1)
    assert shell.wait() == 0
    said = log.read_text()
    host = f"{socket.gethostname()}:20123"
    assert f"datacenter agent --control {host}" in said
    assert f"--nodes 2 --state {tmp_path} --grace 60 --control {host}" in said
    assert said.endswith("told\n")


def test_submitting(tmp_path: Path) -> None:
    """To a real Slurm where one answers; the sentence about what is missing where none does."""
    launch = Launch(**{**LAUNCH, "nodes": 1, "ranks": 1}, state=tmp_path / "state")  # type: ignore[arg-type]
    answers = (
        shutil.which("sinfo") and not subprocess.run(["sinfo"], capture_output=True).returncode
    )
    if not answers:
        with pytest.raises(UserError, match=r"there is no sbatch|Slurm did not take the job"):
            slurm.submit(launch)
        return
    number = slurm.submit(launch)
    logs = tmp_path / "state" / "logs"
    until(lambda: len(list(logs.glob("*/attempt_0/*/stderr.log"))) == 1)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    log = tmp_path / "state" / f"slurm-{number}.log"
    until(lambda: "told to leave: idle" in log.read_text())
    until(lambda: not squeue(number))


def squeue(number: str) -> str:
    done = subprocess.run(["squeue", "-h", "-j", number], capture_output=True, text=True)
    return done.stdout.strip()


# -- kubernetes -----------------------------------------------------------------------------------


class Strict(BaseModel):
    """The part of Kubernetes' schema that the manifest uses; another key is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    namespace: str | None = None
    labels: dict[str, str]


class ServiceSpec(Strict):
    clusterIP: Literal["None"]
    publishNotReadyAddresses: Literal[True]
    selector: dict[str, str]


class Service(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class Container(Strict):
    name: str
    image: str
    command: list[str]
    resources: dict[Literal["limits", "requests"], dict[str, str]]
    volumeMounts: list[dict[Literal["name", "mountPath"], str]]
    envFrom: list[dict[Literal["secretRef"], dict[Literal["name"], str]]] | None = None


class PodSpec(Strict):
    subdomain: str
    restartPolicy: Literal["OnFailure", "Never"]
    terminationGracePeriodSeconds: int
    containers: list[Container]
    volumes: list[dict[str, Any]]


class PodTemplate(Strict):
    metadata: dict[Literal["labels"], dict[str, str]]
    spec: PodSpec


class JobSpec(Strict):
    completionMode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoffLimit: int
    template: PodTemplate


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class Manifest(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["List"]
    items: tuple[Service, Job]


def test_a_manifest() -> None:
    words = ("image=registry/isthmus:1", "claim=shared", "secret=keys", "namespace=ml")
    options = [word for option in words for word in ("--option", option)]
    text = rendered(*options, scheduler="kubernetes", state=Path("/state"))
    manifest = Manifest.model_validate_json(text)
    service, job = manifest.items
    pod = job.spec.template.spec
    (container,) = pod.containers
    assert job.spec.completions == job.spec.parallelism == 2
    assert service.metadata.name == pod.subdomain == "isthmus-cluster-0"
    assert service.spec.selector == {"job-name": job.metadata.name}
    assert container.resources["limits"] == {"nvidia.com/gpu": "4"}
    assert container.envFrom == [{"secretRef": {"name": "keys"}}]
    assert {each["name"] for each in container.volumeMounts} == {
        each["name"] for each in pod.volumes
    }
    script = container.command[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "--control isthmus-cluster-0-0.isthmus-cluster-0:29400" in script
    assert sys.executable not in script


def test_a_name_no_pod_can_have() -> None:
    launch = Launch(
        **{**LAUNCH, "name": "Cluster_0"},  # type: ignore[arg-type]
        state=Path("/state"),
        options=(("image", "i"), ("claim", "c")),
    )
    with pytest.raises(UserError, match="'Cluster_0' cannot name a pod"):
        kubernetes.render(launch)


# -- several nodes, and leaving -------------------------------------------------------------------


def until(condition: Any) -> None:
    deadline = time.monotonic() + 100.0  # only a hang is that long
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_node_says_that_it_waits_for_its_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def nobody(host: str, port: int) -> Any:
        tries.append(port)
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(agents, "AgentForkServer", contextlib.nullcontext)
    monkeypatch.setattr(agents.ControlStore, "connect", nobody)
    monkeypatch.setattr(agents, "MAX_RECONNECT_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        agents.serve_node("head", 29400, lambda: len(tries) == 9)
    assert caplog.messages == ["no service at head:29400; this node waits for it"] * 4


def test_two_nodes_make_one_group(start: Any, setup: Any, warm: Any, tmp_path: Path) -> None:
    """Agents that come by themselves, one killed in between; the same bytes as on one machine."""
    port = free_port()
    words = ("datacenter", "agent", "--control", f"127.0.0.1:{port}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    agents = [forked.start(words, tmp_path, environment) for _ in range(2)]
    try:
        driver = start(ranks=1, nodes=Nodes(count=2, host="127.0.0.1", port=port))
        made = setup("Table", {"dropout": 0.2}, zero_stage=3)
        for one in (driver, warm):
            one.open("nodes", made)
        assert driver.train("nodes", 0, 4, hand_back=True) is not None
        warm.train("nodes", 0, 4)
        group = driver.service.group
        pids = driver.run(group.rank_pids())
        os.kill(pids[1], signal.SIGKILL)
        _, blob = driver.train("nodes", 4, 8, hand_back=True)
        assert blob == warm.train("nodes", 4, 8, hand_back=True)[1]
        # A node that is told to go tells the service, which ends in good order.
        os.kill(agents[0][0].pid, signal.SIGTERM)
        until(lambda: driver.run(group.is_leave_requested()))
    finally:
        for process, _ in agents:
            process.kill()
            process.join()


def test_a_service_that_is_told_to_leave(tmp_path: Path) -> None:
    words = ("datacenter", "launch", "--ranks", "1", "--server", "127.0.0.1:1")
    service, said = forked.start((*words, "--state", str(tmp_path)), tmp_path, os.environ)
    until(lambda: list(tmp_path.glob("logs/*/attempt_0/*/stderr.log")))
    os.kill(service.pid, signal.SIGUSR1)
    service.join()
    assert service.exitcode == 0
    assert "told to leave: idle" in os.read(said.fileno(), 1 << 16).decode()


def test_a_round_that_runs_may_end(start: Any, setup: Any) -> None:
    driver = start(ranks=1)
    driver.open("leaving", setup("Table"))

    async def work() -> int:
        train = link_pb2.TrainSteps(run_id="leaving", until_step=20)
        request = link_pb2.Request(id="last", train_steps=train)
        running = asyncio.create_task(driver.service.work(request, None, lambda progress: None))
        while not driver.service.running:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        assert not running.done()
        driver.service.leave(1000.0)
        await driver.service.wait_to_leave()
        assert running.done()
        late = link_pb2.Request(id="late", train_steps=train)
        with pytest.raises(TimeoutError):  # whoever refused would be asked again, and again
            await asyncio.wait_for(driver.service.work(late, None, lambda progress: None), 0.1)
        return running.result()[0].trained.steps

    assert driver.run(work()) == 20
