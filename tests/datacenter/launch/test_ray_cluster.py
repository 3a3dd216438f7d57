"""Datacenters and simulations on a real Ray of this machine, with two nodes that ask for a token.

Several machines and GPUs are not tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import HERE, wait_until
from tests.datacenter.launch.real_ray import RayCluster
from tests.datacenter.test_several_datacenters import ArrivalClock
from tests.machine import needs_ray

from isthmus.job import Job
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

pytestmark = needs_ray

ROUNDS = 3
PYTHON = """#!/bin/sh
module="$2"; shift 2
case "$module" in
  isthmus.cli) exec "{folder}/isthmus" "$@";;
  torch.distributed.run) exec "{folder}/torchrun" "$@";;
esac
"""
DRIVER = """
import sys
sys.executable = sys.argv.pop(1)  # what nodes run
sys.argv[0] = "isthmus"
from isthmus import cli
cli.main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        started = RayCluster(Path(folder))
        yield started
        started.close()


@pytest.fixture
def launch(cluster: RayCluster, forked_commands: Any, tmp_path: Path) -> Iterator[Any]:
    """Start a driver; its nodes run commands that do not import PyTorch anew, unless they should.

    Drivers are killed at the end of the test.
    """
    python = tmp_path / "python"
    python.write_text(PYTHON.format(folder=forked_commands.folder))
    python.chmod(0o755)
    drivers: list[subprocess.Popen[str]] = []

    def start(*words: Any, anew: bool = False, **environment: str) -> subprocess.Popen[str]:
        executable = sys.executable if anew else str(python)
        where = ("--scheduler", "ray", "--option", f"address={cluster.address}")
        drivers.append(
            subprocess.Popen(
                [sys.executable, "-c", DRIVER, executable, *map(str, words), *where],
                env=cluster.environment | environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


def datacenter(state: Path, port: int, *options: str) -> list[str]:
    words = ["datacenter", "launch", "--server", f"127.0.0.1:{port}", "--name", "dc"]
    words += ["--ranks", "1", "--nodes", "2", "--state", str(state)]
    return words + [word for option in options for word in ("--option", option)]


@pytest.fixture(scope="module")
def job(make_setup: Any) -> Job:
    """Rounds in one datacenter with whatever ranks it has, whose parameters are sharded."""
    job: Job = make_setup("Table", {"dropout": 0.2}, ranks=0, steps=4, zero_stage=3).job
    strategy = job.strategy.model_copy(update={"policy": "datacenter"})
    time = job.time.model_copy(update={"join_seconds": 600.0})
    return job.model_copy(update={"rounds": ROUNDS, "strategy": strategy, "time": time})


async def nothing(_round: int) -> None:
    """Before a round."""


async def trained(
    job: Job,
    directory: Path,
    start: Callable[[int], Any],
    before: Callable[[int], Awaitable[None]] = nothing,
) -> list[str]:
    """The SHA-256 of each round that the datacenter trains which `start` starts for a port."""
    store = Store.create(directory, job, HERE)
    link = Link(job.time.lease_seconds)
    start(await link.start())

    async def arrived() -> None:
        await before(store.run_state().round + 1)
        assert await coordinator.roster.wait_for(datacenters=["dc"])

    coordinator = Coordinator(RunParts.of(store, link, clock=ArrivalClock(arrived)))
    try:
        await coordinator.run()
        return [str(record.model_sha256) for record in read_report(store).rounds]
    finally:
        await link.stop()
        store.close()


@pytest.fixture(scope="module")
def local(job: Job, forked_commands: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The SHA-256 of each round on two ranks that the local launcher has started."""
    folder = tmp_path_factory.mktemp("local")
    words = ["isthmus", "datacenter", "launch", "--name", "dc", "--ranks", "2"]
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> None:
        where = ["--server", f"127.0.0.1:{port}", "--state", str(folder / "state")]
        started.append(
            subprocess.Popen([*words, *where], cwd=folder, env=forked_commands.environment())
        )

    try:
        return asyncio.run(trained(job, folder / "run", start))
    finally:
        for process in started:
            process.terminate()
            process.wait()


async def test_two_nodes_give_the_bits_of_the_local_launcher(
    job: Job, local: list[str], launch: Any, tmp_path: Path
) -> None:
    state = tmp_path / "it's state"
    drivers = list[Any]()
    sums = await trained(
        job,
        tmp_path / "run",
        lambda port: drivers.append(launch(*datacenter(state, port, "gpus=0"))),
    )
    assert sums == local
    drivers[0].send_signal(signal.SIGTERM)
    out, err = await asyncio.to_thread(drivers[0].communicate)
    assert (drivers[0].returncode, out) == (0, "ray: the nodes left\n"), err
    logs = sorted(state.glob("ray-*-*.log"))
    assert [log.name.rpartition("-")[2] for log in logs] == ["0.log", "1.log"]
    assert {path.stat().st_mode & 0o777 for path in (*logs, state / "launch-ray.sh")} == {0o600}
    assert "leaving" in logs[0].read_text()
    assert list((state / "logs").glob("*/attempt_0/*/stderr.log"))


async def test_a_lost_node_is_replaced_and_the_bits_stay(
    job: Job, local: list[str], launch: Any, cluster: RayCluster, tmp_path: Path
) -> None:
    drivers = list[Any]()

    async def lose(round_: int) -> None:
        if round_ == 2:
            await asyncio.to_thread(cluster.ask, "kill")
            await asyncio.to_thread(cluster.ask, "add")

    sums = await trained(
        job,
        tmp_path / "run",
        lambda port: drivers.append(launch(*datacenter(tmp_path / "state", port, "gpus=0"))),
        lose,
    )
    assert sums == local
    drivers[0].send_signal(signal.SIGTERM)
    _, err = await asyncio.to_thread(drivers[0].communicate)
    assert " was lost; it starts again (1 of 100)" in err


def processes_of(text: str) -> set[int]:
    """Processes whose command line, or that of the process they were forked from, has a text."""
    found = set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.add(int(folder.name))
    return found


def test_a_driver_that_is_killed_leaves_nothing(launch: Any, tmp_path: Path) -> None:
    """Neither ranks nor a claim to the nodes, which the next launch gets."""
    state = tmp_path / "state"
    driver = launch(*datacenter(state, 1, "gpus=0"), anew=True)
    wait_until(lambda: len(list((state / "logs").glob("*/attempt_0/*/stderr.log"))) == 2)
    assert len(processes_of(str(state))) > 6  # script, service, agent and rank
    driver.kill()
    wait_until(lambda: not processes_of(str(state)))
    again = launch(*datacenter(state, 1, "gpus=0"))
    wait_until(lambda: len(list(state.glob("ray-*-*.log"))) == 4)
    again.send_signal(signal.SIGTERM)
    again.send_signal(signal.SIGINT)  # another signal: two of one kind may arrive as one
    _, err = again.communicate()
    assert again.returncode == 1
    assert err.endswith(
        "the nodes were ended at once; the same command continues from what is stored\n"
    )
    wait_until(lambda: not processes_of(str(state)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("wait=1",),
            "isthmus: Ray found no room within 1 s: asked for 2 nodes with 1 CPU and 1 GPU each on "
            "different machines; its machines are 2 with 2 CPU, of which 4 CPU are free; there are "
            "no GPUs: train on processors with --option gpus=0",
        ),
        (
            ("wait=1", "gpus=0", "cpus=3"),
            "isthmus: Ray found no room within 1 s: asked for 2 nodes with 3 CPU each on different "
            "machines; its machines are 2 with 2 CPU, of which 4 CPU are free; ask for less, or ",
        ),
    ],
)
def test_a_cluster_without_room_is_one_sentence(
    launch: Any, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    driver = launch(*datacenter(tmp_path / "state", 1, *options))
    out, err = driver.communicate()
    assert (driver.returncode, out) == (1, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1
    assert not (tmp_path / "state/launch-ray.env").exists()


def test_a_cluster_that_cannot_be_joined_is_one_sentence(
    launch: Any, cluster: RayCluster, tmp_path: Path
) -> None:
    driver = launch(*datacenter(tmp_path / "state", 1, "gpus=0"), RAY_AUTH_MODE="disabled")
    _, err = driver.communicate()
    assert err.startswith("isthmus: there is no Ray cluster at ")
    assert err.endswith("; where it asks for a token, set RAY_AUTH_MODE=token here too\n")
    assert err.count("\n") == 1


def test_a_simulation_on_two_nodes_has_the_bits_of_one_process(
    launch: Any, write_task: Any, tmp_path: Path
) -> None:
    write_task()
    (tmp_path / "job.toml").write_text(
        'name = "table"\nrounds = 2\n[task]\nsource = "task.py:Learn"\n[strategy]\n'
        'policy = "federated"\n[federated]\ncohort = 5\nlocal_steps = 3\nbatch_size = 4\n'
        'secure_aggregation = false\n[simulation]\nclients = 7\ntraining = "one-by-one"\n'
    )
    run = tmp_path / "runs/table"
    words = ("simulate", tmp_path / "job.toml", "--run-dir", run, "--ranks", 1, "--nodes", 2)
    driver = launch(*words, "--option", "gpus=0")
    drawn = run / "launch-ray.env"
    wait_until(lambda: drawn.exists() or driver.poll() is not None)
    assert drawn.stat().st_mode & 0o777 == 0o600
    key = drawn.read_text().strip().partition("=")[2]
    assert len(key) == 64
    assert driver.communicate()[0] == "ray: all nodes ended\n"
    assert not drawn.exists()
    assert key not in (run / "launch-ray.sh").read_text()
    shutil.rmtree(tmp_path / "alone", ignore_errors=True)
    from isthmus_simulation import commands
    from isthmus_simulation.run import Simulation
    from isthmus_simulation.virtual_time import VirtualTimeLoop

    job = commands.loaded_job(tmp_path / "job.toml", ("simulation.processes=1",))
    alone = Simulation.new(job, tmp_path, tmp_path / "alone")
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(alone.run())
    sums = []
    for directory in (run, tmp_path / "alone"):
        store = Store.open(directory)
        sums.append(read_report(store).final.model_sha256)
        store.close()
    assert sums[0] == sums[1]
