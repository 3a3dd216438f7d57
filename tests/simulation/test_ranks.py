"""A simulation whose devices are trained by the ranks of torchrun: real processes of one machine.

GPUs, several machines, Slurm and Kubernetes are not tested.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.distributed import TCPStore

from isthmus.errors import CannotContinue, UserError
from isthmus.system.channel import Channel, framed
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.store import Store
from isthmus_simulation import commands, rank_crew
from isthmus_simulation.rank_description import RankDescription
from isthmus_simulation.rank_greeting import greeted, introduce
from isthmus_simulation.rank_place import KEY_VARIABLE, RankPlace
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


@contextlib.contextmanager
def connected(family):
    """Both ends of a connection, over TCP or a Unix socket of this user."""
    if family == socket.AF_UNIX:
        own, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            other = socket.create_connection(listener.getsockname())
            own, _ = listener.accept()
    with own, other:
        yield own, other


@pytest.mark.parametrize(
    "sent",
    [
        b'{"rank": 1}',
        b'{"rank": "one", "about": {}}',
        b'{"rank": 1, "about": {"host": "' + b"a" * (1 << 16) + b'"}}',
        b"[1]",
        b"[" * 60_000,
        b"no JSON",
    ],
)
def test_what_is_no_greeting_is_no_rank(sent):
    with connected(socket.AF_UNIX) as (own, other):
        Channel(other).send(sent)
        assert greeted(own, None) is None


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_rank_and_the_coordinator_know_each_other(key):
    family = socket.AF_UNIX if key is None else socket.AF_INET
    with connected(family) as (own, other), ThreadPoolExecutor(1) as thread:
        introducing = thread.submit(introduce, other, key, 1, {"host": "a"})
        assert greeted(own, key) == (1, {"host": "a"})
        introducing.result()


def test_a_program_without_the_key_is_neither_coordinator_nor_rank():
    """It knows all that was said before."""
    with connected(socket.AF_INET) as (own, other), ThreadPoolExecutor(1) as thread:
        introducing = thread.submit(introduce, other, b"k" * 32, 1, {})
        assert greeted(own, b"o" * 32) is None
        own.close()
        with pytest.raises(UserError, match="rank 1 found another program in the place of rank 0"):
            introducing.result()
    for proof in ("\ud800", "é", 7, None):
        with connected(socket.AF_INET) as (own, other), ThreadPoolExecutor(1) as thread:
            Channel(own).send(json.dumps({"number": "0", "proof": proof}).encode())
            introducing = thread.submit(introduce, other, b"k" * 32, 1, {})
            with pytest.raises(UserError, match="another program in the place of rank 0"):
                introducing.result()
    with connected(socket.AF_INET) as (own, other), ThreadPoolExecutor(1) as thread:
        greeting = thread.submit(greeted, own, b"k" * 32)
        channel = Channel(other)
        channel.send(json.dumps({"number": "0"}).encode())
        said = json.loads(channel.receive())
        # What the coordinator proved is no proof of a rank.
        channel.send(json.dumps({"rank": 1, "about": {}, "proof": said["proof"]}).encode())
        assert greeting.result() is None


def test_a_greeting_that_was_changed_on_its_way_is_refused():
    with (
        connected(socket.AF_INET) as (own, between),
        connected(socket.AF_INET) as (end, other),
        ThreadPoolExecutor(2) as threads,
    ):
        introducing = threads.submit(introduce, other, b"k" * 32, 1, {"host": "a"})
        greeting = threads.submit(greeted, own, b"k" * 32)
        Channel(between).send(Channel(end).receive())
        Channel(end).send(Channel(between).receive())
        hello = json.loads(Channel(end).receive())
        Channel(between).send(json.dumps({**hello, "rank": 2}).encode())
        assert greeting.result() is None
        introducing.result()


ANOTHER_USER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + sys.argv[1])
os.setuid(65534)
listener.listen()
print("listens", flush=True)
connected, _ = listener.accept()
connected.recv(1)
with socket.socket(socket.AF_UNIX) as outsider:
    outsider.connect(chr(0) + sys.argv[2])
    outsider.sendall(bytes.fromhex(sys.argv[3]))
    outsider.recv(1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
def test_another_user_is_neither_coordinator_nor_rank():
    name, own_name = (f"isthmus-test-{secrets.token_hex(8)}" for _ in range(2))
    hello = framed(b'{"rank": 1, "about": {}}').hex()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{own_name}")
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-c", ANOTHER_USER, name, own_name, hello], stdout=subprocess.PIPE
        ) as other:
            assert other.stdout.readline() == b"listens\n"
            with socket.socket(socket.AF_UNIX) as connected_to:
                connected_to.connect(f"\0{name}")
                with pytest.raises(UserError, match="another user has written into the store"):
                    introduce(connected_to, None, 1, {})
            accepted, _ = listener.accept()
            with accepted:
                assert greeted(accepted, None) is None


@pytest.mark.parametrize("ranks_here", ["2", "1"])
def test_nobody_who_reads_or_writes_the_store_gets_a_rank(ranks_here, monkeypatch):
    """What the store has is an address and no secret; another address leads to no coordinator."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": ranks_here,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        KEY_VARIABLE: "k" * 64,
    }
    place = RankPlace.of(variables)
    place.check_key()
    listener, _store = place.listen()
    with listener:
        (key,) = [each for each in store.list_keys() if each.endswith("/coordinator")]
        found = json.loads(store.get(key))
        assert set(found) == ({"name"} if ranks_here == "2" else {"host", "port"})
        with place.connect() as rank, ThreadPoolExecutor(1) as thread:
            introducing = thread.submit(introduce, rank, place.key, 1, {})
            accepted, _ = listener.accept()
            with accepted:
                assert greeted(accepted, place.key) == (1, {})
            introducing.result()
        with connected(socket.AF_INET) as (own, other):
            own.close()
            with pytest.raises((EOFError, UserError)):
                introduce(other, place.key, 1, {})
        for poisoned in (b"{", b"[]", b'{"name": 3, "port": "x"}', b"[" * 5000):
            store.set(key, poisoned)
            with pytest.raises(UserError, match=r"rank 0 (found something else than an addr|at)"):
                place.connect()


def test_ranks_of_several_machines_need_a_key():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(
        UserError, match="several machines need the variable ISTHMUS_SIMULATION_KEY"
    ):
        RankPlace.of(variables).check_key()
    with pytest.raises(UserError, match="has 31 characters; set it to at least 32 random ones"):
        RankPlace.of(variables | {KEY_VARIABLE: "k" * 31})
    place = RankPlace.of(variables | {KEY_VARIABLE: "k" * 32})
    place.check_key()
    assert "k" * 32 not in repr(place)
    RankPlace.of(variables | {"LOCAL_WORLD_SIZE": "2"}).check_key()


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
