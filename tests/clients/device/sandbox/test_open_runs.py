"""Runs that a device keeps in memory at a time, for jobs that take turns on it."""

import pytest
import torch
from tests import forked_tasks
from tests.clients.device.sandbox.test_process_host import Device, opening, train

from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits


@pytest.fixture(autouse=True)
def _forked():
    with forked_tasks.forked_from_tests():
        yield


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
