"""A server that lies to five devices, which keep their history."""

import pytest
from tests.server.regimes.lying_server import LyingServer
from tests.server.regimes.secure_run import NAMES, SecureRun
from tests.server.waiting import wait_until

from isthmus_clients.training.history_files import EMPTY, write_head


@pytest.fixture
async def server(network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    job = make_job(
        "federated.cohort=5",
        "federated.quorum=4",
        "federated.secure_aggregation=true",
    )
    run = SecureRun(network, job, tmp_path)
    await run.open()
    for name, device in run.devices.items():
        device.agent._secure._history_file = tmp_path / f"{name}.log"
        write_head(tmp_path / f"{name}.log", EMPTY)
        device.agent._secure._credentials = None
    await wait_until(lambda: set(NAMES) <= network.link.peers.keys())
    return LyingServer(run)
