"""A simulation that a scheduler starts: its script runs here, with a stand-in for srun.

The nodes are processes of this machine. A real Slurm, Kubernetes, GPUs and several machines are not
tested.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from tests.datacenter.launch.manifest import Manifest
from tests.free_ports import free_ports

from isthmus.errors import JobError, UserError
from isthmus.system.channel import Channel
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store
from isthmus_simulation import commands, rank_trainer
from isthmus_simulation.devices.messages import PieceRequest
from isthmus_simulation.rank_place import RankPlace
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

JOB = """
name = "table"
rounds = 3
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
cohort = 9  # more than there are, unless --cohort is passed on
local_steps = 3
batch_size = 4
secure_aggregation = false
[simulation]
clients = 7
training = "one-by-one"
"""

# In round 2 Slurm announces the end of the allocation; the round ends once rank 0 has heard of it.
ANNOUNCED = """
def optimizer(self, model, participant):
    import os, signal, time
    from pathlib import Path
    first = participant.round == 2 and os.environ.get("RANK") == "0"
    if first and (output := Path(os.environ["OUTPUT"])).name == "first":
        os.kill(int(os.environ["BATCH"]), signal.SIGUSR1)
        os.environ["RANK"] = "0, which has sent it"
        while "stopping" not in output.read_text():
            time.sleep(0.05)  # a file can only be polled
    return torch.optim.SGD(model, lr=0.1)
"""

SRUN = """#!/bin/bash
# A process for each node, with its number. Signals are forwarded to them; their status is written.
nodes="${1#--nodes=}"
while [[ "$1" == --* ]]; do shift; done
for ((node = 0; node < nodes; node++)); do SLURM_NODEID=$node "$@" & tasks[node]=$!; done
trap 'kill -USR1 "${tasks[@]}"' USR1
worst=0
for task in "${tasks[@]}"; do
  status=0; wait "$task" || status=$?
  while kill -0 "$task" 2>/dev/null; do status=0; wait "$task" || status=$?; done
  echo "$status" >>"$OUTPUT.statuses"
  [ "$status" = 0 ] || worst=$status
