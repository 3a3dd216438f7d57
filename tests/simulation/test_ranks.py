"""A simulation whose devices are trained by the ranks of torchrun: real processes of one machine.

GPUs, several machines, Slurm and Kubernetes are not tested.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from isthmus.errors import CannotContinue, UserError
from isthmus.system.channel import Channel
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store
from isthmus_simulation import commands, rank_crew
from isthmus_simulation.rank_description import RankDescription
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
cohort = 5
local_steps = 3
batch_size = 4
secure_aggregation = {secure}
[simulation]
clients = 7
training = "{training}"
"""

COMPRESSION = """
[federated.compression]
bits = 2
one_in = 2
"""

INSTALLED = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

KILLS = """
def optimizer(self, model, participant):
    import os, signal
    from pathlib import Path
    marker, rank = Path("/proc/self/cwd/killed"), os.environ.get("RANK")
    if participant.round == 2 and rank == "{rank}" and not marker.exists():
        marker.touch()
        os.kill({pid}, signal.{signal})
    elif participant.round == 2 and rank == os.environ.get("WAITS", "nobody"):
        signal.pause()
    return torch.optim.SGD(model, lr=0.1)
"""


@pytest.fixture
def written(write_task, tmp_path):
    """Write a job and its task."""

    def write(training="one-by-one", methods="pass", secure="false", more=""):
        write_task(methods)
        text = JOB.format(training=training, secure=secure)
        (tmp_path / "job.toml").write_text(text + more)

    return write


@pytest.fixture
def command(tmp_path):
    """Run a command; it returns once all processes have ended that have its output."""

    def run(*arguments, **environment):
        return subprocess.run(
            arguments,
            cwd=tmp_path,
            env=INSTALLED | environment,
            timeout=200,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def simulate(command):
    """Simulate `job.toml` with a command; all that its processes have printed is returned."""

    def run(*arguments, run_dir, start=(), **environment):
        simulation = ["isthmus", "simulate", *arguments, "--run-dir", run_dir]
        return command(*start, *simulation, **environment)

    return run


@pytest.fixture
def forked(forked_commands):
    """Variables with which commands do not import PyTorch anew, and are no children of others."""
    return {"PATH": forked_commands.environment()["PATH"]}


def torchrun(ranks):
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]


@pytest.fixture
def simulated_here(tmp_path):
    """Simulate `job.toml` in this process, which trains all devices."""

    def run(run_dir):
        job = commands.loaded_job(tmp_path / "job.toml", ("simulation.processes=1",))
        simulation = Simulation.new(job, tmp_path, tmp_path / run_dir)
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(simulation.run())

    return run


def report_of(directory):
    with contextlib.closing(Store.open(directory)) as store:
        return read_report(store)


def test_the_number_of_ranks_changes_no_bit(simulate, simulated_here, written, forked, tmp_path):
    """None, one without torchrun, and two of which one is lost: the run is resumed.

    It is lost while the other rank trains for ever, so that nobody may wait for that.

    Also with residuals of compressed updates, and with the sums of secure aggregation.
    """
    kills = KILLS.format(rank=1, pid="os.getpid()", signal="SIGKILL")
    written(methods=kills, secure="true", more=COMPRESSION)
    stopped = simulate("job.toml", run_dir="two", start=torchrun(2), WAITS="0", **forked)
    assert stopped.returncode != 0
    (sentence,) = [line for line in stopped.stderr.splitlines() if line.startswith("isthmus: ")]
    assert sentence.startswith(f"isthmus: rank 1 on {socket.gethostname()} of the simulation has")
    assert sentence.endswith("/two` continues")
    assert len(report_of(tmp_path / "two").rounds) == 1
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    for done in (
        simulate("--resume", run_dir="two", start=torchrun(2), **forked),
        simulate("job.toml", run_dir="one", **variables, **forked),
    ):
        assert done.returncode == 0, done.stderr
    simulated_here("none")
    digests = {report_of(tmp_path / name).final.model_sha256 for name in ("two", "one", "none")}
    assert len(digests) == 1


def test_stacked_devices_in_ranks_differ_by_rounding_only(
    simulate, simulated_here, written, forked, tmp_path
):
    """Other numbers of processes make other stacks."""
    written(training="stacked")
    done = simulate("job.toml", run_dir="ranks", start=torchrun(2), **forked)
    assert done.returncode == 0, done.stderr
    simulated_here("none")
    models = []
    for name in ("ranks", "none"):
        parts = load_model(tmp_path / name).parameters()
        models.append(torch.cat([part.flatten() for part in parts]))
    torch.testing.assert_close(*models, rtol=0, atol=1e-6)


