"""Devices put their updates into a store, where the server gets them, each a real process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import JOB
from tests.end_to_end.loopback_fleet import LoopbackFleet
from tests.end_to_end.test_mirror import CHANGES, LARGE, SIZE
from tests.free_ports import free_ports
from tests.s3_server import BUCKET, S3Server, s3_server

pytest.importorskip("moto", reason="moto is not installed; pip install 'moto[s3,server]'")
pytest.importorskip("boto3", reason="boto3 is not installed; pip install boto3")

MARKER = "updates/isthmus-uploads"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store, which the processes of the fleet find."""
    with s3_server(tmp_path / "s3-keys") as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        yield served


def fleet_in(folder: Path, s3: S3Server | None, policy: str = "") -> LoopbackFleet:
    """A server with a store, and two devices."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/task.py").write_text(LARGE)
    (folder / "job.toml").write_text(JOB)
    # Below the ports of connections: the server may be started again at its port.
    serving = ["--address", f"127.0.0.1:{free_ports(2)}"]
    if s3 is not None:
        serving += ["--uploads", f"s3:{BUCKET}/updates"]
    policies = {f"phone-{index}": policy for index in range(2)}
    owners = "clients_min = 2\nsecure_aggregation = false"
    return LoopbackFleet(folder, 2, policies, serving=serving, privacy=owners)


def digests(fleet: LoopbackFleet, job: str) -> list[str]:
    """Digests of the models of a job."""
    report: dict[str, Any] = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
    received = {each["bytes_in"] for row in report["rounds"] for each in row["receipts"]}
    assert min(received) >= SIZE
    return [row["model_sha256"] for row in report["rounds"]]


def trained(folder: Path, s3: S3Server | None, policy: str = "") -> tuple[list[str], str, str]:
    """Digests of the models of a job, and the logs of the server and of a device."""
    with fleet_in(folder, s3, policy) as fleet:
        job = fleet.submit("job.toml", *CHANGES)
        fleet.until(lambda: fleet.committed(job) == 2)
        return digests(fleet, job), fleet.log("server"), fleet.log("phone-0")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the models of the job without a store."""
    found, _, _ = trained(tmp_path_factory.mktemp("fleet") / "without", None)
    assert len(set(found)) == 2
    return found


def allowed(s3: S3Server) -> str:
    """The policy of an owner who allows the store."""
    return f'server_uploads = ["https://127.0.0.1:{s3.port}/{BUCKET}/*"]\n'


def test_the_model_is_that_without_a_store_and_nothing_is_left_there(
    tmp_path: Path, s3: S3Server, without: list[str]
) -> None:
    folder = tmp_path / "with"
    stored, server, device = trained(folder, s3, allowed(s3))
    assert stored == without
    assert len(s3.put) == 4  # two rounds with two devices
    assert s3.keys == [MARKER]
    assert f"the store 127.0.0.1:{s3.port}: an update of" in device
    for secret in ("X-Amz", *(path.rpartition("/")[2] for path in s3.put)):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                assert secret.encode() not in path.read_bytes(), path
        assert secret not in server + device


@pytest.mark.parametrize("fault", ["refuses", "is not allowed"])
def test_the_link_is_what_remains(
    tmp_path: Path, s3: S3Server, without: list[str], fault: str
) -> None:
    s3.refuses = fault == "refuses"
    policy = allowed(s3) if s3.refuses else 'server_uploads = ["https://store.example.org/*"]\n'
    stored, _, device = trained(tmp_path / "with", s3, policy)
    assert stored == without
    said = "it answers 403" if s3.refuses else "is not allowed by server_uploads"
    assert device.count(said) == 1
    assert s3.keys == [MARKER]


def test_a_server_that_is_killed_in_a_round_goes_on_and_removes_what_was_left(
    tmp_path: Path, s3: S3Server, without: list[str]
) -> None:
    s3.gate = threading.Event()
    s3.free = 2  # those of the first round
    with fleet_in(tmp_path / "with", s3, allowed(s3)) as fleet:
        job = fleet.submit("job.toml", *CHANGES)
        fleet.until(lambda: len(s3.put) == 4)
        assert fleet.committed(job) == 1
        link = re.search(r"link at 127.0.0.1:(\d+)", fleet.log("server"))
        assert link is not None
        fleet.kill("server")
        s3.gate.set()
        # What a device sends to the end, as nobody has told it that the server is gone.
        fleet.until(lambda: len(s3.keys) == 3)
        fleet.start_server(
            "server", "--address", f"127.0.0.1:{link[1]}", "--uploads", f"s3:{BUCKET}/updates"
        )
        fleet.until(lambda: fleet.committed(job) == 2)
        assert digests(fleet, job)[0] == without[0]
    assert s3.keys == [MARKER]