done
exit "$worst"
"""


@pytest.fixture
def folder(write_task, tmp_path):
    """A job and its task, in a folder whose name a shell has to quote."""
    place = tmp_path / "it's shared"
    place.mkdir()
    write_task(ANNOUNCED).rename(place / "task.py")
    (place / "job.toml").write_text(JOB)
    return place


def invoke(*words):
    result = CliRunner().invoke(commands.simulate, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def submitted(folder, *more, scheduler="slurm"):
    return invoke(
        *(folder / "job.toml", "--run-dir", folder / "runs/table", "--ranks", 1, "--nodes", 2),
        *("--scheduler", scheduler, "--cohort", 5, *more),
    )


def launched(folder, *more, **scheduler):
    return submitted(folder, "--dry-run", *more, **scheduler)


@pytest.fixture
def run_script(tmp_path, forked_commands):
    """Run a batch script; returns its status, its output, and the status of each node.

    Its two commands, which name this installation, are those that do not import PyTorch anew.
    """
    modules = {"torchrun": "torch.distributed.run", "isthmus": "isthmus.cli"}
    for name, text in (("srun", SRUN), ("hostname", "#!/bin/sh\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(script, name):
        output = tmp_path / name
        for program, module in modules.items():
            installed = f"{sys.executable} -m {module} "
            assert script.count(installed) == 1
            script = script.replace(installed, f"{program} ")
        (tmp_path / "script").write_text(script)
        variables = {
            "PATH": f"{tmp_path}:{forked_commands.environment()['PATH']}",
            "SLURM_JOB_ID": str(free_ports(1) - 20000),
            "OUTPUT": str(output),
        }
        start = ["bash", "-c", 'export BATCH=$$; exec bash "$0"', str(tmp_path / "script")]
        with output.open("wb") as file:
            done = subprocess.run(
                start,
                cwd="/",
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=500,
                check=False,
            )
        statuses = Path(f"{output}.statuses").read_text().split()
        return done.returncode, output.read_text(), statuses

    return run


def report_of(directory):
    store = Store.open(directory)
    try:
        return read_report(store)
    finally:
        store.close()


def test_the_same_script_begins_and_continues_a_simulation(
    folder, run_script, tmp_path, monkeypatch
):
    """Announced in round 2, continued to the end, with the bits of one process without ranks."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sbatch").write_text('#!/bin/sh\ncp "$2" "$(dirname "$0")/queued"; echo 17\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert submitted(folder) == "slurm: 17\n"
    script = (tmp_path / "queued").read_text()
    assert script == launched(folder)
    status, output, statuses = run_script(script, "first")
    assert "stopped; continue with" in output, output
    assert status != 0
    assert "0" not in statuses
    directory = folder / "runs/table"
    assert len(report_of(directory).rounds) == 2
    status, output, statuses = run_script(script, "second")
    assert status == 0, output
    assert statuses == ["0", "0"]  # both ends are known, so that no node is started again
    assert "machines: 1" in output
    job = commands.loaded_job(folder / "job.toml", ("federated.cohort=5", "simulation.processes=1"))
    alone = Simulation.new(job, folder, folder / "runs/alone")
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(alone.run())
    ended, other = report_of(directory), report_of(folder / "runs/alone")
    assert len(ended.rounds) == 3
    assert ended.final.model_sha256 == other.final.model_sha256


def test_a_run_that_has_ended_stays_as_it_is(folder):
    words = (folder / "job.toml", "--run-dir", folder / "run", "--or-resume")
    own = ("--set", "federated.cohort=5", "--set", "rounds=1", "--set", "simulation.processes=1")
    for _ in range(2):
        invoke(*words, *own)
        assert len(report_of(folder / "run").rounds) == 1
    with pytest.raises(UserError, match="has a run of another job, in another folder"):
        invoke(*words, *own, "--set", "seed=5")


def test_the_batch_script_has_the_options_and_no_secrets(folder, tmp_path):
    secrets = tmp_path / "secrets.env"
    secrets.write_text("TOKEN=hush\n")
    secrets.chmod(0o600)
    script = launched(folder, "--env-file", secrets, "--option", "partition=gpu", "--track", "otel")
    lines = script.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --requeue"} <= set(lines)
    assert "#SBATCH --job-name=isthmus-simulate-table" in lines
    assert f". {secrets}" in lines
    assert "hush" not in script
    (draw,) = [line for line in lines if line.startswith("ISTHMUS_SIMULATION_KEY=")]
    drawn = subprocess.check_output(
        ["bash", "-euc", f'{draw}; echo "${{#ISTHMUS_SIMULATION_KEY}}"']
    )
    assert drawn == b"64\n"
    assert "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank" in script
    assert "--cohort 5 --track otel --run-dir" in script
    assert not (folder / "runs").exists()


def test_the_manifest_matches_the_schema(folder):
    shared = Path("/shared")
    options = ("image=registry/isthmus:1", "claim=shared", "mount=/shared", "gpus=0")
    words = [word for option in options for word in ("--option", option)]
    text = launched(shared, *words, scheduler="kubernetes")
    service, _, job, secret = Manifest.model_validate_json(text).items
    (container,) = job.spec.template.spec.containers
    assert job.spec.completions == job.spec.parallelism == 2
    assert service.metadata.name == job.spec.template.spec.subdomain == "isthmus-simulate-table"
    assert {"name": "state", "mountPath": "/shared"} in container.volumeMounts
    assert container.resources == {"limits": {}}
    assert container.envFrom == [{"secretRef": {"name": secret.metadata.name}}]
    ((variable, key),) = secret.stringData.items()
    assert variable == "ISTHMUS_SIMULATION_KEY"
    assert key not in launched(shared, *words, scheduler="kubernetes")  # drawn for each manifest
    script = container.command[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert (
        'exec torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$JOB_COMPLETION_INDEX"' in script
    )
    assert "simulate /shared/job.toml --cohort 5 --run-dir /shared/runs/table --or-resume" in script
    assert "isthmus-simulate-table-0.isthmus-simulate-table:29400" in script
    assert sys.executable not in script


def test_options_that_do_not_belong_together_are_refused(folder):
    job, run = folder / "job.toml", folder / "run"
    run.mkdir()
    (run / "job.json").touch()
    kubernetes = ("--scheduler", "kubernetes", "--ranks", 1, "--option", "image=i")
    pods = ("/s/job.toml", *kubernetes, "--option", "claim=c", "--dry-run", "--run-dir")
    launch = (job, "--scheduler", "slurm", "--ranks", 1, "--run-dir", run)
    fits = ("--cohort", 5)
    unprintable = "has a line break or another character that is not printable"
    cases = [
        ((*launch, "--vary", "seed=1,2"), "--scheduler is for one run"),
        ((*launch, "--seeds", 2), "--scheduler is for one run"),
        ((*pods, "a"), "--run-dir a is a path in the pods of Kubernetes; make it absolute"),
        ((job, "--nodes", 2), "--nodes needs --scheduler slurm, kubernetes or ray"),
        ((job, "--dry-run"), "--dry-run needs --scheduler slurm, kubernetes or ray"),
        ((job, "--or-resume"), "--or-resume needs --run-dir"),
        ((job, "--scheduler", "slurm", "--ranks", 1), "--scheduler needs --run-dir"),
        ((job, "--scheduler", "slurm", "--run-dir", run), "--scheduler needs --ranks"),
        (("--resume", "--run-dir", run, "--scheduler", "slurm"), "--scheduler cannot be combined"),
        (("--resume", "--run-dir", run, "--or-resume"), "--or-resume cannot be combined"),
        ((*pods, "/s/A_b"), "the last part of --run-dir, 'A_b' cannot name a pod; use up to 31"),
        ((*pods, "/s/a", "--option", "mount=/t"), "--option mount=/t is where the pods have"),
        ((*pods, "/s/../a"), "--run-dir /s/../a has a part `..`; write the directory that it"),
        ((*pods, "/run1"), "the claim would be mounted at /, in place of what the image has there"),
        ((*pods, "/"), "--run-dir / is no directory of a run; name one below it"),
        ((*launch[:-1], "/"), "--run-dir / is no directory of a run; name one below it"),
        ((*pods, "/s/a", "--set", "rounds"), "--set 'rounds' is not of the form key.sub=value"),
        ((*pods, "/s/a\nb"), unprintable),
        (
            (*launch[:-1], "a\nb", *fits),
            unprintable,
        ),
        ((*launch, *fits, "--option", "signal=USR2"), "the batch script relies on; remove it"),
        (
            (*launch, *fits, "--option", "output=a"),
            "the batch script relies on; use --run-dir",
        ),
    ]
    for words, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            invoke(*words)
    personal = ("--set", "exchange.buffers=local", "--run-dir", run, "--scheduler", "slurm")
    with pytest.raises(JobError, match="keep no personal parameters"):
        invoke(job, *personal, "--ranks", 1, "--cohort", 5)


@pytest.mark.parametrize(("node", "status"), [("0", 0), ("1", 1)])
def test_a_rank_of_another_machine_fails_if_the_coordinator_ends_early(monkeypatch, node, status):
    """Else a pod would count as done, and would not be there when the simulation continues."""

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(rank_trainer, "os", SimpleNamespace(_exit=ended))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = RankPlace.of(variables | {"GROUP_RANK": node})
    with pytest.raises(SystemExit) as early:
        rank_trainer._give_up(place)
    assert early.value.code == status
    own, other = socket.socketpair()
    with own, other:
        Channel(other).send(PieceRequest("end").encode())
        with pytest.raises(SystemExit) as told:
            rank_trainer._serve(Channel(own), Path(), "cpu")
    assert told.value.code == 0
