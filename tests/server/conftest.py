"""Participants on a real link over loopback, and whole runs with them."""

import pytest
from tests.server.deployment import NAMES, Deployment, SimulatedDatacenter
from tests.server.loopback import LoopbackNetwork
from tests.server.waiting import Timeouts

from isthmus.wire import link_pb2
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts


@pytest.fixture
async def network():
    """A network without a link; `await network.listen()` first."""
    network = LoopbackNetwork()
    yield network
    await network.close()


@pytest.fixture
async def timeouts(monkeypatch):
    """`await timeouts.expire(77)`: waits of 77 seconds end now."""
    return Timeouts(monkeypatch)


@pytest.fixture
def deployment(network, make_job, write_task, tmp_path):
    """A deployment without devices; `await deployment.start()` first."""
    deployment = Deployment(network, make_job, write_task, tmp_path)
    yield deployment
    deployment.close()


@pytest.fixture
def run_with_datacenter(deployment, network):
    """A run with three devices and a simulated datacenter: its store, coordinator, datacenter."""

    async def run_with_datacenter(*overrides, names=NAMES):
        await deployment.start(names=names)
        settings = (f"federated.clients={len(names)}", "datacenter.ranks=1", *overrides)
        store = deployment.create_run("run", *settings)
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        datacenter = SimulatedDatacenter(coordinator.model.layout)
        await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
        return store, coordinator, datacenter

    return run_with_datacenter
