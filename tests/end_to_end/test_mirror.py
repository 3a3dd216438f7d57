"""Devices get the models of rounds from a web server that the server fills, each a real process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import JOB, TASK
from tests.end_to_end.loopback_fleet import LoopbackFleet
from tests.static_https import StaticHttps, static_https

from isthmus_server.mirror.place import MARKER

CHANGES = (
    *("federated.clients=0", "datacenter.ranks=0", "federated.cohort=2", "federated.quorum=2"),
    *("federated.secure_aggregation=false", "strategy.policy=federated", "strategy.schedule=[]"),
    *("rounds=2", "time.lease_seconds=10"),
)
LARGE = TASK.replace(
    "nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)",
    "nn.Linear(8, 9000), nn.Tanh(), nn.Linear(9000, 3)",
)
SIZE = 4 * (8 * 9000 + 9000 + 3 * 9000 + 3)
"""Bytes of a model's parameters."""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaticHttps]:
    """A web server with the folder of the mirror, which devices trust."""
    with static_https(tmp_path / "www", tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


def trained(folder: Path, web: StaticHttps | None, policy: str = "") -> tuple[list[str], int, str]:
    """Digests of the models of a job, the bytes of blobs to devices, and a device's log."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/task.py").write_text(LARGE)
    (folder / "job.toml").write_text(JOB)
    serving = ["--address", "127.0.0.1:0"]
    if web is not None:
        serving += ["--mirror", f"file:{web.folder}", "--mirror-url", web.address]
    policies = {f"phone-{index}": policy for index in range(2)}
    owners = "clients_min = 2\nsecure_aggregation = false"
    with LoopbackFleet(folder, 2, policies, serving=serving, privacy=owners) as fleet:
        job = fleet.submit("job.toml", *CHANGES)
        fleet.until(lambda: fleet.committed(job) == 2)
        report: dict[str, Any] = json.loads(
            fleet.run("report", str(fleet.directory(job)), "--json")
        )
        log = fleet.log("phone-0")
    sent = sum(each["bytes_out"] for row in report["rounds"] for each in row["receipts"])
    return [row["model_sha256"] for row in report["rounds"]], sent, log


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """Digests of the models of the job without a mirror, and the bytes of blobs to devices."""
    digests, sent, _ = trained(tmp_path_factory.mktemp("fleet") / "without", None)
    assert len(set(digests)) == 2
    assert sent >= 4 * SIZE  # two rounds with two devices
    return digests, sent


def test_the_model_is_that_without_a_mirror_and_none_of_it_is_on_the_link(
    tmp_path: Path, web: StaticHttps, without: tuple[list[str], int]
) -> None:
    allowed = f'server_sources = ["{web.address}*"]\n'
    mirrored, sent, log = trained(tmp_path / "with", web, allowed)
    assert (mirrored, sent) == (without[0], 0)
    assert len(web.asked) >= 4
    assert f"the mirror {web.address.split('/')[2]} gave " in log
    # The server has ended, and its models are not there any more.
    assert [path.name for path in web.folder.iterdir()] == [MARKER]


@pytest.mark.parametrize("fault", ["lies", "is not allowed"])
def test_the_link_is_what_remains(
    tmp_path: Path, web: StaticHttps, without: tuple[list[str], int], fault: str
) -> None:
    web.lies = fault == "lies"
    where = web.address if web.lies else "https://cdn.example.org/"
    mirrored, sent, log = trained(tmp_path / "with", web, f'server_sources = ["{where}*"]\n')
    assert (mirrored, sent) == without
    said = "has something else under this name" if web.lies else "is not allowed by server_sources"
    assert log.count(said) == 1
    assert bool(web.asked) == web.lies