def test_all_processes_end_with_the_coordinator(simulate, written, tmp_path):
    written(methods=KILLS.format(rank=0, pid="os.getppid()", signal="SIGKILL"))
    killed = simulate("job.toml", run_dir="killed-run", start=torchrun(2))
    assert killed.returncode != 0
    assert len(report_of(tmp_path / "killed-run").rounds) == 1


def test_a_simulation_ends_after_its_round_when_torchrun_is_told_to_end(
    simulate, written, tmp_path
):
    torchrun_id = "int(Path(f'/proc/{os.getppid()}/stat').read_text().split()[3])"
    written(methods=KILLS.format(rank=0, pid=torchrun_id, signal="SIGTERM"))
    stopped = simulate("job.toml", run_dir="stopped", start=torchrun(1))
    assert stopped.returncode != 0
    assert "stopped; continue with  isthmus simulate --resume" in stopped.stderr
    assert len(report_of(tmp_path / "stopped").rounds) == 2


def test_a_lost_rank_is_named_while_signals_are_handled(written, tmp_path, monkeypatch):
    """Else the SIGTERM by which torchrun then ends the other ranks could come first."""
    written()
    handlers = []

    async def lost(self, observers):
        self.store.close()
        raise CannotContinue("rank 1 has ended")

    def show(error, then):
        handlers.append(signal.getsignal(signal.SIGTERM))
        return 1

    monkeypatch.setattr(Simulation, "run", lost)
    monkeypatch.setattr(commands, "show", show)
    arguments = [str(tmp_path / "job.toml"), "--run-dir", str(tmp_path / "run")]
    assert CliRunner().invoke(commands.simulate, arguments).exit_code == 1
    (handler,) = handlers
    assert handler != signal.SIG_DFL


def test_ranks_with_other_code_of_the_task_are_refused(command, written, forked, tmp_path):
    written()
    for rank in (0, 1):
        folder = tmp_path / f"machine-{rank}"
        folder.mkdir()
        for name in ("job.toml", "task.py"):
            (folder / name).write_bytes((tmp_path / name).read_bytes())
    with (tmp_path / "machine-1/task.py").open("a") as file:
        file.write("# other\n")
    start = "cd machine-$RANK; exec isthmus simulate job.toml --run-dir run"
    done = command(*torchrun(2), "bash", "-c", start, **forked)
    assert done.returncode != 0
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("isthmus: ")]
    assert "has other code of the task than rank 0" in sentence
    assert not (tmp_path / "machine-0/run").exists()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("version", "rank 1 on b has Isthmus other and rank 0 on a has 1"),
        ("torch", "rank 1 on b has PyTorch other and rank 0 on a has 2"),
        ("job", "rank 1 on b has loaded another job than rank 0 on a"),
        ("task", "rank 1 on b has other code of the task than rank 0 on a"),
        ("device", "rank 1 on b trains on other and rank 0 on a on cpu"),
    ],
)
def test_a_rank_that_differs_is_refused(changed, sentence):
    first = RankDescription("1", "2", "job", "task", "a")
    other = dataclasses.replace(first, host="b")
    other.check(1, first)
    with pytest.raises(UserError, match=sentence):
        dataclasses.replace(other, **{changed: "other"}).check(1, first)
    with pytest.raises(UserError, match="another version of Isthmus"):
        RankDescription.read({**vars(other), "later": 1})


@pytest.mark.parametrize(
    ("sent", "greeted"),
    [
        ({"token": "right", "rank": 1, "about": {"host": "a"}}, (1, {"host": "a"})),
        ({"token": "wrong", "rank": 1, "about": {}}, None),
        ({"token": "right", "rank": 1}, None),
        ({"token": "right", "rank": 1, "about": {"host": "a" * (1 << 16)}}, None),
    ],
)
def test_only_ranks_of_this_start_are_greeted(sent, greeted):
    own, other = socket.socketpair()
    with own, other:
        Channel(other).send(json.dumps(sent).encode())
        assert rank_crew._greeted(own, "right") == greeted


def test_a_deeply_nested_message_is_not_greeted():
    own, other = socket.socketpair()
    with own, other:
        Channel(other).send(b"[" * 60_000)
        assert rank_crew._greeted(own, "right") is None


def test_jobs_and_variables_that_ranks_cannot_use_are_refused(written, tmp_path, monkeypatch):
    written()
    environment = {"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UserError, match="WORLD_SIZE of the environment is 'two'"):
        RankPlace.of(environment)
    assert RankPlace.of({}) is None
    place = RankPlace.of(environment | {"WORLD_SIZE": "1"})
    job = commands.loaded_job(tmp_path / "job.toml", ("exchange.buffers=local",))
    with pytest.raises(UserError, match="the ranks of a simulation keep no personal parameters"):
        rank_crew.crew_or_train(place, job, tmp_path / "job.toml", None)
