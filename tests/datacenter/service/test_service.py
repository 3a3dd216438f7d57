"""The service: its files, its lock on the state directory, and how it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.datacenter.conftest import wait_until

import isthmus_datacenter.service.service
from isthmus.errors import UpdateError, UserError
from isthmus.wire import link_pb2
from isthmus_datacenter.messages import Command
from isthmus_datacenter.service.rank_group import RankGroup
from isthmus_datacenter.service.service import DatacenterService


@pytest.fixture
def service_without_ranks(
    make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DatacenterService, int]]:
    """A service with a run open whose ranks are never started; and the bytes of its model."""

    async def execute(
        group: RankGroup, command: Command, *more: Any
    ) -> tuple[dict[str, Any], list[str]]:
        return {"examples": 50, "note": ""}, []

    service = DatacenterService("own", 1, tmp_path / "state")
    setup = make_setup("Table")
    request = link_pb2.Request(id="open", open=setup.open_request("run"))
    with monkeypatch.context() as patch:
        patch.setattr(RankGroup, "execute", execute)
        asyncio.run(service.work(request, None, lambda progress: None))
    yield service, setup.layout.nbytes
    service.close()


def train_request(run_id: str = "run") -> link_pb2.Request:
    return link_pb2.Request(id="one", train_steps=link_pb2.TrainSteps(run_id=run_id))


def test_a_buffer_fits_exactly_one_model_of_the_open_run(
    service_without_ranks: tuple[DatacenterService, int],
) -> None:
    service, nbytes = service_without_ranks
    for size in (5, nbytes + 1, 1 << 50):
        with pytest.raises(UpdateError, match=f"a model of {size} bytes was announced"):
            service.buffer(train_request(), size)
    with pytest.raises(UserError, match="'other' is not open"):
        service.buffer(train_request("other"), nbytes)
    package = link_pb2.OpenRun(run_id="run")
    assert service.buffer(link_pb2.Request(id="two", open=package), 1 << 50) is None
    assert not list((service.state / "exchange").iterdir())
    assert len(service.buffer(train_request(), nbytes)) == nbytes
    (file,) = (service.state / "exchange").iterdir()
    assert file.stat().st_blocks * 512 >= nbytes  # allocated on the disk, not sparse
    service.acknowledged(train_request(), False, "cancelled before its model was complete")
    assert not list((service.state / "exchange").iterdir())


def test_a_full_disk_leaves_no_files(
    service_without_ranks: tuple[DatacenterService, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isthmus_datacenter.service.transfer_files.os.posix_fallocate", full)
    service, nbytes = service_without_ranks
    with pytest.raises(OSError, match="No space"):
        service.buffer(train_request(), nbytes)
    train = link_pb2.TrainSteps(run_id="run", until_step=1, hand_back=True)
    request = link_pb2.Request(id="two", train_steps=train)
    with pytest.raises(UserError, match=r"^the state directory .* cannot be used: .*No space left"):
        asyncio.run(service.work(request, None, lambda progress: None))
    assert not list((service.state / "exchange").iterdir())


def test_a_gradient_request_needs_a_model(
    service_without_ranks: tuple[DatacenterService, int],
) -> None:
    work = link_pb2.MeanGradient(run_id="run", until_step=1)
    request = link_pb2.Request(id="one", mean_gradient=work)
    with pytest.raises(UpdateError, match="has no model"):
        asyncio.run(service_without_ranks[0].work(request, None, lambda progress: None))


def test_a_state_directory_has_one_service(
    warm_datacenter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isthmus_datacenter.service.service, "LOCK_SECONDS", 0.0)
    with pytest.raises(UserError, match="another datacenter service uses the state directory"):
        DatacenterService("second", 2, warm_datacenter.service.state)
    # Who can open the file can hold its lock.
    assert (warm_datacenter.service.state / "lock").stat().st_mode & 0o777 == 0o600


def test_an_idle_service_leaves_on_a_signal(tmp_path: Path) -> None:
    words = ("datacenter", "launch", "--ranks", "1", "--server", "127.0.0.1:1")
    service, output = forked.start((*words, "--state", str(tmp_path)), tmp_path, os.environ)
    wait_until(lambda: list(tmp_path.glob("logs/*/attempt_0/*/stderr.log")))
    os.kill(service.pid, signal.SIGUSR1)
    service.join()
    assert service.exitcode == 0
    assert "leaving: idle" in os.read(output.fileno(), 1 << 16).decode()


def test_a_leaving_service_completes_its_round(start_datacenter: Any, make_setup: Any) -> None:
    driver = start_datacenter(ranks=1)
    driver.open("leaving", make_setup("Table"))

    async def leave_during_a_round() -> int:
        train = link_pb2.TrainSteps(run_id="leaving", until_step=20)
        request = link_pb2.Request(id="last", train_steps=train)
        work = asyncio.create_task(driver.service.work(request, None, lambda progress: None))
        while not driver.service.running:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        assert not work.done()
        driver.service.leave(1000.0)
        await driver.service.wait_to_leave()
        assert work.done()
        late = link_pb2.Request(id="late", train_steps=train)
        with pytest.raises(TimeoutError):  # a refused request would be retried at once
            await asyncio.wait_for(driver.service.work(late, None, lambda progress: None), 0.1)
        return work.result()[0].trained.steps

    assert driver.run(leave_during_a_round()) == 20
