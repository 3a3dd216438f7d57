"""Runs that a device keeps in memory at a time, for jobs that take turns on it."""

import math
import os
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.clients.device.sandbox.test_process_host import LAYOUT, Device, opening, train
from tests.conftest import TABLE

from isthmus.errors import TaskInterrupted
from isthmus.task import packages
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits
from isthmus_clients.device.sandbox import process_host
from isthmus_clients.device.sandbox.memory_room import available_memory, memory_of_group

pytestmark = pytest.mark.usefixtures("forked_tasks")


def test_runs_that_their_owner_lets_open_keep_their_processes(tmp_path):
    """Jobs that take turns on a device do not wait for a new process in every round."""
    device = Device(tmp_path, limits=OwnerLimits(open_runs=2))
    host, processes = device.host, {}

    def open_run(name, *overrides):
        host.open(opening(*overrides, run_id=name))
        previous, processes[name] = processes.get(name), host.process
        return previous is host.process

    try:
        assert [open_run(name) for name in "abab"] == [False, False, True, True]
        expected = train(host)
        open_run("c")  # in place of a, which was used longest ago
        processes["a"].wait()
        assert not processes["b"].ended
        assert open_run("b")
        assert train(host)[1] == expected[1]
        assert not open_run("b", "seed=5")  # by another request
        host.close("c")
        processes["c"].wait()
        assert not processes["b"].ended
    finally:
        host.close()
        for process in processes.values():
            process.wait()


def install(device, author, version, factor):
    """Install a version of a task whose Python file is the same in all versions."""
    folder = device.state.with_name(f"version-{version}") / "learn"
    folder.mkdir(parents=True)
    learn = TABLE.replace('self.settings.get("lr", 0.1)', "FACTOR") + "    pass\n"
    factor_there = '(Path(__file__).parent / "factor").read_text()'
    head = f"from pathlib import Path\nFACTOR = float({factor_there})\n"
    (folder / "task.py").write_text(head + learn)
    (folder / "factor").write_text(str(factor))
    package = packages.read(packages.pack(folder, "learn", author, version))
    packages.install(package, device.tasks, [package.author])


def test_a_run_goes_on_with_the_files_that_it_was_opened_with(tmp_path):
    """Their digest at the opening is what a device signs, also for a run that was kept."""
    device = Device(tmp_path, limits=OwnerLimits(open_runs=2))
    host = device.host
    code = device.tasks / "task.py"
    written = code.read_text()
    processes = []
    try:
        for factor in (0.1, 0.2):
            code.write_text(written.replace('self.settings.get("lr", 0.1)', str(factor)))
            host.open(opening())
            processes.append((host.process, train(host)[1]))
            host.open(opening(run_id="other"))
            processes.append((host.process, b""))
        (first, update), _, (second, other_update), _ = processes
        assert first is not second
        assert update != other_update
        host.open(opening())
        assert host.process is second
        code.write_text(written)
        second.kill("for the test")
        second.wait()
        with pytest.raises(TaskInterrupted, match="were changed after the run was opened"):
            train(host)
        host.open(opening())
        assert train(host)[1] == update
    finally:
        device.close()
        for process, _ in processes:
            process.wait()


def test_a_new_version_of_a_package_is_used_by_a_run_that_is_opened_again(tmp_path):
    """Also one with other files than Python's, which the digest of the code does not contain."""
    author = Ed25519PrivateKey.generate()
    device = Device(tmp_path, limits=OwnerLimits(open_runs=2))
    host = device.host
    updates = []
    processes = []
    try:
        for version, factor in ((1, 0.1), (2, 0.0)):
            install(device, author, version, factor)
            for run_id in ("run", "other"):
                host.open(opening("task.source='learn/task.py:Learn'", run_id=run_id))
                processes.append(host.process)
                updates.append(LAYOUT.decode(bytearray(train(host)[1])).any().item())
    finally:
        device.close()
        for process in processes:
            process.wait()
    assert updates == [True, True, False, False]


@pytest.mark.parametrize(
    ("limits", "available", "kept"),
    [
        (OwnerLimits(), 1 << 40, True),
        (OwnerLimits(), 1 << 20, False),
        (OwnerLimits(memory_mb=128), 1 << 40, False),
        (OwnerLimits(open_runs=1), 1 << 40, False),
    ],
)
def test_without_a_number_runs_stay_open_as_far_as_memory_allows(
    tmp_path, monkeypatch, limits, available, kept
):
    monkeypatch.setattr(process_host, "available_memory", lambda: available)
    # So that they start below the limit of 128 MB, which the kernel would apply as well.
    monkeypatch.setattr(process_host, "memory_of_group", lambda pid: 100 << 20)
    unlimited = limits.model_copy(update={"memory_mb": None})
    device = Device(tmp_path, limits=unlimited)
    device.host._memory_limit = math.inf if limits.memory_mb is None else limits.memory_mb << 20
    processes = []
    try:
        for name in "ab":
            device.host.open(opening(run_id=name))
            processes.append(device.host.process)
        device.host.open(opening(run_id="a"))
        assert (device.host.process is processes[0]) == kept
        processes.append(device.host.process)
    finally:
        device.host.close()
        for process in processes:
            process.wait()


def test_the_memory_of_a_group_and_what_is_available_are_those_of_the_kernel(tmp_path):
    used = memory_of_group(os.getpgrp())
    (resident,) = (
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS:")
    )
    assert used > 0.9 * resident
    assert memory_of_group(-5) == 0
    group = tmp_path / "cgroup/isthmus/device"
    group.mkdir(parents=True)
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    assert available_memory(proc, tmp_path / "cgroup") == 0  # nothing is known
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (proc / "self/cgroup").write_text("0::/isthmus/device\n")
    assert available_memory(proc, tmp_path / "cgroup") == 5000 << 10
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{3000 << 10}\n")
    (group.parent / "memory.current").write_text(f"{1000 << 10}\n")
    assert available_memory(proc, tmp_path / "cgroup") == 2000 << 10
    assert available_memory() > 0


def test_a_refused_update_forgets_the_state_of_its_own_run(tmp_path):
    """Its acknowledgement may arrive after another run was opened."""
    limits = OwnerLimits(open_runs=2, personal_mb=1)
    device = Device(tmp_path, limits=limits)
    job = "exchange.personal=['bias']"
    shared, personal = (
        TensorLayout.from_shapes({name: shape})
        for name, shape in (("weight", (3, 4)), ("bias", (3,)))
    )

    def open_run(name):
        work = opening(job, run_id=name)
        work.layout, work.personal = shared.header, personal.header
        device.host.open(work)

    def train_round(request):
        payload = device.host.buffer(shared.nbytes)
        payload[:] = shared.encode(torch.zeros(shared.size))
        work = link_pb2.TrainLocal(run_id="run", round=1)
        device.host.train(request, work, payload, lambda progress: None)

    def stored():
        return sorted(
            len(list(folder.iterdir())) for folder in (tmp_path / "state/personal").iterdir()
        )

    try:
        open_run("a")
        train_round("of a")
        open_run("b")
        train_round("of b")
        open_run("a")
        assert stored() == [1, 1]
        device.host.release("of b", accepted=False)
        assert stored() == [0, 1]
    finally:
        device.close()
